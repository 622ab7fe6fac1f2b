"""What a folder of step folders holds, and whether each of them is whole."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jzero.checkpoint.damage import DamagedCheckpoint
from jzero.checkpoint.folders import half_replaced, published, step_folder
from jzero.checkpoint.verify import verify
from jzero.errors import JzeroError

QUIET_SECONDS = 3600
"""How long nothing is written into a hidden folder until it is taken for a dead save's."""


@dataclass(frozen=True)
class StepStatus:
    """A published step, and whether it is whole.

    Attributes:
      step: its number.
      folder: its folder.
      state: "unreadable" where a later jzero wrote it.
      problem: what is wrong with it; None where it is complete.
    """

    step: int
    folder: Path
    state: Literal["complete", "damaged", "unreadable"]
    problem: JzeroError | None


def steps_in(directory: str | Path) -> list[int]:
    """The published steps of a folder, ascending.

    Raises:
      JzeroError: no such folder, or no steps in it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise JzeroError(f"{directory}: no such folder")
    steps = published(directory)
    if not steps:
        lost = "".join(
            f"; {folder.name} is being replaced, or was when its run ended: jzero checkpoint prune "
            f"gives it its name back"
            for folder in half_replaced(directory).values()
        )
        raise JzeroError(f"{directory}: has no checkpoints (folders such as step_00000050){lost}")
    return steps


def make_folder(directory: Path) -> None:
    """Makes a folder for steps, where there is none.

    Raises:
      JzeroError: there can be none.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JzeroError(
            f"{directory}: no folder can be made there: {error.strerror}; give another"
        ) from None


def choose_step(directory: str | Path, step: int | None = None) -> Path:
    """The folder of a step, by default of the last one.

    Raises:
      JzeroError: no checkpoints there, or none of that step.
    """
    steps = steps_in(directory)
    if step is not None and step not in steps:
        raise JzeroError(f"{directory}: has no step {step}; there are {', '.join(map(str, steps))}")
    return step_folder(Path(directory), steps[-1] if step is None else step)


def check(directory: str | Path, step: int, *, quick: bool) -> StepStatus:
    """A published step and whether it is whole; see `verify` for `quick`."""
    folder = step_folder(Path(directory), step)
    try:
        verify(folder, quick=quick)
    except DamagedCheckpoint as error:
        return StepStatus(step, folder, "damaged", error)
    except JzeroError as error:
        return StepStatus(step, folder, "unreadable", error)
    return StepStatus(step, folder, "complete", None)


def survey(directory: str | Path) -> list[StepStatus]:
    """Every published step, after a quick look at its files.

    Raises:
      JzeroError: no such folder, or no steps in it.
    """
    return [check(directory, step, quick=True) for step in steps_in(directory)]


def quiet_seconds(folder: Path) -> float:
    """How long ago anything in a folder was written."""
    newest = folder.stat().st_mtime
    for path in folder.rglob("*"):
        try:
            newest = max(newest, path.stat().st_mtime)
        except FileNotFoundError:  # renamed meanwhile: it is alive
            newest = time.time()
    return time.time() - newest
