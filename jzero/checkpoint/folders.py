"""Step folders: a folder of a step is complete or not there.

A step is written in a hidden folder beside the others and renamed once all of it is on the disk.
Whatever has another name than `step_` and the step in eight digits is passed over.
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

_HIDDEN = re.compile(r"\.(?:unfinished|failed|deleted|replaced)-[0-9]+-\w+")


def step_folder(root: Path, step: int) -> Path:
    """Where a step is published.

    Example:
      >>> step_folder(Path("runs"), 50).name
      'step_00000050'
    """
    return Path(root) / f"step_{step:08d}"


def published(root: Path) -> list[int]:
    """The steps that have a folder, ascending; empty folders are passed over with a warning."""
    steps = []
    for folder in _inside(root) or []:
        step = step_of(folder)
        inside = None if step is None else _inside(folder)
        if inside:
            steps.append(step)
        elif inside is not None:
            _warn_of_empty(folder)
    return sorted(steps)


def is_there(folder: Path) -> bool:
    """Whether a step's folder is there; an empty one counts for nothing, as in `published`."""
    return bool(_inside(folder))


def _inside(folder: Path) -> list[Path] | None:
    """What is in a folder; None where there is none, or no more: a save may be deleting it."""
    try:
        return list(Path(folder).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return None


@functools.cache  # once for each: every save asks for the steps
def _warn_of_empty(folder: Path) -> None:
    log.warning("%s is empty: passed over", folder)


def hidden(root: Path) -> list[Path]:
    """The folders of saves and deletions that are going on, or whose processes died."""
    return sorted(x for x in _inside(root) or [] if _HIDDEN.fullmatch(x.name) and x.is_dir())


def half_replaced(root: Path) -> dict[int, Path]:
    """Steps that have lost their folder and not got the new one: step -> where the old one is."""
    away = {_step_of_hidden(x): x for x in hidden(root) if x.name.startswith(".replaced-")}
    return {step: x for step, x in away.items() if not is_there(step_folder(root, step))}


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
    if is_there(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} is there already")
        replaced = _renamed_away(folder, "replaced")
    try:
        os.rename(unfinished, folder)
    except OSError:
        if replaced is not None:
            os.rename(replaced, folder)
        raise
    sync(root)
    if replaced is not None:
        _remove(replaced)


def delete(folder: Path) -> None:
    """Deletes a step folder: first its name, so that it is never seen half deleted."""
    _remove(_renamed_away(folder, "deleted"))


def sweep(root: Path) -> None:
    """Removes what saves of dead processes left behind; none may be going on below this root.

    A folder that was being replaced when its process died gets its name back.
    """
    for step, folder in half_replaced(root).items():
        os.rename(folder, step_folder(root, step))
    for folder in hidden(root):
        _remove(folder)


def _remove(folder: Path) -> None:
    """Deletes a folder with all that is in it; of a link to one, the link."""
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder)


def _step_of_hidden(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _hidden_folder(root: Path, kind: str, step: int, nonce: str) -> Path:
    return Path(root) / f".{kind}-{step:08d}-{nonce}"


def _renamed_away(folder: Path, kind: str) -> Path:
    away = _hidden_folder(folder.parent, kind, step_of(folder) or 0, new_nonce())
    os.rename(folder, away)
    sync(folder.parent)
    return away
