"""What an Optax update does with its leaves, found by walking its jaxpr; nothing is computed.

Two questions. Does it treat each element of a leaf alone, so that a padded leaf may be updated as
it is stored? And does it look at a leaf's gradient at all, or is the leaf frozen?
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from jax.extend import core
from jax.interpreters import partial_eval

from jzero.elementwise import MIXED, UNIFORM, Kind, Walk
from jzero.optimizer_state import match
from jzero.partition import Leaf
from jzero.paths import flatten, path_name, unflatten


def reads_across(tx: optax.GradientTransformation, params: Any, **extra: Any) -> dict[str, bool]:
    """Whether an update, or the first state, combines different elements of a parameter's arrays.

    Norms, means, factored statistics, matrix products and random draws of a leaf's shape do; adam,
    lion or momentum treat each element alone, so that a leaf may be updated with its padding. A sum
    over what is certainly zero in the padding (the global norm of the gradients) is harmless, given
    that gradients and parameters are zero there: see `jzero.padding.zero_padding`.

    Arguments:
      tx: any Optax transformation.
      params: pytree of `jax.ShapeDtypeStruct`s of true shapes; None where a parameter is frozen.
      extra: further arguments of its update, such as value=jax.ShapeDtypeStruct((), "float32").

    Returns:
      path of each parameter -> whether its padding must be taken away before the update. True
      wherever that is not certain.
    """
    try:
        found = _read_across(tx, params, extra)
    except Exception:  # it takes other arguments, or holds arrays of its own: nothing is certain
        found = None
    return {path: found is None or path in found for path in flatten(params)}


def _read_across(
    tx: optax.GradientTransformation, params: Any, extra: Mapping[str, Any]
) -> set[str] | None:
    trace = _Trace.of(tx, params, extra)
    wider = _Trace.of(tx, jax.tree.map(_widened, params), extra)
    if _literals(trace.jaxpr.jaxpr) != _literals(wider.jaxpr.jaxpr):
        return None  # a number in it was computed from a shape
    walk = Walk(trace.shapes)
    outs = walk.closed(trace.jaxpr, [trace.kind(name, x) for name, x in trace.inputs])
    for (name, x), kind in zip(trace.outputs, outs, strict=True):
        home = trace.home(name, x)
        if home is not None and (kind.mixed or kind.leaf not in (None, home)):
            walk.found.add(home)
        if kind.leaf is not None and kind.leaf != home:
            walk.found.add(kind.leaf)
    return walk.found


def uses_gradient(tx: optax.GradientTransformation, params: Any, **extra: Any) -> dict[str, bool]:
    """Whether an update depends on the gradient of each parameter at all.

    It does not where `optax.set_to_zero` rules (through `optax.partition` or `optax.masked`), and
    nothing else, such as a global norm, looks at the gradient first.

    Arguments:
      tx, params, extra: as for `reads_across`.

    Returns:
      path of each parameter -> whether its gradient matters. True wherever that is not certain.
    """
    try:
        trace = _Trace.of(tx, params, extra)
    except Exception:  # it takes other arguments: the step itself will say which
        return dict.fromkeys(flatten(params), True)
    jaxpr = trace.jaxpr.jaxpr
    _, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return dict(zip(trace.shapes, used, strict=False))  # gradients are the first inputs


def updates_as_stored(
    tx: optax.GradientTransformation,
    params: Any,
    leaves: Mapping[str, Leaf],
    state: Any,
    **extra: Any,
) -> bool:
    """Whether an update may run on padded arrays just as they are stored.

    Arguments:
      tx, params: as for `reads_across`.
      leaves: path of each parameter -> where it lives.
      state: the optimizer's state as `place_state` returns it.
      extra: as for `reads_across`.

    Returns:
      True if no padded parameter is read across, and the state of stored parameters has the stored
      shapes. Otherwise everything padded must be unpadded before an update and padded after it.
    """

    def stored(leaf: Leaf) -> tuple[int, ...]:
        return leaf.stored_shape if leaf.shard_state else leaf.array.shape

    flat = flatten(params)
    padded = [path for path in flat if stored(leaves[path]) != leaves[path].array.shape]
    padded_state = [x for x in jax.tree.leaves(state) if stored(x) != x.array.shape]
    if not padded and not padded_state:
        return True
    across = reads_across(tx, params, **extra) if padded else {}
    if any(across[path] for path in padded):
        return False
    as_stored = {
        path: jax.ShapeDtypeStruct(stored(leaves[path]), x.dtype) for path, x in flat.items()
    }
    try:
        found = jax.eval_shape(tx.init, unflatten(params, as_stored))
    except Exception:  # it holds arrays of its own
        return False
    return [x.shape for x in jax.tree.leaves(found)] == [stored(x) for x in jax.tree.leaves(state)]


@dataclass(frozen=True)
class _Trace:
    """tx.update and tx.init on abstract values; inputs and outputs by part and path within it."""

    shapes: Mapping[str, tuple[int, ...]]
    jaxpr: Any
    inputs: Sequence[tuple[tuple[str, str], Any]]
    outputs: Sequence[tuple[tuple[str, str], Any]]

    @classmethod
    def of(cls, tx: optax.GradientTransformation, params: Any, extra: Mapping[str, Any]):
        args = (params, jax.eval_shape(tx.init, params), params, dict(extra))

        def both(grads, state, params, extra):
            return *tx.update(grads, state, params, **extra), tx.init(params)

        jaxpr, out = jax.make_jaxpr(both, return_shape=True)(*args)
        shapes = {path: tuple(x.shape) for path, x in flatten(params).items()}
        inputs = _named(("gradient", "state", "parameter", "extra"), args)
        return cls(shapes, jaxpr, inputs, _named(("gradient", "state", "state"), out))

    def home(self, name: tuple[str, str], x: Any) -> str | None:
        """The parameter of whose shape and storage an input or output is."""
        part, path = name
        if part == "extra" or x.size == 1:
            return None
        if part != "state":
            return path
        found = match(path, tuple(x.shape), self.shapes)
        return found if found is not None and self.shapes[found] == tuple(x.shape) else None

    def kind(self, name: tuple[str, str], x: Any) -> Kind:
        if x.size == 1:
            return UNIFORM
        home = self.home(name, x)
        return MIXED if home is None else Kind(home, zero=name[0] != "state")


def _named(parts: Sequence[str], trees: Sequence[Any]) -> list[tuple[tuple[str, str], Any]]:
    return [
        ((part, path_name(key_path)), x)
        for part, tree in zip(parts, trees, strict=True)
        for key_path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _widened(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(s + (s > 1) for s in x.shape), x.dtype)


def _literals(jaxpr: Any) -> list[Any]:
    """The primitives of a jaxpr, and the numbers written into it."""
    found: list[Any] = []
    for eqn in jaxpr.eqns:
        found.append(eqn.primitive.name)
        found += [str(v.val) for v in eqn.invars if isinstance(v, core.Literal)]
        for inner in core.jaxprs_in_params(eqn.params):
            found += _literals(inner)
    return found
