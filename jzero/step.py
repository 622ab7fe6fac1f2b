"""One training step: gradients, norm, clipping, update, and what a skipped step leaves alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jzero.errors import JzeroError
from jzero.gradient import Region
from jzero.layout import Layout
from jzero.precision import Scaling
from jzero.publish import publish
from jzero.state import State
from jzero.update import Update


class Health(NamedTuple):
    """What the host looks at once a step is done (jzero.watch): one int32 array.

    Attributes:
      step: the step's number, from 1.
      skipped: 1 where gradients or loss were not finite.
      dead: 1 for an overflow that the loss scale can no longer answer.
      leaf: index of the first parameter whose gradient is not finite, or -1.
    """

    step: Any
    skipped: Any
    dead: Any
    leaf: Any


@dataclass(frozen=True)
class Step:
    """The step of a layout, as a pure function of (state, batch).

    Attributes:
      region: loss and gradients.
      update: the optimizer.
      scaling: the loss scale's settings.
      clip: the largest global gradient norm; 0 for none.
      sum_gradients: over the data axes, instead of averaging them.
      schedule: learning rate by applied steps, for the metrics; None if unknown.
    """

    region: Region
    update: Update
    scaling: Scaling
    clip: float
    sum_gradients: bool
    schedule: Callable[[Any], Any] | None

    @property
    def layout(self) -> Layout:
        return self.region.layout

    def __call__(self, state: State, batch) -> tuple[State, dict[str, jax.Array], jax.Array]:
        """(state, global batch [rows, ...]) -> (state, metrics, a `Health` as one array)."""
        region, layout = self.region, self.layout
        values = {p: state.stored(p) for p in layout.leaves}
        scale = state.scale.scale
        out = region.gradients(
            values, state.variables, batch, jax.random.fold_in(state.rng, state.step), scale
        )
        with jax.named_scope("zero_norm"):
            factor = (layout.mesh.data_size if self.sum_gradients else 1) / scale
            norm = jnp.sqrt(out.squares.sum()) * factor
            finite = jnp.isfinite(norm) & jnp.isfinite(out.loss)
            # As DeepSpeed: clipped by 1 / max((norm + 1e-6) / clip, 1). One quotient for all: of
            # products XLA would compute each factor again in every loop of the update.
            over = jnp.maximum((norm + 1e-6) / self.clip, 1) if self.clip else 1.0
            multiplier = factor / over
            grads = {p: g.astype(jnp.float32) * multiplier for p, g in out.grads.items()}

        with jax.named_scope("zero_update"):
            masters = self.update.masters(state.params, state.master)
            new, opt_state = self.update.apply(grads, state.opt_state, masters, value=out.loss)

            # A skipped step leaves everything alone, also decay, counts and batch statistics: to
            # zero its gradients would not do that.
            def keep(new, old):
                return jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)

            new = keep(new, masters)
            opt_state = keep(opt_state, state.opt_state)
            variables = keep(out.variables, state.variables)
            params = publish(layout, new, state.params)
        skipped = ~finite
        after = State(
            step=state.step + 1,
            skipped=state.skipped + skipped.astype(jnp.int32),
            params=params,
            master={p: new[p] for p in state.master},
            opt_state=opt_state,
            variables=variables,
            rng=state.rng,
            scale=self.scaling.next(state.scale, finite),
        )
        metrics = {
            "loss": out.loss,
            "grad_norm": norm,
            "grad_norm_clipped": norm / over,
            "loss_scale": scale,
            "skipped": skipped,
        }
        rate = self._learning_rate(state)
        if rate is not None:
            metrics["lr"] = jnp.asarray(rate, jnp.float32)
        bad = ~jnp.isfinite(out.squares)
        health = Health(
            after.step,
            skipped,
            skipped & self.scaling.at_minimum(state.scale),
            jnp.where(bad.any(), jnp.argmax(bad), -1) if bad.size else -1,
        )
        return after, with_aux(metrics, out.aux), jnp.stack([jnp.int32(x) for x in health])

    def _learning_rate(self, state: State):
        """The rate that this step uses: the configuration's, or an injected hyperparameter."""
        if self.schedule is not None:
            return self.schedule(state.step - state.skipped)
        found = optax.tree.get_all_with_path(state.opt_state, "learning_rate")
        return found[0][1] if len(found) == 1 else None


def with_aux(metrics: dict[str, jax.Array], aux) -> dict[str, Any]:
    clash = metrics.keys() & aux.keys()
    if clash:
        raise JzeroError(
            f"aux {sorted(clash)}: the step reports metrics of that name itself; rename"
        )
    return {**metrics, **aux}
