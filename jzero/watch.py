"""Looks at finished steps without waiting for them, while the devices run the next one."""

import logging
from collections import deque
from typing import Any

import numpy as np

from jzero.errors import JzeroError
from jzero.monitor import Monitor
from jzero.step import Health

log = logging.getLogger("jzero")


class ScaleError(JzeroError):
    """The loss scale is at its minimum and gradients still overflow."""


class Watch:
    """Reports finished steps, and one that overflowed beyond what a loss scale can answer.

    Arguments:
      minimum: the smallest loss scale.
      every: steps between two lines of progress (`steps_per_print`); None for none.
      monitor: what writes the metrics.
    """

    def __init__(self, minimum: float, every: int | None, monitor: Monitor):
        self._minimum = minimum
        self._every = every
        self._monitor = monitor
        self._skipped = 0  # in a row
        self._pending: deque[tuple[Any, list[str], int, dict[str, Any]]] = deque()
        self._failure: Exception | None = None

    def add(self, health: Any, paths: list[str], rows: int, metrics: dict[str, Any]) -> None:
        """Takes a dispatched step's results.

        Arguments:
          health: a `Health` as one int32 array.
          paths: the trained parameters, in the order of `Health.leaf`.
          rows: of the global batch.
          metrics: the step's metrics.
        """
        self._pending.append((health, paths, rows, metrics))

    def check(self) -> None:
        """Raises what was found, once.

        Raises:
          ScaleError: naming the step, the first leaf that is not finite, and what to try.
          Exception: the monitor's.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def look(self, wait: bool = False) -> None:
        """Looks at every step that has finished since; with `wait`, at every step.

        What is found waits for `check`: raised here, it would cost the state that the caller is
        about to return.

        Raises:
          jax.errors.JaxRuntimeError: a step that failed on the devices: its state is lost anyway.
        """
        while self._pending and (wait or self._pending[0][0].is_ready()):
            array, paths, rows, metrics = self._pending.popleft()
            health = Health(*np.asarray(array).tolist())
            if health.dead and not isinstance(self._failure, ScaleError):
                self._failure = ScaleError(self._message(health, paths))
            self._skipped = self._skipped + 1 if health.skipped else 0
            if self._skipped & (self._skipped - 1) == 0 and self._skipped:
                log.warning(
                    "step %d skipped, %d in a row: %s",
                    health.step,
                    self._skipped,
                    _where(health, paths),
                )
            if self._every and health.step % self._every == 0:
                shown = ("loss", "lr", "grad_norm", "loss_scale")
                values = " ".join(f"{k} {float(metrics[k]):.6g}" for k in shown if k in metrics)
                log.info("step %d: %s", health.step, values)
            try:
                self._monitor.write(health.step * rows, metrics)
            except Exception as error:
                self._failure = self._failure or error

    def _message(self, health: Health, paths: list[str]) -> str:
        return (
            f"step {health.step}: overflow at the minimum loss scale {self._minimum:g}; "
            f"{_where(health, paths)}. "
            f'Try bf16 ("bf16": {{"enabled": true}}), a smaller learning rate, or clipping; look '
            f"for a division by zero or a log of zero in the loss"
        )


def _where(health: Health, paths: list[str]) -> str:
    if health.leaf < 0:
        return "all gradients are finite but the loss is not"
    return f"the first gradient that is not finite is that of {paths[health.leaf]}"
