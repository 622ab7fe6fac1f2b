"""From files onto devices: each process reads its own pieces, every distinct one once."""

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from jzero.checkpoint.entries import Entry
from jzero.checkpoint.store import Reader, Reading
from jzero.checkpoint.window import windowed

_ALIGNMENT = 64  # bytes; XLA's, of arrays that it takes without copying


@dataclass(frozen=True)
class _Piece:
    """What some of this process's devices keep of a leaf: its bounds in the stored array."""

    index: tuple[slice, ...]
    devices: tuple[Any, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(i.stop - i.start for i in self.index)


@dataclass(frozen=True)
class _Filling:
    """A piece on its way into an array on the host."""

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
    pieces = {entry.name: _pieces(_data(entry.array)) for entry in entries}

    def jobs():
        for entry in entries:
            dtype = _data(entry.array).dtype
            for piece in pieces[entry.name]:
                size = math.prod(piece.shape) * dtype.itemsize
                yield size, partial(_fill, reader, entry, piece, dtype)

    read, arrays = windowed(jobs()), {}
    for entry in entries:
        data = _data(entry.array)
        shards = []
        for piece in pieces[entry.name]:
            host = next(read)
            places = [
                SingleDeviceSharding(device, memory_kind=data.sharding.memory_kind)
                for device in piece.devices
            ]
            # Waits: the host's copy is given up before the next one is read.
            shards += jax.block_until_ready([jax.device_put(host, place) for place in places])
        array = jax.make_array_from_single_device_arrays(
            data.shape, data.sharding, shards, dtype=data.dtype
        )
        arrays[entry.name] = _as_keys(array, entry.array) if _is_key(entry.array) else array
    return arrays


def _pieces(data: jax.ShapeDtypeStruct) -> list[_Piece]:
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in _sharding(data).addressable_devices_indices_map(data.shape).items():
        assert index is not None
        bounds = tuple(i.indices(n)[:2] for i, n in zip(index, data.shape, strict=True))
        devices.setdefault(bounds, []).append(device)
    return [
        _Piece(tuple(slice(*b) for b in bounds), tuple(those)) for bounds, those in devices.items()
    ]


def _fill(reader: Reader, entry: Entry, piece: _Piece, dtype: np.dtype) -> _Filling:
    """Begins to read a piece; what of it is padding stays zero."""
    true = reader.manifest.leaves[entry.name].array_shape
    host = _host_zeros(piece.shape, dtype)
    inside = tuple(
        slice(min(i.start, n), min(i.stop, n)) for i, n in zip(piece.index, true, strict=True)
    )
    part = host[(*(slice(i.stop - i.start) for i in inside), ...)]
    return _Filling(host, reader.start(entry.name, inside, part))


def _host_zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array that XLA must copy, in memory that goes back to the system with it.

    On CPUs XLA takes an aligned one as a device's buffer, even as that of several devices, which
    then is not theirs to give to a step.
    """
    size = math.prod(shape) * dtype.itemsize
    raw = np.frombuffer(mmap.mmap(-1, size + 2 * _ALIGNMENT), np.uint8)
    first = -raw.ctypes.data % _ALIGNMENT + _ALIGNMENT // 8
    return raw[first : first + size].view(dtype).reshape(shape)


def _is_key(x: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _data(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Of PRNG keys, which are kept whole, their key data; of others themselves."""
    if not _is_key(x):
        return x
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=x.sharding)


def _as_keys(data: jax.Array, like: jax.ShapeDtypeStruct) -> jax.Array:
    kind: list[Any] = []
    jax.eval_shape(lambda key: kind.append(jax.random.key_impl(key)), like)
    wrap = partial(jax.random.wrap_key_data, impl=kind[0])
    return jax.jit(wrap, out_shardings=like.sharding)(data)


def _sharding(x: jax.ShapeDtypeStruct) -> Sharding:
    assert x.sharding is not None
    return x.sharding
