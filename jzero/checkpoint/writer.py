"""Writes the steps of one run into a folder, in the background."""

import logging
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import jax

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.agree import all_or_none
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.manifest import Facts
from jzero.checkpoint.retention import superseded
from jzero.checkpoint.save import agree_nonce, save_step
from jzero.checkpoint.snapshot import Snapshot
from jzero.errors import RunFailed

log = logging.getLogger("jzero")


class Writer:
    """One save at a time, in a thread that the interpreter waits for before it ends.

    Made by every process at the same point of the program. Process 0 holds the folder's lock,
    removes what dead saves left there, and deletes steps that need not be kept.

    Arguments:
      root: the folder of the step folders; made if it is not there.
      keep_last, keep_every: as `superseded` takes them.

    Attributes:
      step: the step that is being written or was written last; None where that failed.

    Raises:
      JzeroError: another run writes there.
      RunFailed: the folder cannot be made or written to.
    """

    def __init__(self, root: Path, keep_last: int | None, keep_every: int | None):
        self.step: int | None = None
        self._root = root
        self._keep = (keep_last, keep_every)
        self._first = jax.process_index() == 0
        self._lock: Lock | None = None
        self._published: tuple[Path, object] | None = None  # the last one: folder, its identity
        all_or_none(self._take_folder, f"take {root}")
        self._run = agree_nonce()
        self._count = 0
        self._pool = ThreadPoolExecutor(1, "jzero-save")
        self._running: list[Future[None]] = []  # of one at most
        weakref.finalize(self, _tell, self._running)  # at the latest when the interpreter ends

    def start(
        self, step: int, snapshot: Snapshot, facts: Facts, overwrite: bool, timeout: float
    ) -> None:
        """Begins to write a step; the writer must be ready."""
        self.step = step
        # Not agreed anew each time: a process whose last save failed must not keep the others.
        self._count += 1
        nonce = f"{self._run}x{self._count}"
        self._running.append(
            self._pool.submit(self._write, step, snapshot, facts, nonce, overwrite, timeout)
        )

    def check(self) -> None:
        """Raises what went wrong in a save that has ended, once."""
        if self._running and self._running[0].done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save that is going on, and raises what went wrong in it, once."""
        if self._running:
            running = self._running[0]
            error = running.exception()  # an interrupt while it waits leaves everything as it is
            self._running.clear()
            if error is not None:
                raise error

    def ready(self) -> None:
        """Waits as `wait` does; then the folder must still be the one that this run took.

        Raises:
          JzeroError: another run writes there now.
          RunFailed: what went wrong in a save; it is another folder.
        """
        self.wait()
        if self._lock is not None and self._root.is_dir() and not self._lock.is_in_place():
            self._lock_again(self._lock)

    def close(self) -> None:
        """Waits for what is being written, and lets another run write in the folder."""
        try:
            self._pool.shutdown()
        finally:
            if self._lock is not None:
                release = self._lock.release
                if self._running:  # at once, or when the thread has ended that an interrupt left
                    self._running[0].add_done_callback(lambda _: release())
                else:
                    release()

    def _take_folder(self) -> None:
        with _writing_to(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            if self._first:
                self._lock = Lock(self._root)
                folders.sweep(self._root)

    def _lock_again(self, removed: Lock) -> None:
        """Where a cleaner took the file of the lock, or the folder is another one now."""
        root = self._root
        with _writing_to(root):
            lock = Lock(root)
        if self._published is None or _identity(self._published[0]) != self._published[1]:
            lock.release()
            raise RunFailed(
                f"{root}: the folder, or its .lock, was deleted since this run took it, and may "
                f"be another run's now: nothing is saved there; start again in a folder of its own"
            )
        log.warning("%s: its .lock was deleted, and is made anew; the steps are still there", root)
        removed.release()
        self._lock = lock

    def _write(
        self,
        step: int,
        snapshot: Snapshot,
        facts: Facts,
        nonce: str,
        overwrite: bool,
        timeout: float,
    ) -> None:
        try:
            save_step(
                self._root,
                step,
                snapshot,
                facts,
                nonce=nonce,
                overwrite=overwrite,
                timeout=timeout,
            )
        except BaseException:
            self.step = None
            raise
        if self._first:
            folder = folders.step_folder(self._root, step)
            self._published = folder, _identity(folder)
            self._prune(step)

    def _prune(self, last: int) -> None:
        steps = [step for step in folders.published(self._root) if step <= last]
        for step in superseded(steps, *self._keep):
            folder = folders.step_folder(self._root, step)
            try:
                folders.delete(folder)
            except OSError as error:
                raise RunFailed(
                    f"{folder}: cannot be deleted: {error.strerror or error}"
                ) from error


@contextmanager
def _writing_to(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunFailed(f"{root}: cannot be written to: {error.strerror or error}") from error


def _identity(folder: Path) -> object:
    """What tells a step from the same one of another run; None where it is not there."""
    try:
        found = (folder / manifest.NAME).stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _tell(running: list[Future[None]]) -> None:
    """Says what went wrong in a save that nobody waited for."""
    for save in running:
        error = save.exception() if save.done() else None
        if error is not None:
            log.error("%s", error)
