"""Looks at finished steps without waiting for them."""

import logging
from collections import deque
from typing import Any

from jzero.errors import JzeroError
from jzero.step import Health

log = logging.getLogger("jzero")


class ScaleError(JzeroError):
    """The loss scale is at its minimum and gradients still overflow."""


class Watch:
    """Reports finished steps, and raises where one overflowed beyond what a loss scale can answer.

    Never blocks dispatch: only results that are ready are looked at.

    Arguments:
      paths: the trained parameters, in the order of `Health.leaf`.
      minimum: the smallest loss scale.
      every: steps between two lines of progress (`steps_per_print`); None for none.
    """

    def __init__(self, paths: list[str], minimum: float, every: int | None):
        self._paths = paths
        self._minimum = minimum
        self._every = every
        self._pending: deque[tuple[Any, dict[str, Any]]] = deque()

    def add(self, health: Health, metrics: dict[str, Any]) -> None:
        self._pending.append((health, metrics))

    def check(self) -> None:
        """Looks at every step that has finished since.

        Raises:
          ScaleError: naming the step, the first leaf that is not finite, and what to try.
        """
        while self._pending and all(x.is_ready() for x in self._pending[0][0]):
            health, metrics = self._pending.popleft()
            if bool(health.dead):
                raise ScaleError(self._message(health))
            if self._every and int(health.step) % self._every == 0:
                shown = ("loss", "lr", "grad_norm", "loss_scale")
                values = " ".join(f"{k} {float(metrics[k]):.6g}" for k in shown if k in metrics)
                log.info("step %d: %s", int(health.step), values)

    def _message(self, health: Health) -> str:
        index = int(health.leaf)
        where = (
            f"the first gradient that is not finite is that of {self._paths[index]}"
            if index >= 0
            else "all gradients are finite but the loss is not"
        )
        return (
            f"step {int(health.step)}: overflow at the minimum loss scale {self._minimum:g}; "
            f"{where}. "
            f'Try bf16 ("bf16": {{"enabled": true}}), a smaller learning rate, or clipping; look '
            f"for a division by zero or a log of zero in the loss"
        )
