"""Which steps are kept, and which are put out of the way."""

import os
from collections.abc import Sequence
from pathlib import Path

from jzero.checkpoint import folders
from jzero.checkpoint.files import sync
from jzero.checkpoint.number import whole_number
from jzero.errors import JzeroError, RunFailed


def intervals(
    every: int, keep_last: int | None, keep_every: int | None
) -> tuple[int, int | None, int | None]:
    """How a run saves and keeps steps, as a user gives it.

    Raises:
      JzeroError: an interval or a number that is not whole and positive, or does not fit.
    """
    every = whole_number("every", every, least=1)
    if keep_last is not None:
        keep_last = whole_number("keep_last", keep_last, least=1)
    if keep_every is not None:
        keep_every = whole_number("keep_every", keep_every, least=1)
    if keep_every is not None and keep_every % every:
        raise JzeroError(
            f"keep_every={keep_every} is not a multiple of every={every}: most of those steps "
            f"would never be saved"
        )
    return every, keep_last, keep_every


def superseded(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """The steps to delete.

    Arguments:
      steps: all that there are, ascending.
      keep_last: how many of the last ones stay; None for all.
      keep_every: of each multiple of it the step stays for good, or the first one after; None for
        none.

    Example:
      >>> superseded([50, 100, 150, 210, 250, 280], keep_last=2, keep_every=100)
      [50, 150]
    """
    if keep_last is None:
        return []
    before = [0, *steps]
    return [
        step
        for last, step in zip(before, steps[:-keep_last], strict=False)
        if keep_every is None or (step % keep_every and step // keep_every == last // keep_every)
    ]


def set_aside(root: Path, after: int) -> Path | None:
    """Moves the steps after one into a folder `after_<step>` beside them, which nothing reads.

    Returns:
      That folder; None where there are no such steps.

    Raises:
      RunFailed: the disk refuses.
    """
    try:
        steps = [step for step in folders.published(root) if step > after]
        return _move(root, after, steps) if steps else None
    except OSError as error:
        raise RunFailed(
            f"{root}: the steps after {after} cannot be moved away: {error.strerror or error}"
        ) from error


def _move(root: Path, after: int, steps: Sequence[int]) -> Path:
    aside = root / f"after_{after:08d}"
    number = 1
    while aside.exists():
        number += 1
        aside = root / f"after_{after:08d}-{number}"
    aside.mkdir()
    for step in reversed(steps):  # the last first: what is left is always a run up to some step
        folder = folders.step_folder(root, step)
        os.rename(folder, aside / folder.name)
    sync(aside)
    sync(root)
    return aside
