"""The order of a run's steps: each one comes after all that its folder has."""

from collections.abc import Iterable
from pathlib import Path

import jax

from jzero.checkpoint import folders
from jzero.checkpoint.agree import from_first
from jzero.errors import JzeroError


def last_agreed(root: Path) -> int:
    """The last step that is there, -1 for none, as process 0 sees it, in every process.

    Raises:
      RunFailed: process 0 could not look, in the others.
    """
    return from_first(lambda: _last(root), f"look into {root}")


def last_alone(root: Path, own: Iterable[int | None]) -> int:
    """The same where other processes may not be asked: process 0 looks, they go by what they know.

    Arguments:
      root: the folder.
      own: the steps that this run wrote last and came from.
    """
    known = max((step for step in own if step is not None), default=-1)
    return _last(root) if jax.process_index() == 0 else known


def _last(root: Path) -> int:
    return max(folders.published(root), default=-1)


def check_not_before(root: Path, step: int, last: int, restored: int | None) -> None:
    """Whether no step of the folder would stay the latest one in the place of this.

    Arguments:
      root: the folder.
      step: that is to be saved.
      last: the folder's last one.
      restored: the step that the run came from; it stays.

    Raises:
      JzeroError: the last one comes after it.
    """
    if step < last:
        stays = step if step == restored else step - 1
        away = f"set_aside(after={stays}) moves those after {stays} away" if stays >= 0 else ""
        raise JzeroError(
            f"step {step} comes before {last}, which {root} has: "
            f"{away or 'delete the folder'}, or give this run one of its own"
        )


def check_new(root: Path, step: int, last: int) -> None:
    """Whether the folder does not have this step.

    Raises:
      JzeroError: it has.
    """
    if step == last:
        away = f"set_aside(after={step - 1}) moves it away" if step else "delete the folder"
        raise JzeroError(
            f"step {step} is in {root} already: save(..., overwrite=True) replaces it; or {away}, "
            f"or give this run one of its own"
        )
