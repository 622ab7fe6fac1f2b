"""A cast to bfloat16 that XLA leaves where it is written.

XLA:TPU takes a cast of stacked weights out of their layer loop, whatever stands before it, and then
holds a bfloat16 copy of every shard: 2 bytes a parameter over the devices. It does not know these
integer operations for a cast.
"""

import jax
import jax.numpy as jnp
from jax import lax


def to_bfloat16(x: jax.Array) -> jax.Array:
    """Rounds to nearest, ties to even, as `x.astype(jnp.bfloat16)` does.

    Arguments:
      x: float32, any shape.

    >>> to_bfloat16(jnp.float32([1.0, 1.00390625, 1.01171875]))  # the middle: to the even one
    Array([1, 1, 1.01562], dtype=bfloat16)
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = jnp.where(jnp.isnan(x), 0x7FC0, rounded)  # a NaN's bits would carry into infinity's
    return lax.bitcast_convert_type(rounded.astype(jnp.uint16), jnp.bfloat16)
