"""From files onto devices: each process reads its own shards, every distinct one once."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jzero.checkpoint.entries import Entry
from jzero.checkpoint.store import Reader, Reading
from jzero.checkpoint.window import windowed

_ALIGNMENT = 64  # bytes; XLA's, of arrays that it takes without copying


@dataclass(frozen=True)
class _Shard:
    """What some of this process's devices keep of a leaf: its bounds in the stored array."""

    index: tuple[slice, ...]
    devices: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(i.stop - i.start for i in self.index)


@dataclass(frozen=True)
class _Filling:
    """A shard on its way into an array on the host."""

    array: np.ndarray
    reading: Reading

    def result(self) -> np.ndarray:
        self.reading.result()
        return self.array


def read_leaves(reader: Reader, entries: Sequence[Entry]) -> dict[str, jax.Array]:
    """Reads leaves onto the devices that keep them.

    Arguments:
      reader: of a step folder that has them all, with these shapes and dtypes.
      entries: abstract: the stored shape, the dtype and the sharding of each.

    Returns:
      name -> array. Each buffer is the device's own, so that a step may be given it.

    Raises:
      DamagedCheckpoint: a file that is needed is missing, cut short or changed.
    """
    stored = {entry.name: _stored(entry) for entry in entries}
    shards = {name: _shards(x) for name, x in stored.items()}

    def jobs():
        for name, x in stored.items():
            for shard in shards[name]:
                size = math.prod(shard.shape) * x.dtype.itemsize
                yield size, partial(_fill, reader, name, shard, x.dtype)

    read, arrays = windowed(jobs()), {}
    for entry in entries:
        x = stored[entry.name]
        kind, buffers = x.sharding.memory_kind, []
        for shard in shards[entry.name]:
            host = next(read)
            places = [SingleDeviceSharding(device, memory_kind=kind) for device in shard.devices]
            # Waits: the host's copy is given up before the next one is read.
            buffers += jax.block_until_ready([jax.device_put(host, place) for place in places])
        array = jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, buffers, dtype=x.dtype
        )
        arrays[entry.name] = _as_keys(array, entry.array) if entry.is_key else array
    return arrays


def _stored(entry: Entry) -> jax.ShapeDtypeStruct:
    """What is kept of a leaf: of PRNG keys, which are kept whole, their key data."""
    x = entry.array
    if not entry.is_key:
        return x
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def _shards(x: jax.ShapeDtypeStruct) -> list[_Shard]:
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in x.sharding.addressable_devices_indices_map(x.shape).items():
        assert index is not None
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index, x.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [
        _Shard(tuple(slice(*b) for b in bounds), tuple(those)) for bounds, those in devices.items()
    ]


def _fill(reader: Reader, name: str, shard: _Shard, dtype: np.dtype) -> _Filling:
    """Begins to read a shard; what of it is padding stays zero."""
    true = reader.manifest.leaves[name].array_shape
    host = _host_zeros(shard.shape, dtype)
    inside = tuple(
        slice(min(i.start, n), min(i.stop, n)) for i, n in zip(shard.index, true, strict=True)
    )
    part = host[(*(slice(i.stop - i.start) for i in inside), ...)]
    return _Filling(host, reader.start(name, inside, part))


def _host_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that XLA must copy, in memory that goes back to the system with it.

    On CPUs XLA takes an aligned one as a device's buffer, even as that of several devices, which
    then is not theirs to give to a step.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer(mmap.mmap(-1, size + 2 * _ALIGNMENT), np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT + _ALIGNMENT // 8
    return raw[first : first + size].view(dtype).reshape(shape)


def _as_keys(data: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    kind: list[Any] = []
    jax.eval_shape(lambda key: kind.append(jax.random.key_impl(key)), like)
    wrap = partial(jax.random.wrap_key_data, impl=kind[0])
    return jax.jit(wrap, out_shardings=like.sharding)(data)
