"""Finding the step to restore, and looking at it before anything of it is read."""

from pathlib import Path

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.agree import from_first
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.number import whole_number
from jzero.checkpoint.steps import choose_step
from jzero.checkpoint.store import Reader
from jzero.checkpoint.verify import offering_the_step_before
from jzero.errors import JzeroError


def find(root: Path, step: int | None = None) -> Path | None:
    """The folder of a step, by default of the last one: the same in every process.

    Returns:
      None where there is no step and none was asked for.

    Raises:
      JzeroError: a step that is no number, is not there, or was being replaced.
      RunFailed: process 0 could not find it, in the others.
    """
    step = None if step is None else whole_number("step", step)
    found = from_first(lambda: _find(root, step), "find the step")
    return None if found < 0 else folders.step_folder(root, found)


def _find(root: Path, step: int | None) -> int:
    """The step as this process sees it; -1 for none."""
    last = max(folders.published(root), default=-1)
    for lost, folder in folders.half_replaced(root).items():
        if lost == step or (step is None and lost > last):  # nothing goes back by itself
            raise JzeroError(
                f"step {lost} in {root} is being replaced, or was when its run ended: the old one "
                f"is in {folder.name}; restore in the `with` block of a checkpointer, which gives "
                f"it its name back"
            )
    if step is None:
        return last
    choose_step(root, step)
    return step


def look(folder: Path) -> Manifest:
    """A step's manifest, once all its files are there, with their lengths and stored checksums.

    Raises:
      DamagedCheckpoint: a file that is missing, cut short or changed; with the complete step
        before.
    """
    with offering_the_step_before(folder):
        found = manifest.read(folder)
        reader = Reader(folder, found)
        for name in found.leaves:
            # The few scalars are read: of those that a run happens not to need, too.
            check = reader.region if name.startswith("progress/") else reader.check_files
            check(name)
    return found
