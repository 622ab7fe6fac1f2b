"""When a training loop's state is due to be saved."""

import weakref

from jzero.state import State


class Due:
    """Follows the steps of a loop, and says which are due: multiples, and the first after one.

    A state's step is an array that is ready only when the step has run: to read it would keep the
    next one from being dispatched early. So states are counted where they were one step apart so
    far: one after the first two, two after the next that is read, then four, and so on, until one
    seems due. Where they are not, every one is read.

    Arguments:
      every: steps between saves.
    """

    def __init__(self, every: int):
        self._every = every
        self._next: int | None = None
        self._state: weakref.ref[State] | None = None  # which may be larger than all the rest
        self._step = 0
        self._trusted = 0  # how many states are counted before one is read
        self._counted = 0  # since one was read

    def is_due(self, state: State) -> bool:
        """Whether a state is due; each state of the loop is asked for, in order."""
        step = self._follow(state)
        if self._next is None:
            self._next = max(-(-step // self._every), 1) * self._every
        return step >= self._next and self.read(state) >= self._next

    def read(self, state: State) -> int:
        """The state's step as it is; waits for it."""
        step = int(state.step)
        if step != self._step:
            self._trusted = 0
        self._state, self._step, self._counted = weakref.ref(state), step, 0
        return step

    def done(self, step: int) -> None:
        """That step is saved, or need not be."""
        self._next = (step // self._every + 1) * self._every

    def _follow(self, state: State) -> int:
        if self._state is not None and state is self._state():
            return self._step
        first, self._state, self._step = self._state is None, weakref.ref(state), self._step + 1
        if self._counted < self._trusted:
            self._counted += 1
            return self._step
        expected = self._step
        if self.read(state) == expected and not first:
            self._trusted = max(2 * self._trusted, 1)
        return self._step
