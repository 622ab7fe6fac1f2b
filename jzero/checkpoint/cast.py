"""Changing the dtype of weights on the way out or in."""

import jax.numpy as jnp
import numpy as np

from jzero.errors import JzeroError
from jzero.partition import is_float


def castable(dtype: str, wanted: str) -> bool:
    """Whether values of a dtype may be put into another: floats into floats alone."""
    return dtype == wanted or (is_float(dtype) and is_float(wanted))


def cast(name: str, values: np.ndarray, dtype: str) -> np.ndarray:
    """Values in another dtype, rounded to the nearest where it is narrower.

    Arguments:
      name: the leaf's, for the error.
      values: of a dtype that is `castable`.
      dtype: NumPy's name.

    Raises:
      JzeroError: a number that is finite but beyond the dtype's largest.
    """
    wanted = jnp.dtype(dtype)
    if values.dtype == wanted:
        return values
    with np.errstate(over="ignore"):
        found = values.astype(wanted)
    if jnp.finfo(wanted).max < jnp.finfo(values.dtype).max:
        lost = np.isfinite(values) & ~np.isfinite(found)
        if lost.any():
            raise JzeroError(
                f"{name} has {np.abs(values[lost]).max():.3g}, beyond the largest {dtype}, "
                f"{float(jnp.finfo(wanted).max):.6g}; choose another dtype"
            )
    return found
