"""The error of a step folder that is not whole."""

import re
from pathlib import Path

from jzero.errors import JzeroError


def step_of(folder: Path) -> int | None:
    """The step that a folder's name says, if it is a step folder's.

    Example:
      >>> step_of(Path("checkpoints/step_00000050")), step_of(Path("checkpoints/best"))
      (50, None)
    """
    named = re.fullmatch(r"step_([0-9]{8}|[1-9][0-9]{8,})", folder.name)
    return int(named[1]) if named else None


class DamagedCheckpoint(JzeroError):
    """A published step folder with a file that is missing, cut short or changed.

    Attributes:
      folder: the step folder.
      step: its step, or None where its name tells none.
      file: the file's path within it.
      problem: what is wrong with the file, in words.
      before: the last complete step before it; None if there is none or it was not looked for.
    """

    def __init__(self, folder: Path, file: str, problem: str, offer: str = ""):
        super().__init__(f"{folder} is damaged: {file} {problem}{offer}")
        self.folder = folder
        self.file = file
        self.problem = problem
        self.step = step_of(folder)
        self.before: int | None = None

    def offering(self, before: int | None) -> "DamagedCheckpoint":
        """The same error, which names the last complete step before that one."""
        offer = (
            "; no complete step is before it"
            if before is None
            else f"; as far as a quick look tells, the last complete step before it is {before}: "
            f"restore that one and set_aside(after={before}), or delete the damaged folder"
        )
        error = DamagedCheckpoint(self.folder, self.file, self.problem, offer)
        error.before = before
        return error
