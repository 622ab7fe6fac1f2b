"""The arrays of a step folder: one Zarr (version 3) array per leaf.

A chunk is a device's piece or a part of one, uncompressed, with its CRC-32C at the end of its file.
Any other reader of Zarr reads them too.
"""

import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jzero.checkpoint.chunks import chunk_shape, chunks_of
from jzero.checkpoint.manifest import LeafEntry
from jzero.layout import struct

METADATA = "zarr.json"
_LONGEST_NAME = 200  # of a folder; file systems take 255 bytes
# What Zarr has a name for; other dtypes are stored as unsigned integers of their size.
_NATIVE = {
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "int4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3b11fnuz"),
}
_ZERO = {"b": False, "c": [0.0, 0.0]}  # of other kinds a 0
_CONTEXT = ts.Context({"file_io_concurrency": {"limit": 2}, "data_copy_concurrency": {"limit": 2}})


def array_folder(name: str) -> str:
    """The folder of a leaf's files within a step folder.

    Example:
      >>> array_folder("params/head/kernel")
      'arrays/params%2Fhead%2Fkernel'
    """
    encoded = name.encode(errors="surrogatepass")
    quoted = quote(encoded, safe="")
    if len(quoted) > _LONGEST_NAME:
        tag = hashlib.sha256(encoded).hexdigest()[:16]
        quoted = f"{quoted[: _LONGEST_NAME - 17]}-{tag}"
    return f"arrays/{quoted}"


def leaf_entry(
    shape: tuple[int, ...], dtype: str, piece: tuple[int, ...] | None = None
) -> LeafEntry:
    """A leaf's entry in the manifest, with chunks that suit its pieces.

    Arguments:
      shape: the true global shape.
      dtype: the dtype's name.
      piece: shape of a device's piece as stored; by default the whole leaf. Keys are always whole.

    Example:
      >>> leaf_entry((50, 16), "bfloat16", piece=(7, 16))
      LeafEntry(shape=(50, 16), dtype='bfloat16', chunk=(7, 16), bytes=1600)
      >>> leaf_entry((), "key<fry>")
      LeafEntry(shape=(), dtype='key<fry>', chunk=(2,), bytes=8)
    """
    if dtype.startswith("key<"):
        data = jax.eval_shape(jax.random.key_data, struct(shape, dtype))
        return LeafEntry(shape, dtype, data.shape, data.size * data.dtype.itemsize)
    itemsize = jnp.dtype(dtype).itemsize
    size = math.prod(shape) * itemsize
    chunk = chunk_shape(shape, piece or shape, itemsize) if size else shape
    return LeafEntry(shape, dtype, chunk, size)


def regions(entry: LeafEntry) -> Iterator[tuple[slice, ...]]:
    """The regions of a leaf's chunks, one after the other; none of an empty leaf."""
    if not entry.bytes:
        return
    counts = chunks_of(entry.array_shape, entry.chunk)
    for position in itertools.product(*map(range, counts)):
        yield tuple(
            slice(i * c, min((i + 1) * c, n))
            for i, c, n in zip(position, entry.chunk, entry.array_shape, strict=True)
        )


def chunk_files(
    name: str, entry: LeafEntry, start: tuple[int, ...], shape: tuple[int, ...]
) -> list[str]:
    """The files with the chunks of a region."""
    ranges = [
        range(i // c, -(-(i + n) // c)) for i, n, c in zip(start, shape, entry.chunk, strict=True)
    ]
    folder = array_folder(name)
    return [f"{folder}/{'.'.join(['c', *map(str, at)])}" for at in itertools.product(*ranges)]


def stored_dtype(entry: LeafEntry) -> np.dtype:
    dtype = jnp.dtype(entry.array_dtype)
    return dtype if dtype.name in _NATIVE else np.dtype(f"uint{8 * dtype.itemsize}")


def metadata(entry: LeafEntry) -> dict[str, Any]:
    dtype = stored_dtype(entry)
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": entry.array_shape,
        "data_type": dtype.name,
        "fill_value": _ZERO.get(dtype.kind, 0),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": entry.chunk}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "codecs": [
            {"name": "bytes", "configuration": {"endian": "little"}},
            {"name": "crc32c"},
        ],
    }


def open_array(folder: Path, name: str, entry: LeafEntry) -> ts.TensorStore:
    """The array, by what the manifest says of it; nothing is read or written yet."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(folder.absolute() / array_folder(name))},
        "metadata": metadata(entry),
        "store_data_equal_to_fill_value": True,  # zeros too: a missing file is damage
    }
    return ts.open(spec, open=True, assume_metadata=True, context=_CONTEXT).result()


def open_folder(folder: Path) -> ts.KvStore:
    """A step folder as files by path; written ones are on the disk for good."""
    spec = {"driver": "file", "path": f"{folder.absolute()}/"}
    return ts.KvStore.open(spec, context=_CONTEXT).result()
