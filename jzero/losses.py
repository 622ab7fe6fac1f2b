"""What a loss function takes, and may return: a scalar, or a total and its weight."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jzero.errors import JzeroError


class Mean(NamedTuple):
    """A weighted mean that is exact however its samples are spread over devices.

    Attributes:
      total: scalar, the sum of weight x value over this device's rows, in nats for a language
        model.
      weight: scalar, the sum of the weights: tokens that count. 0 where all are masked. It is taken
        as a constant: no gradient goes through it.

    The global mean is sum(total) / sum(weight) over devices and micro-batches, not a mean of means:
    a device or a micro-batch without any weight contributes nothing.

    Example:
      >>> import jax.numpy as jnp
      >>> loss, mask = jnp.array([1.0, 5.0, 3.0]), jnp.array([1.0, 0.0, 1.0])
      >>> float(Mean((loss * mask).sum(), mask.sum()).value())
      2.0
    """

    total: jax.Array | float
    weight: jax.Array | float

    def value(self) -> jax.Array:
        """total / weight, and 0 where there is no weight."""
        return divided(self.total, self.weight)


def divided(total, weight) -> jax.Array:
    """total / weight in float32, and 0 where there is no weight."""
    weight = jnp.asarray(weight, jnp.float32)
    safe = jnp.where(weight == 0, 1.0, weight)
    return jnp.where(weight == 0, 0.0, jnp.asarray(total, jnp.float32) / safe)


def loss_parts(out) -> tuple[jax.Array, jax.Array | None, Any]:
    """(total, weight, aux) of what a loss function returns; a plain scalar has no weight."""
    loss, aux = out, {}
    if isinstance(out, tuple) and not isinstance(out, Mean):
        if len(out) != 2:
            raise JzeroError(
                f"the loss function returned {len(out)} values; return a loss, or (loss, aux)"
            )
        loss, aux = out
        if not isinstance(aux, dict):
            raise JzeroError(
                f"the loss function returned a {type(aux).__name__} beside the loss; return a dict "
                f"of metrics there, or jzero.Mean(total, weight) for a weighted mean"
            )
    total, weight = loss if isinstance(loss, Mean) else (loss, None)
    total = scalar(total)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise JzeroError(
            f"the loss function returned a loss of dtype {total.dtype}; return a real one"
        )
    if weight is not None:
        weight = lax.stop_gradient(jnp.asarray(weight, jnp.float32))
        if weight.shape:
            raise JzeroError(
                f"the loss function returned a Mean whose weight has shape {weight.shape}; return "
                f"a scalar: the sum of what its rows weigh"
            )
    return total.astype(jnp.float32), weight, aux


def local_means(total, weight, aux) -> tuple[Mean, Any]:
    """Loss and aux of one device's rows, each a float32 `Mean`; a plain value has weight 1."""

    def one(x):
        total, weight = x if isinstance(x, Mean) else (x, None)
        total = jnp.asarray(total, jnp.float32)
        if weight is None:
            return Mean(total, jnp.float32(1))
        weight = jnp.asarray(weight, jnp.float32)
        if total.shape != weight.shape:
            raise JzeroError(
                f"aux has a Mean of a total of shape {total.shape} and a weight of shape "
                f"{weight.shape}; sum both over the rows, to the same shape"
            )
        return Mean(total, weight)

    return one(Mean(total, weight)), jax.tree.map(one, aux, is_leaf=_is_mean)


def global_means(means, axes):
    """The values of every device's means together.

    Scalars in one vector: an all-reduce of a tuple takes much longer on a CPU.

    Arguments:
      means: pytree of float32 `Mean`s, local to a device, or sums of such.
      axes: the mesh axes, manual ones, that the batch is split over.
    """
    leaves, tree = jax.tree.flatten(means)
    numbers = iter(lax.psum(jnp.stack([x for x in leaves if not x.shape]), axes))
    summed = [lax.psum(x, axes) if x.shape else next(numbers) for x in leaves]
    return jax.tree.map(lambda m: m.value(), jax.tree.unflatten(tree, summed), is_leaf=_is_mean)


def _is_mean(x) -> bool:
    return isinstance(x, Mean)


def scalar(x) -> jax.Array:
    """A loss or a total as a scalar array.

    Raises:
      JzeroError: it is not a scalar.
    """
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        raise JzeroError(
            f"the loss function returned the {type(x).__name__} {x!r:.60} as a loss or in a Mean; "
            f"return a scalar array that is computed from the model, or jzero.Mean(total, weight)"
        )
    x = jnp.asarray(x)
    if x.shape:
        raise JzeroError(
            f"the loss function returned an array of shape {x.shape} as a loss or in a Mean; "
            f"return a scalar (its mean over the rows), or jzero.Mean(total, weight) of scalars"
        )
    return x
