"""What `jzero plan` and `jzero compare` need of a user's training job."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import optax


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
    """

    init: Any
    loss_fn: Callable[..., Any]
    batch: Callable[[int], Any]
    tx: optax.GradientTransformation | None = None
    config: Any = None
    sample: Any = None
