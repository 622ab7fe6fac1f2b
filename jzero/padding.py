"""Padding: leaves that no dimension divides are stored with zeros at the end of one dimension.

Only stored arrays are padded. What the user sees, a checkpoint, and whatever combines the elements
of a leaf (a norm, a mean, a factored statistic) have the true shape.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.errors import JzeroError
from jzero.partition import Leaf


def pad(leaf: Leaf, x: Any) -> Any:
    """An array of the leaf's true shape in its stored shape, with zeros at the end.

    Arguments:
      leaf: where the array lives.
      x: a JAX array, a tracer or a NumPy array of `leaf.array.shape`.

    Returns:
      An array of `leaf.stored_shape`, of the same kind and dtype; `x` itself if nothing is padded.

    Raises:
      JzeroError: x has another shape.
    """
    _check(leaf, x, leaf.array.shape)
    if not leaf.is_padded:
        return x
    assert leaf.dim is not None
    widths = [(0, 0)] * x.ndim
    widths[leaf.dim] = (0, leaf.padded - x.shape[leaf.dim])
    return np.pad(x, widths) if isinstance(x, np.ndarray) else jnp.pad(x, widths)


def unpad(leaf: Leaf, x: Any) -> Any:
    """The inverse of `pad`.

    Arguments:
      leaf: where the array lives.
      x: a JAX array, a tracer or a NumPy array of `leaf.stored_shape`, or already of the true one
        (at stage 0 a leaf is kept whole, without padding).

    Returns:
      An array of `leaf.array.shape`, of the same kind and dtype; `x` itself if nothing is padded.

    Raises:
      JzeroError: x has another shape.
    """
    if tuple(x.shape) == leaf.array.shape:
        return x
    _check(leaf, x, leaf.stored_shape)
    assert leaf.dim is not None
    size = leaf.array.shape[leaf.dim]
    if isinstance(x, np.ndarray):
        return x[(slice(None),) * leaf.dim + (slice(size),)]
    return lax.slice_in_dim(x, 0, size, axis=leaf.dim)


def zero_padding(leaf: Leaf, x: jax.Array) -> jax.Array:
    """An array in stored shape, with whatever is in its padding made zero, element by element.

    It moves nothing between devices, as unpadding and padding again would.

    Arguments:
      leaf: where the array lives.
      x: an array of `leaf.stored_shape`.

    Raises:
      JzeroError: x has another shape.
    """
    _check(leaf, x, leaf.stored_shape)
    if not leaf.is_padded:
        return x
    assert leaf.dim is not None
    real = lax.broadcasted_iota(jnp.int32, x.shape, leaf.dim) < leaf.array.shape[leaf.dim]
    return jnp.where(real, x, jnp.zeros((), x.dtype))


def _check(leaf: Leaf, x: Any, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise JzeroError(f"{leaf.path}: expected an array of shape {shape}, found {tuple(x.shape)}")
