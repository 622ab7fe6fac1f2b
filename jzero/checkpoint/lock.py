"""One writer at a time in a folder of checkpoints."""

import fcntl
import logging
import os
import socket
import threading
import weakref
from pathlib import Path

from jzero.errors import JzeroError

log = logging.getLogger("jzero")

NAME = ".lock"

_held: "weakref.WeakSet[Lock]" = weakref.WeakSet()


class Lock:
    """Held until `release`, or until the process ends, in whatever way.

    Arguments:
      root: the folder, which is there.

    Raises:
      JzeroError: another run writes there.
    """

    def __init__(self, root: Path):
        self._path = root / NAME
        self._descriptor = descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._closing = threading.RLock()
        _held.add(self)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode(errors="replace") or "another process"
            self.release()
            raise JzeroError(
                f"{root}: {holder} writes checkpoints here: give this run a folder of its own, or "
                f"end the other one"
            ) from None
        except OSError as error:  # some network file systems have no locks
            log.warning("%s: not locked against a second run: %s", root, error.strerror)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)

    def release(self) -> None:
        """Lets another run write there; free when it returns, whichever thread was the first."""
        with self._closing:
            self._close()

    def is_in_place(self) -> bool:
        """Whether the file that is locked is still the one that others would lock."""
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self._path))
        except (FileNotFoundError, NotADirectoryError):
            return False


def _leave_to_parent() -> None:
    """In a forked process, which shares the locks and would hold them for as long as it runs."""
    for lock in list(_held):
        lock._closing = threading.RLock()  # another thread may hold the parent's
        if lock._close.detach():
            os.close(lock._descriptor)


os.register_at_fork(after_in_child=_leave_to_parent)
