"""Copies of weights in the compute dtype, made from the master weights on the devices."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from jzero.mesh import ZeroMesh

_BLOCK = 32 * 2**20  # bytes of master weights that are gathered at a time


def compute_copy(mesh: ZeroMesh, weight: jax.Array, want: jax.ShapeDtypeStruct) -> jax.Array:
    """Master weights cast, freed of padding, and gathered where the copy is kept whole.

    Block by block, so that there is never a second whole array.

    Arguments:
      mesh: which the arrays are on.
      weight: as stored.
      want: the copy's shape, dtype and sharding.
    """
    target, blocks = want.sharding, weight.size * weight.dtype.itemsize / _BLOCK
    assert isinstance(target, NamedSharding) and isinstance(weight.sharding, NamedSharding)
    free = [d for d in range(want.ndim) if _axes(weight.sharding, d) == _axes(target, d) == ()]
    gathered = not weight.sharding.is_equivalent_to(target, want.ndim)
    if not free or blocks <= 1 or not gathered:
        out = _whole(want.shape, str(want.dtype), target)(weight)
        mesh.settle(out)
        return out
    dim = next((d for d in free if want.shape[d] >= blocks), max(free, key=want.shape.__getitem__))
    length = math.ceil(want.shape[dim] / blocks)
    out = jnp.zeros(want.shape, want.dtype, device=target)
    write = _block(dim, length, target)
    for start in range(0, want.shape[dim], length):
        out = write(out, weight, start)
        mesh.settle(out)
    return out


def _axes(sharding: NamedSharding, dim: int) -> tuple[str, ...]:
    """The mesh axes that shard a dim."""
    entry = sharding.spec[dim] if dim < len(sharding.spec) else None
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


@functools.cache
def _whole(shape: tuple[int, ...], dtype: str, target: NamedSharding) -> Callable[..., jax.Array]:
    def copy(weight):
        return weight.astype(dtype)[tuple(map(slice, shape))]

    return jax.jit(copy, out_shardings=target)


@functools.cache
def _block(dim: int, length: int, target: NamedSharding) -> Callable[..., jax.Array]:
    def copy(out, weight, start):
        block = lax.dynamic_slice_in_dim(weight, start, length, dim).astype(out.dtype)
        shape = [length if d == dim else n for d, n in enumerate(out.shape)]
        block = lax.with_sharding_constraint(block[tuple(map(slice, shape))], target)
        return lax.dynamic_update_slice_in_dim(out, block, start, dim)

    return jax.jit(copy, out_shardings=target, donate_argnums=0)
