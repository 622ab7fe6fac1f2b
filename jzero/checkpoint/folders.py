"""Step folders: a folder of a step is complete or not there.

A step is written in a hidden folder beside the others and renamed once all of it is on the disk.
Whatever has another name than `step_` and digits is passed over.
"""

import functools
import logging
import os
import re
import shutil
import uuid
from pathlib import Path

from jzero.checkpoint.damage import step_of
from jzero.checkpoint.files import sync

log = logging.getLogger("jzero")

_HIDDEN = re.compile(r"\.(?:unfinished|failed|deleted|replaced)-\d+-\w+")


def step_folder(root: Path, step: int) -> Path:
    """Where a step is published.

    Example:
      >>> step_folder(Path("runs"), 50).name
      'step_00000050'
    """
    return Path(root) / f"step_{step:08d}"


def published(root: Path) -> list[int]:
    """The steps that have a folder, ascending; empty folders are passed over with a warning."""
    if not Path(root).is_dir():
        return []
    steps = []
    for folder in Path(root).iterdir():
        step = step_of(folder)
        if step is None or not folder.is_dir():
            continue
        if not any(folder.iterdir()):
            _warn_of_empty(folder)
            continue
        steps.append(step)
    return sorted(steps)


@functools.cache  # once for each: every save asks for the steps
def _warn_of_empty(folder: Path) -> None:
    log.warning("%s is empty: passed over", folder)


def hidden(root: Path) -> list[Path]:
    """The folders of saves and deletions that are going on, or whose processes died."""
    return sorted(x for x in Path(root).iterdir() if _HIDDEN.fullmatch(x.name) and x.is_dir())


def new_nonce() -> str:
    return uuid.uuid4().hex[:8]


def unfinished(root: Path, step: int, nonce: str) -> Path:
    """The hidden folder in which a step is written."""
    return _hidden_folder(root, "unfinished", step, nonce)


def publish(unfinished: Path, folder: Path, overwrite: bool = False) -> None:
    """Gives a step that is wholly written its name, for good once this returns.

    Arguments:
      unfinished: the hidden folder, with everything in it.
      folder: its place.
      overwrite: whether a folder that is there already is replaced.

    Raises:
      FileExistsError: it is there already.
      OSError: the disk refuses.
    """
    for inside in unfinished.iterdir():
        if inside.is_dir():  # whose own folders TensorStore has synced, with each file
            sync(inside)
    sync(unfinished)
    root, replaced = folder.parent, None
    if _is_there(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} is there already")
        replaced = _renamed_away(folder, "replaced")
    os.rename(unfinished, folder)
    sync(root)
    if replaced is not None:
        shutil.rmtree(replaced)


def delete(folder: Path) -> None:
    """Deletes a step folder: first its name, so that it is never seen half deleted."""
    shutil.rmtree(_renamed_away(folder, "deleted"))


def sweep(root: Path) -> None:
    """Removes what saves of dead processes left behind; none may be going on below this root.

    A folder that was being replaced when its process died gets its name back.
    """
    for folder in hidden(root):
        kind, step, _ = folder.name[1:].split("-")
        place = step_folder(root, int(step))
        if kind == "replaced" and not _is_there(place):
            os.rename(folder, place)
        else:
            shutil.rmtree(folder)


def _is_there(folder: Path) -> bool:
    """Whether something is in the folder; an empty one counts for nothing, as in `published`."""
    return folder.is_dir() and any(folder.iterdir())


def _hidden_folder(root: Path, kind: str, step: int, nonce: str) -> Path:
    return Path(root) / f".{kind}-{step:08d}-{nonce}"


def _renamed_away(folder: Path, kind: str) -> Path:
    away = _hidden_folder(folder.parent, kind, step_of(folder) or 0, new_nonce())
    os.rename(folder, away)
    sync(folder.parent)
    return away
