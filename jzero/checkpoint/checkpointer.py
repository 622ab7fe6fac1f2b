"""Checkpoints of a training loop: when to save, what to restore, and that nothing gets lost."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from jzero.checkpoint import folders, order, retention
from jzero.checkpoint.agree import all_or_none
from jzero.checkpoint.due import Due
from jzero.checkpoint.entries import PARTS
from jzero.checkpoint.facts import as_json
from jzero.checkpoint.find import find, look
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.number import whole_number
from jzero.checkpoint.offer import Offer, Saved
from jzero.checkpoint.restore import Restored, restore
from jzero.checkpoint.stop import Stop
from jzero.checkpoint.writer import Writer
from jzero.errors import JzeroError
from jzero.setup import Holder
from jzero.state import State
from jzero.train import check_usable

log = logging.getLogger("jzero")

PATIENCE = 60.0  # seconds that a save after an error waits for processes that may never come


class Checkpointer:
    """Saves and restores the states of one training loop; `Zero.checkpointer` makes one.

    Every process makes one, and calls the same methods at the same steps in its main thread. All
    see the same folder, in which one run at a time may write; a `with` block or the first save
    makes it.

    Attributes:
      stopping: whether SIGTERM or a preemption notice came. The state given to `save` was saved
        then, and the loop should end.

    Raises:
      JzeroError: an interval or a number that is not whole and positive.
    """

    def __init__(
        self,
        zero: Holder,
        folder: str | Path,
        *,
        every: int,
        keep_last: int | None,
        keep_every: int | None,
        trainable_only: bool,
        timeout: float,
    ):
        every, *keep = retention.intervals(every, keep_last, keep_every)
        self.folder = Path(folder).absolute()  # the program may change its directory
        self.stopping = False
        self._zero = zero
        self._every = every
        self._keep = keep
        self._trainable_only = trainable_only
        self._timeout = timeout
        self._due = Due(every)
        self._restored: int | None = None
        self._offer: Offer | None = None  # the last one, for the end
        self._saved: Saved | None = None
        self._writer: Writer | None = None
        self._stop: Stop | None = None
        self._entered = self._closed = False

    # --- reading ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """The steps that are there, ascending."""
        return folders.published(self.folder)

    def latest(self) -> int | None:
        """The last step that is there, or None."""
        return max(self.steps(), default=None)

    def manifest(self, step: int | None = None) -> Manifest | None:
        """What a step holds and the run it came from.

        Arguments:
          step: by default the last one that is there.

        Returns:
          Its manifest; None where there is no checkpoint and no step was asked for.

        Raises:
          DamagedCheckpoint: a file that is missing, cut short or changed, as far as lengths and
            stored checksums tell; with the complete step before.
          JzeroError: there is no such step.
        """
        folder = find(self.folder, step)
        return None if folder is None else look(folder)

    def restore(
        self,
        step: int | None = None,
        *,
        parts: Sequence[str] = PARTS,
        base: State | None = None,
        strict: bool = True,
    ) -> Restored | None:
        """The state of a step, laid out as `zero` has it now, whatever wrote it.

        Call `zero.setup_for(...)` or `zero.init(...)` first.

        Arguments:
          step: by default the last one that is there.
          parts: which of `params`, `optimizer`, `variables` and `progress` to take.
          base: a state of `zero.init` for what is not taken; it is used up.
          strict: whether a leaf that differs is an error; otherwise it comes from `base`.

        Returns:
          The state, its step, this process's position in the data as it was saved, and a report;
          None where there is no checkpoint and no step was asked for.

        Raises:
          DamagedCheckpoint: naming the file, what is wrong with it, and the complete step before.
          JzeroError: no such step; leaves that are missing, unexpected, or of another shape or
            dtype, each with its name.
        """
        self.wait()
        folder = find(self.folder, step)
        if folder is None:
            return None
        look(folder)
        self._due, self._offer = Due(self._every), None  # the device may not have room for two
        found = restore(folder, self._zero.setup, parts=parts, base=base, strict=strict)
        self._restored = int(found.state.step)
        if self._writer is not None:
            self._writer.step = None  # that step may come again, on other data
        return found

    def set_aside(self, after: int) -> Path | None:
        """Moves the steps after one away, so that a run may go on from there.

        They are away when it returns, in every process.

        Returns:
          The folder `after_<step>` that they are in now; None where there are none, and in all
          processes but the first.

        Raises:
          JzeroError: another run writes in the folder.
          RunFailed: the save before failed; the folder is another run's now.
        """
        after = whole_number("after", after)
        writer = self._open()

        def move() -> Path | None:
            writer.ready()
            return retention.set_aside(self.folder, after) if jax.process_index() == 0 else None

        aside = all_or_none(move, f"move the steps after {after} away")
        self._due = Due(self._every)
        return aside

    # --- saving ----------------------------------------------------------------------------------

    def save(
        self,
        state: State,
        data: Any = None,
        *,
        before: Callable[[], None] | None = None,
        force: bool = False,
        overwrite: bool = False,
    ) -> bool:
        """Saves the state if it is due; call it once after each step.

        Due is a step that is a multiple of `every`, or the first one given after a multiple; and
        any, once SIGTERM or a preemption notice has come. Returns when the state is copied to the
        host's memory: files are written in the background. If the save before is not written yet,
        waits for it. The state stays at hand until the next call, for `close`.

        Arguments:
          state: as the step returned it.
          data: this process's position in the data, JSON; copied at every call, so keep it small.
          before: called before a save, for what has to be on the disk when it is, such as metrics.
          force: save now, due or not.
          overwrite: whether a step that is there already is replaced.

        Returns:
          Whether the state is being saved. What was just restored or saved is not saved again.

        Raises:
          RunFailed: the save before failed: the disk is full, the folder is gone. The state is as
            it was, and the last step that was saved whole is still the latest. Or the folder is
            another run's now.
          JzeroError: the step, or a later one, is there already; another run writes in the folder;
            a position that JSON does not have; a state of another model than `zero.init` laid out
            last.
          KeyboardInterrupt: Ctrl-C came since the last call, in a `with` block.
        """
        check_usable(state)
        writer = self._open()
        if self._stop is None:  # only now: before the first step SIGTERM may end the program
            self._stop = Stop(interrupts=self._entered)
        self.stopping = self._stop.reached()  # every process at every call
        offer = Offer(self._zero.setup, state, as_json(data), before, overwrite)
        due = self._due.is_due(state)
        if self._offer is None:  # not only after all the steps until one is due
            offer.check()
            step, last = self._due.read(state), order.last_agreed(self.folder)
            order.check_not_before(self.folder, step, last, self._restored)
        self._offer = offer
        saving = (due or force or self.stopping) and self._save(offer, self._timeout)
        if not saving:
            writer.check()
        self._stop.interrupt()  # if it is not saved, the end of the `with` block saves it
        return saving

    def wait(self) -> None:
        """Waits until the files of the last save are written.

        Raises:
          RunFailed: they could not be.
        """
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Saves the last state given if it is not saved yet, and waits until all is written.

        A `with` block calls it at its end, whatever ends it. A state that has since been given to
        a step is gone; the last one that was due stands then.

        Raises:
          RunFailed: the files could not be written.
          KeyboardInterrupt: Ctrl-C came since the last call of `save`, in a `with` block.
        """
        self._close(self._timeout)
        if self._stop is not None:
            self._stop.interrupt()  # only where nothing else is raised

    def __enter__(self) -> "Checkpointer":
        self._open()
        self._entered = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        if isinstance(error, SystemExit):
            self._close(self._timeout)
            return
        try:
            # The other processes may be at another step, and not know of the error.
            self._close(min(self._timeout, PATIENCE) if jax.process_count() > 1 else self._timeout)
        except Exception as second:
            log.error("%s", second)  # the first one is the one to raise

    def _open(self) -> Writer:
        """The writer, made where one is needed: not where steps are only read."""
        if self._closed:
            raise JzeroError(f"{self.folder}: this checkpointer is closed; make a new one")
        if self._writer is None:
            self._writer = Writer(self.folder, *self._keep)
        return self._writer

    def _save(self, offer: Offer, timeout: float, alone: bool = False) -> bool:
        """Begins to save, unless that is done already.

        Arguments:
          alone: whether other processes may be elsewhere: then nothing is agreed with them.
        """
        writer = self._open()
        if alone:
            writer.ready()
            last = order.last_alone(self.folder, (writer.step, self._restored))
        else:
            all_or_none(writer.ready, "save")
            last = order.last_agreed(self.folder)
        step = self._due.read(offer.state)
        if step == last and self._is_done(offer, step, writer.step):
            self._due.done(step)
            return False
        offer.check()
        order.check_not_before(self.folder, step, last, self._restored)
        if not offer.overwrite:
            order.check_new(self.folder, step, last)
        if offer.before is not None:
            offer.before()
        writer.start(step, *offer.contents(self._trainable_only), offer.overwrite, timeout)
        self._saved = Saved(offer)
        self._due.done(step)
        return True

    def _is_done(self, offer: Offer, step: int, written: int | None) -> bool:
        """Whether a step that is on the disk is what is to be saved."""
        if offer.overwrite:
            return step == written and self._saved is not None and self._saved.is_same(offer)
        return step in (written, self._restored)

    def _close(self, timeout: float) -> None:
        writer, offer = self._writer, self._offer
        if writer is None or self._closed:
            self._closed = True
            if writer is not None:  # the call before may have been interrupted
                try:
                    writer.wait()
                finally:
                    writer.close()
            return
        try:
            try:
                try:
                    writer.wait()
                finally:
                    self._save_last(offer, timeout)
            finally:
                self._closed, self._offer = True, None
                writer.close()
        finally:
            if self._stop is not None:
                self.stopping = self._stop.close()

    def _save_last(self, offer: Offer | None, timeout: float) -> None:
        if offer is None:
            return
        if not offer.is_there:
            log.warning(
                "the last state given to save() was given to a step whose state never came: the "
                "last step in %s is %s",
                self.folder,
                self.latest(),
            )
            return
        self._save(offer, timeout, alone=True)
        self.wait()
