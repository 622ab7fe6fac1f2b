"""A step while it is written: a hidden folder, which is published whole or taken away."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jzero.checkpoint import folders, manifest, processes
from jzero.checkpoint.damage import DamagedCheckpoint
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.processes import Written
from jzero.checkpoint.store import Reader
from jzero.errors import JzeroError, RunFailed


def check_absent(folder: Path) -> None:
    """Whether a step that is not to be replaced is not there.

    Raises:
      JzeroError: it is.
    """
    if folders.is_there(folder):
        raise JzeroError(f"{folder} is there already; save with overwrite=True to replace it")


def finish(draft: Path, folder: Path, whole: Manifest, overwrite: bool) -> None:
    """Publishes what was written, if all of it is there."""
    reader = Reader(draft, whole)
    for name in whole.leaves:
        reader.check_files(name)
    manifest.write(draft, whole)
    folders.publish(draft, folder, overwrite)


@contextmanager
def attempt(step: int, draft: Path, process: int = 0, count: int = 1) -> Iterator[None]:
    """When something fails: removes the unfinished folder, tells the others, names the step."""
    try:
        yield
    except BaseException as error:
        reason = _reason(error, draft.parent)
        with suppress(OSError):
            if process == 0 and count > 1:
                processes.give_up(draft)
            if process == 0:
                shutil.rmtree(draft, ignore_errors=True)
            elif processes.given_up(draft):  # process 0 has taken the folder away
                reason = processes.GIVEN_UP
                shutil.rmtree(draft, ignore_errors=True)
            else:
                processes.hand_in(draft, process, Written(error=reason))
        if not isinstance(error, OSError | RunFailed | DamagedCheckpoint):
            raise
        text = f"step {step} was not saved below {draft.parent}: {reason}"
        raise RunFailed(text) from None


def _reason(error: BaseException, root: Path) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error) if root.exists() else "the folder is gone"
    if isinstance(error, DamagedCheckpoint):
        return f"{error.file} {error.problem}"
    return str(error) or type(error).__name__
