"""One safetensors file: a length of eight bytes, a JSON header, the tensors without a gap.

Read and written here rather than by the library of that name, which writes a file from tensors that
are all in memory, and whose NumPy side has no bfloat16.

https://github.com/huggingface/safetensors#format
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.sizes import is_size
from jzero.errors import JzeroError

DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""The format's name of a dtype -> NumPy's."""

_CODES = {name: code for code, name in DTYPES.items()}
_METADATA = "__metadata__"  # of the file, among the tensors' names in its header
_LENGTH = 8
_LONGEST_HEADER = 100_000_000  # the format's own limit
_BLOCK = 1 << 24


@dataclass(frozen=True)
class Spec:
    """Shape and dtype (NumPy's name) of a tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file.

    Attributes:
      file: where it is.
      name: its name in the header.
      spec: its shape and dtype.
      offset: of its first byte, from the file's beginning.
    """

    file: Path
    name: str
    spec: Spec
    offset: int

    def read(self) -> np.ndarray:
        """The values, read only, mapped from the file: what is not looked at is not read."""
        return self._map(self.spec.shape, self.spec.dtype)

    def write(self, values: np.ndarray) -> None:
        """Puts the values, of this shape and dtype, at their place in the file.

        Raises:
          ValueError: another shape or dtype.
        """
        if values.shape != self.spec.shape or values.dtype != jnp.dtype(self.spec.dtype):
            raise ValueError(f"{self.name}: {values.dtype}{values.shape} is not {self.spec}")
        with self.file.open("r+b") as file:
            file.seek(self.offset)
            # As bytes: the buffer protocol knows no bfloat16. A scalar has no bytes of its own.
            file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)

    def same(self, other: "Tensor") -> bool:
        """Whether the other tensor is this one, bit for bit."""
        if self.spec != other.spec:
            return False
        shape = (self.spec.nbytes,)
        one, two = self._map(shape, "uint8"), other._map(shape, "uint8")
        blocks = range(0, self.spec.nbytes, _BLOCK)
        return all(np.array_equal(one[i : i + _BLOCK], two[i : i + _BLOCK]) for i in blocks)

    def _map(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        if self.spec.nbytes == 0:  # nothing can be mapped
            return np.zeros(shape, jnp.dtype(dtype))
        return np.memmap(self.file, jnp.dtype(dtype), "r", self.offset, shape)


def check(specs: Mapping[str, Spec]) -> None:
    """Refuses what a file cannot hold.

    Raises:
      JzeroError: a name or a dtype that the format does not have.
    """
    for name, spec in specs.items():
        if name == _METADATA or not _is_text(name):
            raise JzeroError(
                f"{name!r} is no name for a tensor in a safetensors file: give it another one with "
                f"a name map"
            )
        if spec.dtype not in _CODES:
            raise JzeroError(f"{name} is {spec.dtype}, which safetensors files cannot hold")


def create(path: Path, specs: Mapping[str, Spec]) -> dict[str, Tensor]:
    """Makes a file with its header and room for every tensor, which `Tensor.write` fills.

    Arguments:
      path: the file; it must not exist.
      specs: name -> shape and dtype.

    Returns:
      Name -> the tensor's place.

    Raises:
      JzeroError: a name or a dtype that the format does not have.
    """
    check(specs)
    # The widest first, so that every tensor starts at a multiple of its element's size.
    order = sorted(specs, key=lambda name: (-jnp.dtype(specs[name].dtype).itemsize, name))
    # `format` is asked for by the programs that load such files into PyTorch.
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    begin = 0
    for name in order:
        end = begin + specs[name].nbytes
        header[name] = {
            "dtype": _CODES[specs[name].dtype],
            "shape": list(specs[name].shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH)
    start = _LENGTH + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(_LENGTH, "little"))
        file.write(text)
        file.truncate(start + begin)
    return {
        name: Tensor(path, name, specs[name], start + header[name]["data_offsets"][0])
        for name in order
    }


def read_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, every one of them within it and none over another.

    Arguments:
      path: a safetensors file.

    Returns:
      Name -> the tensor's place.

    Raises:
      JzeroError: a file that is cut short, is not of this format, or contradicts itself.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_LENGTH)
        length = int.from_bytes(first, "little")
        if len(first) < _LENGTH or length > _LONGEST_HEADER:
            raise JzeroError(f"{path}: is not a safetensors file")
        if _LENGTH + length > size:
            raise JzeroError(
                f"{path}: is cut short: {size:,} bytes, but its header alone has {length:,}"
            )
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_without_repeats)
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
        header.pop(_METADATA, None)
        tensors = {name: _entry(path, name, header[name], _LENGTH + length) for name in header}
    except (ValueError, RecursionError) as error:
        raise JzeroError(f"{path}: is not a safetensors file: {error}") from None
    end = _LENGTH + length
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.spec.nbytes)):
        if tensor.offset != end:
            kind = "over the tensor before it" if tensor.offset < end else "after a gap"
            raise JzeroError(f"{path}: is damaged: {tensor.name} begins {kind}")
        end += tensor.spec.nbytes
    if end > size:
        raise JzeroError(f"{path}: is cut short: {size:,} bytes of {end:,}")
    if end < size:
        raise JzeroError(
            f"{path}: is damaged: {size:,} bytes, of which {size - end:,} are no one's"
        )
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int) -> Tensor:
    """A tensor as its header describes it.

    Raises:
      ValueError: a description that is none, or a dtype that NumPy does not have.
    """
    try:
        code, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} has no dtype, shape and data_offsets") from None
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{name} is {code!r}; readable are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or not all(map(is_size, [*shape, begin, end])):
        raise ValueError(f"{name}: shape and data_offsets are not whole numbers")
    spec = Spec(tuple(shape), DTYPES[code])
    if end - begin != spec.nbytes:
        raise ValueError(f"{name} has {end - begin:,} bytes, but {code} {shape} is {spec.nbytes:,}")
    return Tensor(path, name, spec, start + begin)


def _is_text(name: str) -> bool:
    """Whether it can be written: JSON, and so a name, may have halves of characters."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it names {name!r} twice")
    return found
