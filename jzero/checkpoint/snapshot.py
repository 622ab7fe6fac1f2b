"""Host copies of a state's pieces, so that a save may go on while the next steps run."""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax
import numpy as np

from jzero.checkpoint.entries import Entry
from jzero.checkpoint.manifest import LeafEntry
from jzero.checkpoint.pieces import HostPiece
from jzero.checkpoint.zarr import leaf_entry

_SMALL = 2**18  # bytes; less is not worth a file of its own


@dataclass(frozen=True)
class Snapshot:
    """This process's own pieces of every leaf: each piece is in one process's snapshot alone.

    Attributes:
      leaves: name -> its entry in the manifest; the same in every process.
      pieces: name -> this process's pieces.
    """

    leaves: dict[str, LeafEntry]
    pieces: dict[str, tuple[HostPiece, ...]]


def snapshot(entries: Iterable[Entry]) -> Snapshot:
    """Copies this process's own pieces (those of replica 0) to the host, cut at the true shape.

    Waits for the arrays. Nothing in it is a view of a device's buffer, which the next step may be
    given. For the main thread.
    """
    entries = list(entries)
    for entry in entries:
        for shard in entry.array.addressable_shards:
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()
    leaves, pieces = {}, {}
    for entry in entries:
        if entry.is_key:
            leaves[entry.name] = leaf_entry(entry.shape, entry.dtype)
            pieces[entry.name] = tuple(_key_pieces(entry))
            continue
        shape = _piece_shape(entry)
        leaves[entry.name] = leaf_entry(entry.shape, entry.dtype, shape)
        pieces[entry.name] = tuple(_pieces(entry, shape))
    return Snapshot(leaves, pieces)


def _piece_shape(entry: Entry) -> tuple[int, ...]:
    """In which pieces a leaf is written: those of its devices, or neighbouring ones together.

    Small ones of one process go into one file; a large leaf that is kept whole is cut as if it were
    sharded, so that it is read piece by piece where it is.
    """
    array = entry.array
    piece = list(array.sharding.shard_shape(array.shape))
    sharded = [d for d, n in enumerate(piece) if n < array.shape[d]]
    size = math.prod(piece) * array.dtype.itemsize
    if not sharded and entry.cut is not None:
        dim, length = entry.cut
        if size * length >= _SMALL * piece[dim]:
            piece[dim] = length
    if len(sharded) == 1 and size:
        (dim,) = sharded
        together = _neighbours(entry, dim, _SMALL // size)
        piece[dim] = min(together * piece[dim], entry.shape[dim])
    return tuple(piece)


def _neighbours(entry: Entry, dim: int, most: int) -> int:
    """How many pieces along a dim can go together: no group of so many is of two processes."""
    array, owners = entry.array, {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        owners.setdefault(index[dim].start or 0, device.process_index)  # the first is replica 0
    of_piece = [owners[start] for start in sorted(owners)]
    for together in range(min(most, len(of_piece)), 1, -1):
        groups = [of_piece[i : i + together] for i in range(0, len(of_piece), together)]
        if all(len(set(group)) == 1 for group in groups):
            return together
    return 1


def _key_pieces(entry: Entry) -> Iterator[HostPiece]:
    """PRNG keys are kept whole; of an empty array of them there is nothing to write."""
    for shard in entry.array.addressable_shards:
        if shard.replica_id == 0 and math.prod(entry.shape):
            data = np.array(jax.random.key_data(shard.data))
            yield HostPiece((0,) * data.ndim, data.shape, data)


def _pieces(entry: Entry, piece: tuple[int, ...]) -> Iterator[HostPiece]:
    true = {}  # where it starts -> what is not padding of each shard
    for shard in entry.array.addressable_shards:
        start = tuple(i.start or 0 for i in shard.index)
        inside = [slice(max(n - at, 0)) for at, n in zip(start, entry.shape, strict=True)]
        if shard.replica_id == 0 and math.prod(shard.data.shape):
            data = np.asarray(shard.data)[(*inside, ...)]
            if data.size:
                true[start] = np.array(data) if _is_in_host_memory(shard.data) else data

    def group(start: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(at // n for at, n in zip(start, piece, strict=True))

    for _, starts in itertools.groupby(sorted(true), group):
        first, *others = starts
        data = true[first]
        if others:
            (dim,) = (d for d, at in enumerate(others[0]) if at != first[d])
            data = np.concatenate([data, *(true[start] for start in others)], dim)
        yield HostPiece(first, data.shape, data)


def _is_in_host_memory(x: jax.Array) -> bool:
    """Whether NumPy sees the buffer itself, not a copy."""
    (device,) = x.devices()
    return device.platform == "cpu" or x.sharding.memory_kind != device.default_memory().kind
