"""The collectives of one parameter: gathered where it is read, its gradient reduce-scattered.

The transpose of a read is the reduction, so ZeRO-3's backward needs no code of its own: ZeRO paper,
section 5.3.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jzero.recipe import Recipe
from jzero.rounding import to_bfloat16


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def read_with_tap(recipe: Recipe, value, tap):
    """A whole parameter, whose gradient goes to `tap`, zeros that forward never reads.

    A cotangent has its primal's dtype: the tap, not the fp32 master, gets the gradient, so that it
    is reduced and kept in the compute dtype.
    """
    return whole(recipe, value)


def _forward(recipe: Recipe, value, tap):
    return whole(recipe, value), None


def _backward(recipe: Recipe, _, cotangent):
    return None, reduce(recipe, cotangent)


read_with_tap.defvjp(_forward, _backward)


def cast(recipe: Recipe, value) -> jax.Array:
    """A parameter in the dtype in which the model computes."""
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    if recipe.by_bits and (value.dtype, recipe.dtype) == (jnp.float32, "bfloat16"):
        return to_bfloat16(value)
    return value.astype(recipe.dtype)


def whole(recipe: Recipe, value) -> jax.Array:
    """Cast, then gather: no whole copy in the storage dtype ever exists."""
    leaf = recipe.leaf
    x = cast(recipe, value)
    if not leaf.shard_parameter:
        return x
    dim = recipe.dim(x.ndim)
    with jax.named_scope("zero_gather"):
        x = manually(recipe, lambda x: lax.all_gather(x, recipe.axes, axis=dim, tiled=True), x)
    return lax.slice_in_dim(x, 0, recipe.true_size(), axis=dim) if leaf.is_padded else x


def reduce(recipe: Recipe, cotangent) -> jax.Array:
    """The gradient of one read: summed over the ZeRO group into shards, or still local."""
    leaf = recipe.leaf
    x = cotangent.astype(recipe.reduce_dtype)
    if not leaf.shard_gradient:
        return x
    with jax.named_scope(f"zero_reduce_scatter/{leaf.path}"):
        return scatter(recipe, x)


def scatter(recipe: Recipe, x) -> jax.Array:
    """Pads and reduce-scatters a whole gradient over the ZeRO group."""
    leaf = recipe.leaf
    dim = recipe.dim(x.ndim)
    if leaf.is_padded:
        widths = [(0, 0)] * x.ndim
        widths[dim] = (0, leaf.padded - x.shape[dim])
        x = jnp.pad(x, widths)
    return manually(
        recipe,
        lambda x: lax.psum_scatter(x, recipe.axes, scatter_dimension=dim, tiled=True),
        x,
    )


def manually(recipe: Recipe, collective: Callable[[jax.Array], jax.Array], x) -> jax.Array:
    """Runs a collective on a leaf, or a gradient of it, where every mesh axis is manual.

    Otherwise the partitioner would first gather a dimension that a tensor axis shards, and XLA:CPU
    aborts on a bf16 reduction beside an automatic axis, even one of size 1.
    """
    spec = recipe.other_spec(x.ndim)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=set(recipe.auto_axes), check_vma=False
    )(x)


def whole_global(recipe: Recipe, value) -> jax.Array:
    """The same read outside the manual region, for inference: a reshard at the place of use."""
    leaf = recipe.leaf
    x = cast(recipe, value)
    if not leaf.shard_parameter:
        return x
    assert recipe.mesh is not None
    x = lax.with_sharding_constraint(x, NamedSharding(recipe.mesh, recipe.other_spec(x.ndim)))
    if leaf.is_padded:
        x = lax.slice_in_dim(x, 0, recipe.true_size(), axis=recipe.dim(x.ndim))
    return x
