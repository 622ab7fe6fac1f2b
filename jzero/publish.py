"""From updated master weights to the parameters that the model reads: cast, and gathered."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax

from jzero.layout import Layout
from jzero.partition import STAGES, Leaf

Arrays = dict[str, jax.Array]
"""By the parameter's path."""


def publish(layout: Layout, masters: Arrays, old: Arrays) -> Arrays:
    """The parameters as stored between steps, from updated master weights.

    Arguments:
      layout: where everything lives.
      masters: path -> float32 weight, as the optimizer left it.
      old: path -> the parameters before the step, whose buffers are written.

    Returns:
      path -> parameter: cast, and below stage 3 gathered.
    """
    new, sharded = dict(old), {}
    for path, leaf in layout.trained.items():
        if not layout.has_parameter(leaf):
            continue
        if leaf.shard_parameter or not leaf.shard_state:
            new[path] = masters[path].astype(layout.compute_dtype(leaf))
        else:
            sharded[path] = leaf
    return new | _gather(layout, sharded, masters, old) if sharded else new


def _gather(layout: Layout, leaves: Mapping[str, Leaf], masters: Arrays, old: Arrays) -> Arrays:
    """Gathers updated shards into the donated whole copies.

    Of stacked leaves one layer at a time, so that no second full set of parameters ever exists, and
    of all stacks the same layer, so that a compiler can combine what it sends.
    """
    mesh = layout.mesh
    stacks: dict[int | None, list[str]] = {}  # by the number of layers
    for path, leaf in leaves.items():
        stacks.setdefault(_layers(layout, leaf), []).append(path)

    def local(shards: Arrays, buffers: Arrays) -> Arrays:
        def layer(i, new: Arrays) -> Arrays:
            def one(path: str, buffer: jax.Array) -> jax.Array:
                shard = lax.dynamic_index_in_dim(shards[path], i, 0, keepdims=False)
                piece = _whole(layout, leaves[path], shard)
                return lax.dynamic_update_index_in_dim(buffer, piece, i, 0)

            return {path: one(path, buffer) for path, buffer in new.items()}

        new: Arrays = {}
        for number, paths in stacks.items():
            if number is None:
                new |= {path: _whole(layout, leaves[path], shards[path]) for path in paths}
            else:
                new |= lax.fori_loop(0, number, layer, {path: buffers[path] for path in paths})
        return new

    def specs(sharded: bool):
        return {path: x.spec(mesh.manual_shard_axes, sharded) for path, x in leaves.items()}

    return jax.shard_map(
        local,
        mesh=mesh.manual,
        in_specs=(specs(True), specs(False)),
        out_specs=specs(False),
        axis_names=set(mesh.manual.axis_names),
        check_vma=False,
    )({path: masters[path] for path in leaves}, {path: old[path] for path in leaves})


def _layers(layout: Layout, leaf: Leaf) -> int | None:
    """How many layers of a leaf are gathered in turn; None for all at once.

    At stage 3 only those leaves are here that the persistence threshold keeps whole: small ones.
    """
    array = leaf.array
    stacked = array.layer_axes[:1] == (0,) and not STAGES[layout.stage].parameters
    return array.shape[0] if stacked else None


def _whole(layout: Layout, leaf: Leaf, shard: jax.Array) -> jax.Array:
    """Casts and gathers a leaf, or a layer of it."""
    assert leaf.dim is not None
    axis = leaf.dim - (len(leaf.array.shape) - shard.ndim)
    with jax.named_scope(f"zero_gather_updated/{leaf.path}"):
        x = shard.astype(layout.compute_dtype(leaf))
        x = lax.all_gather(x, layout.mesh.manual_shard_axes, tiled=True)
    # Moved afterwards: gathered on a minor dimension, XLA lays whole stacks out transposed.
    x = jnp.moveaxis(x.reshape(-1, *shard.shape), 0, axis)
    x = x.reshape(*shard.shape[:axis], -1, *shard.shape[axis + 1 :])
    return lax.slice_in_dim(x, 0, leaf.array.shape[leaf.dim], axis=axis) if leaf.is_padded else x
