"""Finding the step to restore, and looking at it before anything of it is read."""

from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.steps import choose_step
from jzero.checkpoint.store import Reader
from jzero.checkpoint.verify import offering_the_step_before


def find(root: Path, step: int | None = None) -> Path | None:
    """The folder of a step, by default of the last one: the same in every process.

    Returns:
      None where there is no step and none was asked for.

    Raises:
      JzeroError: there is no such step.
    """
    if step is not None:
        return choose_step(root, step)
    last = max(folders.published(root), default=-1)
    if jax.process_count() > 1:  # one process may see a new folder later than another
        last = int(multihost_utils.broadcast_one_to_all(np.int32(last)))
    return None if last < 0 else folders.step_folder(root, last)


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
