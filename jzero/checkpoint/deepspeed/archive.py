"""The zip that `torch.save` writes: a pickle, and the bytes that its tensors share."""

import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np

from jzero.errors import JzeroError

_LOCAL_HEADER = struct.Struct("<26xHH")  # before each member: at its end two lengths
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Storage:
    """Bytes that one or several tensors look at: a member of the zip, not compressed.

    Attributes:
      file: the zip.
      offset: of the member's first byte in it.
      dtype: NumPy's name.
      size: number of elements.
    """

    file: Path
    offset: int
    dtype: str
    size: int

    def __setstate__(self, state: Any) -> NoReturn:
        refuse_state(self)


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      storage: where its elements are.
      start: index of the first one there.
      shape, strides: in elements.
    """

    storage: Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def read(self) -> np.ndarray:
        """The values, read only, mapped from the file: what is not looked at is not read."""
        dtype = jnp.dtype(self.dtype)
        if self.size == 0:  # nothing can be mapped
            return np.zeros(self.shape, dtype)
        memory = np.memmap(
            self.storage.file,
            np.uint8,
            "r",
            self.storage.offset,
            self.storage.size * dtype.itemsize,
        )
        strides = tuple(n * dtype.itemsize for n in self.strides)
        return np.ndarray(self.shape, dtype, memory, self.start * dtype.itemsize, strides)

    def __setstate__(self, state: Any) -> NoReturn:
        refuse_state(self)


@dataclass(frozen=True)
class Archive:
    """A file of `torch.save`, of which every byte was read once and is as it was written.

    Attributes:
      path: the file.
      pickled: the pickle.
      prefix: what the names of its members begin with.
      members: name -> member.
    """

    path: Path
    pickled: bytes
    prefix: str
    members: Mapping[str, zipfile.ZipInfo]

    def storage(self, key: str, dtype: str, size: int) -> Storage:
        """The bytes of a key.

        Raises:
          ValueError: there are none, or another number of them.
        """
        name = f"{self.prefix}data/{key}"
        if name not in self.members:
            raise ValueError(f"{name} is missing")
        info = self.members[name]
        if info.file_size != size * jnp.dtype(dtype).itemsize:
            raise ValueError(f"{name} has {info.file_size:,} bytes for {size:,} of {dtype}")
        with self.path.open("rb") as file:
            file.seek(info.header_offset)
            lengths = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
        offset = info.header_offset + _LOCAL_HEADER.size + sum(lengths)
        return Storage(self.path, offset, dtype, size)


def read_archive(path: Path) -> Archive:
    """Reads a file of `torch.save` through, to see that it is whole; keeps the pickle alone.

    Raises:
      JzeroError: it is cut short, damaged or of another format.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = _members(archive)
            [pickled] = [name for name in members if name.endswith("/data.pkl")]
            prefix = pickled.removesuffix("data.pkl")
            order = members.get(f"{prefix}byteorder")
            if order is not None and archive.read(order) != b"little":
                raise ValueError("its numbers are big-endian")
            return Archive(path, archive.read(pickled), prefix, members)
    except (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OSError) as error:
        raise JzeroError(
            f"{path}: cannot be read as a file of torch.save ({error}): it is cut short, damaged, "
            f"or of the format before PyTorch 1.6; copy it again, or load and save it with PyTorch "
            f"where you trust it"
        ) from None


def _members(archive: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """The zip's members by name, whole and as they were written.

    Raises:
      ValueError: one that is compressed, comes twice, or has another length or checksum.
    """
    members = {info.filename: info for info in archive.infolist()}
    if len(members) < len(archive.infolist()):
        raise ValueError("it has a member twice")
    if sum(name.endswith("/data.pkl") for name in members) != 1:
        raise ValueError("it has no data.pkl")
    for info in archive.infolist():
        if info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{info.filename} is compressed, which torch.save never does")
        if info.compress_size != info.file_size:  # else the checksum is of something else
            raise ValueError(f"{info.filename} has two lengths")
        with archive.open(info) as member:  # compares the checksum at the end
            while member.read(_BLOCK):
                pass
    return members


def refuse_state(value: Any) -> NoReturn:
    """For `__setstate__`: what says where to read is not for a pickle to change."""
    raise ValueError(f"it sets attributes of {type(value).__name__}")
