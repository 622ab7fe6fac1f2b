"""What every contender is given: the same model, weights, batch, optimizer and precision."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from model import LMConfig

CLIP = 1.0
"""The largest global gradient norm."""

WHOLE, ROWS = PartitionSpec(), PartitionSpec("data")


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
      config: the model's sizes.
      mesh: one axis, `data`.
      stage: 0 to 3.
      precision: "fp32" or "bf16": what the model computes in. Weights and moments that the
        optimizer keeps are fp32.
      rows: of the batch, on each device.
    """

    config: LMConfig
    mesh: Mesh
    stage: int
    precision: str
    rows: int

    @property
    def dtype(self) -> Any:
        return jnp.bfloat16 if self.precision == "bf16" else jnp.float32

    @property
    def tokens(self) -> int:
        """That one step predicts, over all devices."""
        return self.mesh.size * self.rows * self.config.context

    @cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW. Who clips by `CLIP`, and how, is each contender's own affair."""
        return optax.adamw(1e-3, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)

    @cached_property
    def batch(self) -> dict[str, jax.Array]:
        """`tokens` [rows of all devices, T + 1], int32; some tokens are more frequent."""
        shape = (self.mesh.size * self.rows, self.config.context + 1)
        found = np.random.default_rng(0).zipf(1.3, shape) % self.config.vocabulary
        return {"tokens": jax.device_put(found.astype(np.int32), self.sharding(ROWS))}

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


@dataclass(frozen=True)
class Contender:
    """One way to train the model.

    Attributes:
      name: in the table.
      state: before the first step; each step uses its state up.
      step: (state, batch) -> (state, loss), as its user calls it.
      lower: its program, lowered.
    """

    name: str
    state: Any
    step: Callable[[Any, Any], tuple[Any, jax.Array]]
    lower: Callable[[], Lowered]
