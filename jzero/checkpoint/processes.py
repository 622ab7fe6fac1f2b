"""What the processes of one save tell each other, through files in a folder that they all see.

A save runs in a thread, where a collective might meet one of the training step's.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jzero.checkpoint.files import FileEntry, write_text
from jzero.errors import RunFailed

GIVEN_UP = "process 0 gave this step up, and says why"


@dataclass(frozen=True)
class Written:
    """What one process has written of a step.

    Attributes:
      files: path within the step folder -> file.
      data: the process's position in the data.
      error: why it could not, or "".
    """

    files: Mapping[str, FileEntry] = field(default_factory=dict)
    data: Any = None
    error: str = ""


def hand_in(draft: Path, process: int, written: Written) -> None:
    """Tells process 0, in the step's unfinished folder, what another has written."""
    place = _place(draft, process)
    write_text(place.with_suffix(".new"), json.dumps(asdict(written)).encode())
    os.rename(place.with_suffix(".new"), place)


def collect(draft: Path, count: int, timeout: float) -> list[Written]:
    """In process 0: waits until the others have handed in, and takes away what they left for it.

    Raises:
      RunFailed: a process that failed, or that has not handed in within `timeout` seconds.
    """
    places = {process: _place(draft, process) for process in range(1, count)}
    found: dict[int, Written] = {}

    def all_found() -> bool:
        for process, place in places.items():
            if process not in found and place.exists():
                found[process] = written = _read(place)
                if written.error:
                    raise RunFailed(f"process {process}: {written.error}")
        return len(found) == len(places)

    if not _wait(all_found, timeout):
        missing = ", ".join(str(process) for process in places if process not in found)
        raise RunFailed(
            f"nothing from process {missing} of {count} in {timeout:g} s: it ended, hangs, or sees "
            f"another folder than process 0"
        )
    for place in places.values():
        place.unlink()
    return [found[process] for process in places]


def give_up(draft: Path) -> None:
    """In process 0: leaves word for the others that the step will not be published."""
    _word(draft).mkdir(exist_ok=True)


def given_up(draft: Path) -> bool:
    """In the others: whether process 0 has left that word."""
    return _word(draft).exists()


def await_publication(draft: Path, folder: Path, timeout: float) -> None:
    """In the others: waits until process 0 has published the step.

    Raises:
      RunFailed: it gave up, or the step is not there in `timeout` seconds.
    """

    def published() -> bool:
        if given_up(draft):
            raise RunFailed(GIVEN_UP)
        return folder.exists() and not draft.exists()

    if not _wait(published, timeout):
        raise RunFailed(f"process 0 did not publish it in {timeout:g} s")


def _wait(ready: Callable[[], bool], timeout: float) -> bool:
    end, pause = time.monotonic() + timeout, 0.01
    while not ready():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1.0)
    return True


def _place(draft: Path, process: int) -> Path:
    return draft / f"part-{process}.json"


def _word(draft: Path) -> Path:
    return draft.with_name(draft.name.replace(".unfinished-", ".failed-"))


def _read(place: Path) -> Written:
    data = json.loads(place.read_bytes())
    files = {path: FileEntry(**file) for path, file in data["files"].items()}
    return Written(files, data["data"], data["error"])
