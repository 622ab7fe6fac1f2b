"""Writing one step: the pieces of every process, then the manifest, then the folder's name."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jzero.checkpoint import folders, manifest, parts
from jzero.checkpoint.damage import DamagedCheckpoint
from jzero.checkpoint.manifest import Facts, LeafEntry, Manifest
from jzero.checkpoint.parts import Part
from jzero.checkpoint.pieces import Piece, write_arrays
from jzero.checkpoint.snapshot import Snapshot
from jzero.checkpoint.store import Reader
from jzero.checkpoint.zarr import leaf_entry
from jzero.errors import JzeroError, RunFailed


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
    folder, draft = _places(root, step, nonce, overwrite)
    process, count = jax.process_index(), jax.process_count()

    with _attempt(step, draft, process, count):
        draft.mkdir(exist_ok=count > 1)
        arrays = ((name, leaf, snapshot.pieces[name]) for name, leaf in snapshot.leaves.items())
        part = Part(write_arrays(draft, arrays), facts.data[0])
        if process > 0:
            parts.hand_in(draft, process, part)
            parts.await_publication(draft, folder, timeout)
            return folder
        every = [part, *parts.collect(draft, count, timeout)]
        files = {path: file for part in every for path, file in part.files.items()}
        data = tuple(part.data for part in every)
        facts = replace(facts, data=data if any(x != data[0] for x in data) else data[:1])
        _finish(draft, folder, Manifest(step, snapshot.leaves, files, facts), overwrite)
    return folder


# A leaf's name, its shape, the name of its dtype, and its elements or a function that gives them.
HostLeaf = tuple[str, tuple[int, ...], str, np.ndarray | Callable[[], np.ndarray]]


def write_leaves(
    root: Path, step: int, leaves: Iterable[HostLeaf], facts: Facts, *, overwrite: bool = False
) -> Path:
    """Makes a step folder from arrays on the host, leaf by leaf, in one process.

    Arguments:
      root: the folder of step folders; made if it is not there.
      step: the step's number.
      leaves: (name, shape, dtype's name, array or a function that gives it when it is written). Of
        a PRNG key the array is its key data; dtype `key<fry>`, and the shape is the key's own.
      facts: such as `Facts(source="imported from ...")`.
      overwrite: whether a folder of that step is replaced; otherwise it is an error.

    Returns:
      The step folder.

    Raises:
      JzeroError: the step is there already; a name that comes twice; an array of another shape or
        dtype than it was said to have.
      RunFailed: it cannot be written.
    """
    folder, draft = _places(root, step, folders.new_nonce(), overwrite)
    entries: dict[str, LeafEntry] = {}

    def arrays() -> Iterator[tuple[str, LeafEntry, list[Piece]]]:
        for name, shape, dtype, data in leaves:
            if name in entries:
                raise JzeroError(f"two leaves are both named {name!r}")
            entries[name] = entry = leaf_entry(tuple(shape), dtype)
            start = (0,) * len(entry.array_shape)
            whole = Piece(start, entry.array_shape, partial(_checked, name, entry, data))
            yield name, entry, [whole] if entry.bytes else []

    with _attempt(step, draft):
        draft.mkdir(parents=True)
        files = write_arrays(draft, arrays())
        _finish(draft, folder, Manifest(step, entries, files, facts), overwrite)
    return folder


def _checked(name: str, entry: LeafEntry, data: Any) -> np.ndarray:
    array: np.ndarray = data if isinstance(data, np.ndarray) else data()
    if array.shape != entry.array_shape or array.dtype != jnp.dtype(entry.array_dtype):
        raise JzeroError(
            f"{name}: expected {entry.array_shape} {entry.array_dtype}, found {array.shape} "
            f"{array.dtype}"
        )
    return array


def _places(root: Path, step: int, nonce: str, overwrite: bool) -> tuple[Path, Path]:
    """The step's folder, and the one in which it is written."""
    if step in folders.published(root) and not overwrite:
        raise JzeroError(
            f"{folders.step_folder(root, step)} is there already; save with overwrite=True to "
            f"replace it"
        )
    return folders.step_folder(root, step), folders.unfinished(root, step, nonce)


def _finish(draft: Path, folder: Path, whole: Manifest, overwrite: bool) -> None:
    """Publishes what was written, if all of it is there."""
    reader = Reader(draft, whole)
    for name in whole.leaves:
        reader.check_files(name)
    manifest.write(draft, whole)
    folders.publish(draft, folder, overwrite)


@contextmanager
def _attempt(step: int, draft: Path, process: int = 0, count: int = 1) -> Iterator[None]:
    """When something fails: removes the unfinished folder, tells the others, names the step."""
    try:
        yield
    except BaseException as error:
        reason = _reason(error, draft.parent)
        with suppress(OSError):
            if process == 0 and count > 1:
                parts.give_up(draft)
            if process == 0:
                shutil.rmtree(draft, ignore_errors=True)
            elif parts.given_up(draft):  # process 0 has taken the folder away
                reason = parts.GIVEN_UP
                shutil.rmtree(draft, ignore_errors=True)
            else:
                parts.hand_in(draft, process, Part(error=reason))
        if not isinstance(error, OSError | RunFailed | DamagedCheckpoint):
            raise
        text = f"step {step} was not saved below {draft.parent}: {reason}"
        raise RunFailed(text) from None


def _reason(error: BaseException, root: Path) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error) if root.exists() else "the folder is gone"
    if isinstance(error, DamagedCheckpoint):
        return f"{error.file} {error.problem}"
    return str(error) or type(error).__name__
