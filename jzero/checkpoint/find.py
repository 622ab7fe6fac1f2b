"""Finding the step to restore, and looking at it before anything of it is read."""

from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.agree import all_or_none
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
      RunFailed: another process could not find it.
    """
    step = None if step is None else whole_number("step", step)
    found = all_or_none(lambda: _find(root, step), "find the step")
    if jax.process_count() > 1:  # one process may see a new folder later than another
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    return None if found < 0 else folders.step_folder(root, found)


def _find(root: Path, step: int | None) -> int:
    """The step as this process sees it; -1 for none."""
    last = max(folders.published(root), default=-1)
    for lost, folder in folders.half_replaced(root).items():
        if lost == step or (step is None and lost > last):  # nothing goes back by itself
            raise JzeroError(
                f"step {lost} in {root} was being replaced when its run ended: the old one is in "
                f"{folder.name}; restore in the `with` block of a checkpointer, which gives it its "
                f"name back"
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
