"""Looks at finished steps without waiting for them."""

from collections import deque

from jzero.errors import JzeroError
from jzero.step import Health


class ScaleError(JzeroError):
    """The loss scale is at its minimum and gradients still overflow."""


class Watch:
    """Raises once a finished step shows an overflow that no loss scale can answer.

    Never blocks dispatch: only results that are ready are looked at.
    """

    def __init__(self, paths: list[str], minimum: float):
        self._paths = paths
        self._minimum = minimum
        self._pending: deque[Health] = deque()

    def add(self, health: Health) -> None:
        self._pending.append(health)

    def check(self) -> None:
        """Looks at every step that has finished since.

        Raises:
          ScaleError: naming the step, the first leaf that is not finite, and what to try.
        """
        while self._pending and all(x.is_ready() for x in self._pending[0]):
            health = self._pending.popleft()
            if bool(health.dead):
                raise ScaleError(self._message(health))

    def _message(self, health: Health) -> str:
        index = int(health.leaf)
        where = (
            f"the first gradient that is not finite is that of {self._paths[index]}"
            if index >= 0
            else "all gradients are finite but the loss is not"
        )
        return (
            f"step {int(health.step)}: overflow at the minimum loss scale {self._minimum:g}; {where}. "
            f'Try bf16 ("bf16": {{"enabled": true}}), a smaller learning rate, or clipping; look '
            f"for a division by zero or a log of zero in the loss"
        )
