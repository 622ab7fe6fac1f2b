"""When a training loop's state is due to be saved."""

from jzero.state import State


class Due:
    """Follows the steps of a loop, and says which are due: multiples, and the first after one.

    A state's step is an array that is ready only when the step has run: to read it would keep the
    next one from being dispatched early. So only the first two states are read. If they are one
    step apart, the others are counted until one seems due; otherwise every one is read.

    Arguments:
      every: steps between saves.
    """

    def __init__(self, every: int):
        self._every = every
        self._next: int | None = None
        self._state: State | None = None
        self._step = 0
        self._counts = False

    def is_due(self, state: State) -> bool:
        """Whether a state is due; each state of the loop is asked for, in order."""
        step = self._follow(state)
        if self._next is None:
            self._next = max(-(-step // self._every), 1) * self._every
        return step >= self._next and self.read(state) >= self._next

    def read(self, state: State) -> int:
        """The state's step as it is; waits for it."""
        step = int(state.step)
        self._counts = self._counts and step == self._step
        self._state, self._step = state, step
        return step

    def done(self, step: int) -> None:
        """That step is saved, or need not be."""
        self._next = (step // self._every + 1) * self._every

    def _follow(self, state: State) -> int:
        if state is self._state:
            return self._step
        first, before = self._state is None, self._step
        if self._counts:
            self._state, self._step = state, before + 1
        else:
            self.read(state)
            self._counts = not first and self._step == before + 1
        return self._step
