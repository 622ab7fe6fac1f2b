"""A state that a loop gives for a checkpoint, and what of it is written."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jzero.checkpoint.entries import entries
from jzero.checkpoint.facts import facts_of
from jzero.checkpoint.manifest import Facts
from jzero.checkpoint.snapshot import Snapshot, snapshot
from jzero.setup import Setup
from jzero.state import State
from jzero.train import check_state


@dataclass(frozen=True)
class Offer:
    """What `save` was given.

    Attributes:
      setup: as the state is laid out; the program may set up another model later.
      state, before, overwrite: as `Checkpointer.save` takes them.
      data: the position, a copy.
    """

    setup: Setup
    state: State
    data: Any
    before: Callable[[], None] | None
    overwrite: bool

    @property
    def is_there(self) -> bool:
        """Whether the state was not given to a step since."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self.state))

    def check(self) -> None:
        """Whether the state is one of the model that was set up.

        Raises:
          JzeroError: it is not.
        """
        check_state(self.state, self.setup.abstract_state())

    def contents(self, trainable_only: bool) -> tuple[Snapshot, Facts]:
        """Copies of all that is written, as `save_step` takes them. Waits for the state."""
        leaves = entries(self.setup, self.state).values()
        if trainable_only:
            leaves = [entry for entry in leaves if entry.trained]
        facts = facts_of(self.setup, self.state, data=self.data, trainable_only=trainable_only)
        return snapshot(leaves), facts


class Saved:
    """Which offer was saved; its state is not kept alive."""

    def __init__(self, offer: Offer):
        self._state = weakref.ref(offer.state)
        self._data = offer.data

    def is_same(self, offer: Offer) -> bool:
        """Whether it has the same state, at the same position."""
        return self._state() is offer.state and self._data == offer.data
