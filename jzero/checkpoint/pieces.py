"""Writing pieces of arrays, several at a time."""

import errno
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.files import FileEntry, chunk_entry, text_entry
from jzero.checkpoint.manifest import LeafEntry
from jzero.checkpoint.window import windowed
from jzero.checkpoint.zarr import (
    METADATA,
    array_folder,
    chunk_files,
    metadata,
    open_array,
    open_folder,
    stored_dtype,
)


@dataclass(frozen=True)
class HostPiece:
    """A part of an array on the host, made of whole chunks.

    Attributes:
      start: its first index in each dim of the true global array.
      shape: its true shape.
      data: its elements, or a function that gives them when they are written.
    """

    start: tuple[int, ...]
    shape: tuple[int, ...]
    data: np.ndarray | Callable[[], np.ndarray]


def write_arrays(
    folder: Path, leaves: Iterable[tuple[str, LeafEntry, Iterable[HostPiece]]]
) -> dict[str, FileEntry]:
    """Writes pieces of leaves and waits until they are on the disk.

    Arguments:
      folder: the step folder.
      leaves: (name, entry, pieces); the process that has a leaf's first piece writes its metadata.

    Returns:
      Path within the folder -> file, of all files written.

    Raises:
      OSError: the disk refuses.
    """
    files: dict[str, FileEntry] = {}

    def jobs():
        for name, entry, pieces in leaves:
            for piece in pieces:
                if not any(piece.start):
                    yield 0, partial(_start_metadata, folder, name, entry)
                size = math.prod(piece.shape) * jnp.dtype(entry.array_dtype).itemsize
                yield size, partial(_start, folder, name, entry, piece)

    for written in windowed(jobs()):
        files.update(written)
    return files


@dataclass(frozen=True)
class _Writing:
    """Files on their way to the disk."""

    folder: Path
    paths: list[str]
    future: Any
    look: Callable[[Path], FileEntry]

    def result(self) -> dict[str, FileEntry]:
        try:
            self.future.result()
        except ValueError as error:
            raise _os_error(error) from None
        return {path: self.look(self.folder / path) for path in self.paths}


def _start(folder: Path, name: str, entry: LeafEntry, piece: HostPiece) -> _Writing:
    data = piece.data if isinstance(piece.data, np.ndarray) else piece.data()
    region = tuple(slice(i, i + n) for i, n in zip(piece.start, piece.shape, strict=True))
    future = open_array(folder, name, entry)[region].write(
        np.ascontiguousarray(data).view(stored_dtype(entry)).reshape(piece.shape),
        can_reference_source_data_indefinitely=True,
    )
    paths = chunk_files(name, entry, piece.start, piece.shape)
    return _Writing(folder, paths, future, chunk_entry)


def _start_metadata(folder: Path, name: str, entry: LeafEntry) -> _Writing:
    path, text = f"{array_folder(name)}/{METADATA}", json.dumps(metadata(entry))
    return _Writing(folder, [path], open_folder(folder).write(path, text), text_entry)


def _os_error(error: ValueError) -> OSError:
    """TensorStore's error as the system's, with its number where it names one."""
    code = re.search(r"os_error_code='(\d+)'", str(error))
    if code is None:
        return OSError(errno.EIO, str(error))
    return OSError(int(code[1]), os.strerror(int(code[1])))
