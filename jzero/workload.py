"""What `jzero plan` and `jzero compare` need of a user's training job."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax

from jzero.calls import check_call


@dataclass(frozen=True)
class Workload:
    """A model, its loss and a batch, described without making an array.

    Attributes:
      init: as `Zero.init` takes it.
      loss_fn: loss_fn(model, batch, rng) -> scalar or `Mean`, as `Zero.train_step` takes it.
      batch: rows -> pytree of `jax.ShapeDtypeStruct`s of a batch of so many samples.
      tx: an Optax transformation; None for `optax.adamw`.
      config: a jzero configuration; None for bf16, clipping 1.0, accumulation 1.
      sample: an input for a Linen module.

    Raises:
      JzeroError: a loss_fn or a batch that cannot be called so.
    """

    init: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    tx: optax.GradientTransformation | None = None
    config: Any = None
    sample: Any = None

    def __post_init__(self):
        check_call(self.loss_fn, "loss_fn", "model", "batch", "rng")
        check_call(self.batch, "batch", "rows")
