"""What gradients still need after the last micro-batch: means, and the sums that were put off."""

import jax
import jax.numpy as jnp
from jax import lax

from jzero.gather import manually, scatter
from jzero.layout import Layout
from jzero.recipe import Recipe

_LARGE = 64 << 20
"""Bytes of a stacked gradient from which a copy costs more than a collective for each layer."""


def finish(layout: Layout, grads: dict[str, jax.Array], factor) -> dict[str, jax.Array]:
    """Every gradient as the optimizer takes it.

    At stage 1 large ones in turn, the smallest first: a whole gradient is freed before the next
    shard needs room.

    Arguments:
      layout: where everything lives.
      grads: path -> gradient, or sum of gradients, inside the manual region.
      factor: float32 scalar that makes a mean of a sum; None where it is one.
    """
    done, last = {}, None
    for path in sorted(grads, key=lambda p: grads[p].size):
        leaf, grad = layout.leaves[path], grads[path]
        recipe = layout.recipe(leaf, accumulate=False)
        in_turn = leaf.shard_state and not leaf.shard_gradient and _is_large(recipe, grad)
        if in_turn and last is not None:
            grad, last = lax.optimization_barrier((grad, last))
        done[path] = _finish(layout, recipe, grad, factor)
        last = done[path] if in_turn else last
    return done


def squares(layout: Layout, grads: dict[str, jax.Array]) -> jax.Array:
    """Each gradient's squared norm over all shards, once they are reduced.

    Padding is zero and adds nothing.

    Arguments:
      layout: where everything lives.
      grads: path -> gradient, inside the manual region.

    Returns:
      float32 [leaves], in the order of `layout.differentiated`.
    """
    leaves = layout.differentiated
    if not leaves:
        return jnp.zeros((0,), jnp.float32)
    own = jnp.stack([jnp.sum(jnp.square(grads[p].astype(jnp.float32))) for p in leaves])
    sharded = jnp.array([leaf.shard_state for leaf in leaves.values()])
    # Over replicas too, which have the same shards: so XLA joins it with the loss's sum.
    total = lax.psum(jnp.where(sharded, own, 0), layout.mesh.manual_data_axes)
    return jnp.where(sharded, total / layout.mesh.replicas, own)


def _finish(layout: Layout, recipe: Recipe, grad, factor):
    mesh, dtype, leaf = layout.mesh, layout.policy.communication, recipe.leaf

    def mean(g):
        return g if factor is None else g * factor.astype(g.dtype)

    def ready(g):
        # A mean first: the reduction may be in fp16, where a mean fits, and a sum may not.
        return mean(g).astype(dtype)

    if not leaf.shard_state:
        return manually(recipe, lambda g: lax.psum(g, mesh.manual_data_axes), ready(grad))
    if not leaf.shard_gradient:  # of stage 1, or of a persistent leaf: once per step
        grad = _scatter_by_layers(recipe, grad, ready)
    else:
        grad = ready(grad) if mesh.replica_axes else mean(grad)
    if mesh.replica_axes:
        names = mesh.manual_names(mesh.replica_axes)
        return manually(recipe, lambda g: lax.psum(g, names), grad)
    return grad


def _scatter_by_layers(recipe: Recipe, x, ready) -> jax.Array:
    """Reduce-scatters a whole gradient, a large stacked one layer by layer.

    The sharded dimension is major in a layer but not in the stack, of which XLA would make a
    transposed copy.
    """
    if recipe.leaf.array.layer_axes[:1] != (0,) or not _is_large(recipe, x):
        return scatter(recipe, ready(x))

    def layer(i, shards):
        piece = lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
        return lax.dynamic_update_index_in_dim(shards, scatter(recipe, ready(piece)), i, 0)

    one = jax.eval_shape(lambda x: scatter(recipe, ready(x[0])), x)
    shards = jnp.zeros((x.shape[0], *one.shape), one.dtype)
    x, shards = lax.optimization_barrier((x, shards))  # no room for them before it is their turn
    return lax.fori_loop(0, x.shape[0], layer, shards)


def _is_large(recipe: Recipe, x) -> bool:
    """Whether a gradient is worth a collective of its own; smaller ones XLA combines."""
    return x.size * jnp.dtype(recipe.reduce_dtype).itemsize >= _LARGE
