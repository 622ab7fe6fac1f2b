"""Loss scaling for fp16, after DeepSpeed 0.19's dynamic loss scaler (fp16/loss_scaler.py)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaleState:
    """The loss scale between steps: scalars.

    Attributes:
      scale: float32; 1 outside fp16. Never in fp16, where the default 2**16 is already infinite.
      clean: int32, steps without overflow since the last one.
      hysteresis: int32, overflows that may still pass before the scale halves.
    """

    scale: jax.Array
    clean: jax.Array
    hysteresis: jax.Array


@dataclass(frozen=True)
class Scaling:
    """The settings of the loss scale: section `fp16` of a configuration, or none."""

    initial: float = 1.0
    dynamic: bool = False
    window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    minimum: float = 1.0

    def init(self) -> ScaleState:
        return ScaleState(jnp.float32(self.initial), jnp.int32(0), jnp.int32(self.hysteresis))

    def at_minimum(self, state: ScaleState) -> jax.Array:
        """Whether one more overflow could not lower the scale."""
        last = state.hysteresis <= 1
        return jnp.bool_(self.dynamic) & last & (state.scale <= self.minimum)

    def next(self, state: ScaleState, finite: jax.Array) -> ScaleState:
        """The scale after a step whose gradients were finite or not.

        On overflow: hysteresis is used up first, then the scale halves, down to its minimum. After
        `window` clean steps the next one doubles it, and the hysteresis is refilled.
        """
        if not self.dynamic:
            return state
        grown = finite & (state.clean > 0) & (state.clean % self.window == 0)
        halved = ~finite & (state.hysteresis <= 1)
        scale = jnp.where(grown, state.scale * 2, state.scale)
        scale = jnp.where(halved, jnp.maximum(state.scale / 2, self.minimum), scale)
        refill = finite if self.consecutive_hysteresis else grown
        hysteresis = jnp.where(refill, self.hysteresis, state.hysteresis)
        hysteresis = jnp.where(~finite & ~halved, state.hysteresis - 1, hysteresis)
        clean = jnp.where(finite, state.clean + 1, 0)
        return ScaleState(scale, clean.astype(jnp.int32), hysteresis.astype(jnp.int32))
