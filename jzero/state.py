"""The training state: one pytree of global arrays, sharded as its stage says."""

from dataclasses import dataclass
from typing import Any

import jax

from jzero.precision import ScaleState


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """Everything that a run keeps between steps. Donated to each step and updated in place.

    Arrays are stored padded where no dimension divides; `Zero.params` gives true shapes.

    Attributes:
      step: int32 scalar, optimizer steps so far, skipped ones included.
      skipped: int32 scalar, steps whose gradients were not finite.
      params: path -> parameter as stored between steps: whole in the compute dtype below stage 3,
        the fp32 shard itself in fp32 training. Absent where the master is cast as it is gathered.
      master: path -> fp32 master weight; empty in fp32 training.
      opt_state: the Optax state, over a pytree like the model's parameters.
      variables: the model's other variables (batch statistics, RNG counts, caches), whole.
      rng: PRNG key of the run.
      scale: the loss scale.
    """

    step: jax.Array
    skipped: jax.Array
    params: dict[str, jax.Array]
    master: dict[str, jax.Array]
    opt_state: Any
    variables: Any
    rng: jax.Array
    scale: ScaleState

    def stored(self, path: str) -> jax.Array:
        """What a step reads of a parameter: the copy in the compute dtype, else the master."""
        x = self.params.get(path)
        return self.master[path] if x is None else x

    def weight(self, path: str) -> jax.Array:
        """A parameter in full precision: its master, else the parameter itself."""
        x = self.master.get(path)
        return self.params[path] if x is None else x
