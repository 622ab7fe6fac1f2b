"""From the rows that each process has to global arrays."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jzero.errors import JzeroError
from jzero.mesh import ZeroMesh
from jzero.paths import flatten


def place_batch(mesh: ZeroMesh, batch: Any) -> Any:
    """A batch as global arrays, rows spread over the data axes.

    Arguments:
      mesh: the mesh.
      batch: pytree of arrays [rows of this process, ...]; global `jax.Array`s pass through.
    """

    # Placed before, as in most loops: nothing to check, and no names of leaves to make.
    if all(isinstance(x, jax.Array) and x.sharding == mesh.batch for x in jax.tree.leaves(batch)):
        return batch

    def one(x):
        if isinstance(x, jax.Array):
            if not x.is_fully_addressable or x.sharding == mesh.batch:
                return x
            if x.sharding.is_equivalent_to(mesh.batch, x.ndim):
                return jax.device_put(x, mesh.batch)  # of another mesh: its axes' names go
        return jax.make_array_from_process_local_data(mesh.batch, np.asarray(x))

    _check_rows(mesh, batch)
    return jax.tree.map(one, batch)


def batches(mesh: ZeroMesh, loader: Iterable[Any], drop_last: bool) -> Iterator[Any]:
    """Global batches from a loader of per-process rows.

    Arguments:
      mesh: the mesh.
      loader: yields pytrees of arrays [rows of this process, ...], always of the same rows.
      drop_last: leave out a batch with fewer rows than the first; it would compile again, and
        hang where processes disagree.

    Raises:
      JzeroError: a batch with other rows than the first, naming both.
    """
    rows = None
    for index, batch in enumerate(loader):
        here = _rows(batch)
        rows = here if rows is None else rows
        if here < rows and drop_last:
            return
        if here != rows:
            raise JzeroError(
                f"batch {index} of the loader has {here} rows in this process and the first had "
                f"{rows}; every batch needs the same: drop the last one "
                f'("dataloader_drop_last": true), or fill it up with rows of weight 0'
            )
        yield place_batch(mesh, batch)


def _rows(batch: Any) -> int:
    leaves = jax.tree.leaves(batch)
    if not leaves or not np.ndim(leaves[0]):
        raise JzeroError(
            f"the loader yields {batch!r:.60}; it must yield batches: pytrees of arrays with rows "
            f"in dim 0"
        )
    return leaves[0].shape[0]


def _check_rows(mesh: ZeroMesh, batch: Any) -> None:
    shares = mesh.local_data_size
    for path, x in flatten(batch).items():
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            continue
        if not np.ndim(x) or x.shape[0] % shares:
            raise JzeroError(
                f"batch[{path}] of shape {np.shape(x)}: this process has {shares} data-parallel "
                f"devices (mesh axes {', '.join(mesh.data_axes)}), so it needs a multiple of "
                f"{shares} rows in dim 0"
            )
