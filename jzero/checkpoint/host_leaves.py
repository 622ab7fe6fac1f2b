"""Making a step folder from arrays on the host, in one process: what imports do."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.draft import attempt, check_absent, finish
from jzero.checkpoint.folders import new_nonce, step_folder, unfinished
from jzero.checkpoint.manifest import Facts, LeafEntry, Manifest
from jzero.checkpoint.pieces import HostPiece, write_arrays
from jzero.checkpoint.zarr import leaf_entry
from jzero.errors import JzeroError

HostLeaf = tuple[str, tuple[int, ...], str, np.ndarray | Callable[[], np.ndarray]]
"""A leaf's name, its shape, its dtype's name, and its elements or a function that gives them."""


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
    folder, draft = step_folder(root, step), unfinished(root, step, new_nonce())
    if not overwrite:
        check_absent(folder)
    entries: dict[str, LeafEntry] = {}

    def arrays() -> Iterator[tuple[str, LeafEntry, list[HostPiece]]]:
        for name, shape, dtype, data in leaves:
            if name in entries:
                raise JzeroError(f"two leaves are both named {name!r}")
            entries[name] = entry = leaf_entry(tuple(shape), dtype)
            start = (0,) * len(entry.array_shape)
            whole = HostPiece(start, entry.array_shape, partial(_checked, name, entry, data))
            yield name, entry, [whole] if entry.bytes else []

    with attempt(step, draft):
        draft.mkdir(parents=True)
        files = write_arrays(draft, arrays())
        finish(draft, folder, Manifest(step, entries, files, facts), overwrite)
    return folder


def _checked(
    name: str, entry: LeafEntry, data: np.ndarray | Callable[[], np.ndarray]
) -> np.ndarray:
    array = data if isinstance(data, np.ndarray) else data()
    if array.shape != entry.array_shape or array.dtype != jnp.dtype(entry.array_dtype):
        raise JzeroError(
            f"{name}: expected {entry.array_shape} {entry.array_dtype}, found {array.shape} "
            f"{array.dtype}"
        )
    return array
