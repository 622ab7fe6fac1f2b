"""Saving a step of a run: the pieces of every process, then what process 0 makes of them."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.checkpoint import folders, processes
from jzero.checkpoint.draft import attempt, check_absent, finish
from jzero.checkpoint.manifest import Facts, Manifest
from jzero.checkpoint.pieces import write_arrays
from jzero.checkpoint.processes import Written
from jzero.checkpoint.snapshot import Snapshot


def agree_nonce() -> str:
    """A name for one save, the same in every process: a collective, for the main thread."""
    nonce = folders.new_nonce()
    if jax.process_count() == 1:
        return nonce
    return f"{int(multihost_utils.broadcast_one_to_all(np.uint32(int(nonce, 16)))):08x}"


def save_step(
    root: Path,
    step: int,
    snapshot: Snapshot,
    facts: Facts,
    *,
    nonce: str,
    overwrite: bool = False,
    timeout: float = 1800.0,
) -> Path:
    """Writes a step and publishes it.

    May run in a thread: it does nothing on devices. Every process calls it with its own snapshot.

    Arguments:
      root: the folder of step folders, which is there and is the same for all processes.
      step: the step's number.
      snapshot, facts: as `snapshot` and `facts_of` give them.
      nonce: from `agree_nonce`.
      overwrite: whether a folder of that step is replaced; otherwise it is an error.
      timeout: seconds to wait for other processes.

    Returns:
      The step folder, once it is there, in every process.

    Raises:
      JzeroError: the step is there already.
      RunFailed: a disk that is full or read-only, a folder that is gone, a process that is missing
        or failed. What was written is removed where that is possible.
    """
    folder, draft = folders.step_folder(root, step), folders.unfinished(root, step, nonce)
    process, count = jax.process_index(), jax.process_count()

    with attempt(step, draft, process, count):
        if process == 0 and not overwrite:  # the others may see the folder as it was before
            check_absent(folder)
        draft.mkdir(exist_ok=count > 1)
        arrays = ((name, leaf, snapshot.pieces[name]) for name, leaf in snapshot.leaves.items())
        own = Written(write_arrays(draft, arrays), facts.data[0])
        if process > 0:
            processes.hand_in(draft, process, own)
            processes.await_publication(draft, folder, timeout)
            return folder
        every = [own, *processes.collect(draft, count, timeout)]
        files = {path: file for each in every for path, file in each.files.items()}
        data = tuple(each.data for each in every)
        facts = replace(facts, data=data if any(x != data[0] for x in data) else data[:1])
        finish(draft, folder, Manifest(step, snapshot.leaves, files, facts), overwrite)
    return folder
