"""One writer at a time in a folder of checkpoints."""

import fcntl
import logging
import os
import socket
import weakref
from pathlib import Path

from jzero.errors import JzeroError

log = logging.getLogger("jzero")

NAME = ".lock"


class Lock:
    """Held until `release`, or until the process ends, in whatever way.

    Arguments:
      root: the folder, which is there.

    Raises:
      JzeroError: another run writes there.
    """

    def __init__(self, root: Path):
        descriptor = os.open(root / NAME, os.O_RDWR | os.O_CREAT, 0o644)
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 256, 0).decode() or "another process"
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
        self._release()
