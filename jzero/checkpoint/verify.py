"""Whether a step folder is whole."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.damage import DamagedCheckpoint, step_of
from jzero.checkpoint.store import Reader
from jzero.checkpoint.window import windowed
from jzero.checkpoint.zarr import regions
from jzero.errors import JzeroError


def verify(folder: Path, *, quick: bool = False) -> None:
    """Checks every file of a step folder.

    Arguments:
      folder: the step folder.
      quick: presence, lengths and the stored checksums alone; otherwise all data is read.

    Raises:
      DamagedCheckpoint: a file that is missing, cut short or changed; it names the last complete
        step before.
      JzeroError: a later jzero wrote it.
    """
    with offering_the_step_before(folder):
        _verify(Path(folder), quick)


def _verify(folder: Path, quick: bool) -> None:
    reader = Reader(folder, manifest.read(folder))
    for name in reader.manifest.leaves:
        reader.check_files(name)
    if quick:
        return

    def jobs():
        for name, entry in reader.manifest.leaves.items():
            dtype = jnp.dtype(entry.array_dtype)
            for index in regions(entry):
                shape = [i.stop - i.start for i in index]
                out = np.empty(shape, dtype)
                yield math.prod(shape) * dtype.itemsize, partial(reader.start, name, index, out)

    for _ in windowed(jobs()):
        pass


def complete_before(folder: Path) -> int | None:
    """The last step before that of a step folder which is whole, at a quick look; None if none is.

    Arguments:
      folder: a step folder, below the same root as the others.
    """
    step = step_of(folder)
    earlier = [] if step is None else [s for s in folders.published(folder.parent) if s < step]
    for candidate in reversed(earlier):
        try:
            _verify(folders.step_folder(folder.parent, candidate), quick=True)
        except JzeroError:
            continue
        return candidate
    return None


@contextmanager
def offering_the_step_before(folder: Path) -> Iterator[None]:
    """Where a folder turns out to be damaged, the error says which step to go back to."""
    try:
        yield
    except DamagedCheckpoint as error:
        raise error.offering(complete_before(Path(folder))) from None
