"""Steps as numbers, without waiting for the devices at every call."""

from jzero.state import State


class Counter:
    """Follows the steps of a training loop.

    A state's step is an array that is ready only when the step has run: to read it would keep the
    next one from being dispatched early. So only the first two states are read. If they are one
    step apart, the others are counted; otherwise every one is read.
    """

    def __init__(self):
        self._state: State | None = None
        self._step = 0
        self._counts = False

    def next(self, state: State) -> int:
        """The state's step: one after that of the last call's state, or as it is read."""
        if state is self._state:
            return self._step
        first, before = self._state is None, self._step
        if self._counts:
            self._state, self._step = state, before + 1
            return self._step
        self.read(state)
        self._counts = not first and self._step == before + 1
        return self._step

    def read(self, state: State) -> int:
        """The state's step as it is; waits for it."""
        step = int(state.step)
        self._counts = self._counts and step == self._step
        self._state, self._step = state, step
        return step
