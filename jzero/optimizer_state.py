"""Where the state of any Optax transformation lives: each leaf follows its parameter, or its shape.

Optax does not say which state leaf belongs to which parameter (`optax.tree_map_params` fails for
masked, partitioned and factored states), so a leaf is matched by path and believed only by shape.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, takewhile
from typing import Any

import jax
import optax

from jzero.errors import JzeroError
from jzero.mesh import ZeroMesh
from jzero.partition import Array, Leaf, choose_dim, is_shardable
from jzero.paths import flatten, path_name

# Beside the parameters' own shapes, fewer elements than this per device are not worth a collective:
# coefficients, short histories, keys as plain integers.
_FEW = 8


def place_state(
    tx: optax.GradientTransformation, params: Any, leaves: Mapping[str, Leaf], mesh: ZeroMesh
) -> Any:
    """Decides for each leaf of an optimizer's state which dimension is sharded, and why.

    Arguments:
      tx: any Optax transformation.
      params: the trained parameters as `jax.ShapeDtypeStruct`s of their true shapes (masters);
        None where a parameter is frozen.
      leaves: path of each parameter -> where it lives.
      mesh: the mesh and its ZeRO axes.

    Returns:
      A pytree with the structure of `jax.eval_shape(tx.init, params)`, a `Leaf` for each array.
      Its `shard_state` says whether the array is sharded; its path is the one within the state.

    Raises:
      JzeroError: a parameter without a leaf.
    """
    shapes = {path: tuple(x.shape) for path, x in flatten(params).items()}
    for path in shapes:
        if path not in leaves:
            raise JzeroError(f"{path}: the optimizer has this parameter, but it has no Leaf")
    own = {path: leaves[path] for path in shapes}  # without the frozen ones
    none_sharded = mesh.group_size > 1 and not any(leaf.shard_state for leaf in own.values())

    def one(key_path, x) -> Leaf:
        array = Array(path_name(key_path), tuple(x.shape), str(x.dtype))
        path = match(array.path, array.shape, shapes)
        leaf = _place_one(array, None if path is None else own[path], mesh.group_size)
        if none_sharded and leaf.dim is not None:
            leaf = _whole(leaf.array, "whole: no optimizer state is sharded at this stage")
        return leaf

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(tx.init, params))


def _place_one(array: Array, parameter: Leaf | None, group: int) -> Leaf:
    if not is_shardable(array.dtype):
        return _whole(array, "whole: a PRNG key")
    if not array.shape:
        return _whole(array, "whole: a scalar")
    if parameter is None:
        return _by_shape(array, None, group)
    shape = parameter.array.shape
    extra = len(array.shape) - len(shape)
    if shape and extra >= 0 and array.shape[extra:] == shape:
        return _follow(array, parameter, extra)
    return _by_shape(array, parameter.array, group)


def _follow(array: Array, leaf: Leaf, extra: int) -> Leaf:
    """A leaf of its parameter's shape, or of several of them stacked along `extra` dimensions."""
    other = ((),) * extra + leaf.array.other_axes if leaf.array.other_axes else ()
    layers = tuple(d + extra for d in leaf.array.layer_axes)
    array = replace(array, layer_axes=layers, other_axes=other)
    like = (
        f"parameter {leaf.path}" if not extra else f"{array.shape[:extra]} of parameter {leaf.path}"
    )
    if leaf.dim is None:
        return _whole(array, f"{leaf.reason}, like {like}")
    if not leaf.shard_state:
        return _whole(array, f"whole: no state of parameter {leaf.path} is sharded")
    reason = f"like {like}, whose {leaf.reason}"
    return Leaf(array, leaf.dim + extra, leaf.padded, True, False, False, reason)


def _by_shape(array: Array, parameter: Array | None, group: int) -> Leaf:
    """A leaf of a shape of its own: a factored statistic, a projection, a flattened tree."""
    taken: set[int] = set()
    if parameter is not None:
        images = _images(array.shape, parameter.shape)
        layers = {d for d, found in images.items() if found & set(parameter.layer_axes)}
        other: list[tuple[str, ...]] = [()] * len(array.shape)
        clear = bool(parameter.other_axes) and _embeds(array.shape, parameter.shape)
        for d, found in images.items():
            if clear and len(found) == 1:
                other[d] = parameter.other_axes[next(iter(found))]
        array = replace(
            array,
            layer_axes=tuple(sorted(layers)),
            other_axes=tuple(other) if any(other) else (),
        )
        taken = layers | {d for d, axes in enumerate(other) if axes}
    if group > 1 and 0 < array.size < _FEW * group:
        return _whole(array, f"whole: {array.size} elements are too few to share out")
    dim, padded, reason = choose_dim(array.shape, group, taken)
    if dim is None:
        return _whole(array, reason)
    return Leaf(array, dim, padded, True, False, False, f"by its own shape: {reason}")


def _whole(array: Array, reason: str) -> Leaf:
    return Leaf(array, None, 0, False, False, False, reason)


def match(path: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """The parameter that a state leaf belongs to.

    Arguments:
      path: the leaf's path within the state, such as "0/mu/layers/kernel".
      shape: its shape.
      shapes: path -> shape of each parameter.

    Returns:
      Of the parameters whose path the leaf's path holds, the one that fits best: of equal shape
      first, then one that the shape ends with, then one whose dimensions include it, then one that
      ends the path, then the longest. Where no path is held, the parameter of equal shape whose
      path ends alike, or the only one of that shape. Otherwise None.

    Example:
      >>> match("0/mu/layers/kernel", (4, 8), {"kernel": (4, 8), "layers/kernel": (4, 8)})
      'layers/kernel'
    """
    candidates = list(_held(path, shapes))
    if candidates:

        def rank(candidate: tuple[str, bool, int]):
            name, at_end, length = candidate
            own = shapes[name]
            ends = bool(own) and shape[-len(own) :] == own
            return (shape == own, ends, _embeds(shape, own), at_end, length)

        return max(candidates, key=rank)[0]
    # The transformation may see only a part of the tree, without the names above it.
    equal = {name: _shared_end(path, name) for name, own in shapes.items() if own == shape}
    best = max(equal, key=lambda name: equal[name], default=None)
    return best if best is not None and (len(equal) == 1 or equal[best]) else None


def _shared_end(path: str, name: str) -> int:
    """How many names two paths have in common at their end."""
    pairs = zip(reversed(path.split("/")), reversed(name.split("/")), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _held(path: str, shapes: Mapping[str, Any]) -> Iterator[tuple[str, bool, int]]:
    """(parameter, whether it ends the path, its number of names) for each that the path holds."""
    if "" in shapes:  # the parameters are one array, not a tree
        yield "", True, 0
    names = path.split("/")
    for first in range(len(names)):
        for last in range(first + 1, len(names) + 1):
            name = "/".join(names[first:last])
            if name in shapes:
                yield name, last == len(names), last - first


def _embeds(shape: tuple[int, ...], parameter: tuple[int, ...]) -> bool:
    """Whether a shape is the parameter's with dimensions left out."""
    return any(
        tuple(parameter[d] for d in kept) == shape
        for kept in combinations(range(len(parameter)), len(shape))
    )


def _images(shape: tuple[int, ...], parameter: tuple[int, ...]) -> dict[int, set[int]]:
    """For each dimension of a shape, the parameter's dimensions that it may stand for."""
    images: dict[int, set[int]] = {d: set() for d in range(len(shape))}
    for kept in combinations(range(len(parameter)), len(shape)):
        if tuple(parameter[d] for d in kept) == shape:
            for d, found in enumerate(kept):
                images[d].add(found)
    if not any(images.values()):
        for d in range(min(len(shape), len(parameter))):
            if shape[d] == parameter[d]:
                images[d].add(d)
    return images
