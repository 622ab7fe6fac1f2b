"""One file of a checkpoint, asked for what it must hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.checkpoint.deepspeed.pickles import load
from jzero.errors import JzeroError

T = TypeVar("T")
Key = str | int
_END = 2**31  # a state counts in int32


@dataclass(frozen=True)
class Saved:
    """What a file holds.

    Attributes:
      path: the file.
      content: as `load` gives it.
    """

    path: Path
    content: Any

    def get(self, kind: type[T], *keys: Key) -> T:
        """What is below some keys: of dicts, or indices of lists.

        Raises:
          JzeroError: it is not there, or is something else than a `kind`.
        """
        found = self.find(*keys)
        if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
            what = "nothing" if found is None else f"a {type(found).__name__}"
            where = ".".join(map(str, keys)) or "it"
            raise JzeroError(
                f"{self.path}: {where} is {what}, not a {kind.__name__}: no file of DeepSpeed's "
                f"ZeRO, or of a version that jzero does not know"
            )
        return found

    def count(self, *keys: Key) -> int:
        """A count below some keys, as a state can hold it.

        Raises:
          JzeroError: it is not there, or is no such count.
        """
        return self.as_count(self.get(int, *keys), ".".join(map(str, keys)))

    def find(self, *keys: Key) -> Any:
        """The same, or None where it is not there."""
        found = self.content
        for key in keys:
            if isinstance(found, Mapping):
                found = found.get(key)
            elif isinstance(found, list) and isinstance(key, int) and key < len(found):
                found = found[key]
            else:
                return None
        return found

    def shapes(self, *keys: Key) -> dict[str, tuple[int, ...]]:
        """Names with shapes, as DeepSpeed writes them.

        Raises:
          JzeroError: they are something else.
        """
        found = self.get(dict, *keys)
        for name, shape in found.items():
            # A name becomes a folder's in the universal format.
            plain = isinstance(name, str) and name and Path(name).name == name
            sizes = isinstance(shape, tuple) and all(isinstance(n, int) for n in shape)
            if not plain or not sizes:
                raise JzeroError(f"{self.path}: {name!r}: {shape!r} is no parameter's shape")
        return dict(found)

    def steps(self, *keys: Key) -> int | None:
        """A count of steps: a number, or a tensor of one; None where there is none.

        Raises:
          JzeroError: it is below 0, or more than a state can count.
        """
        found = self.find(*keys)
        if isinstance(found, Tensor) and found.size == 1:
            found = found.read().item()
        if not isinstance(found, int | float) or found != found // 1:
            return None
        return self.as_count(int(found), ".".join(map(str, keys)) or "it")

    def as_count(self, number: int, what: str) -> int:
        """A number that the file tells, if a state can hold it.

        Raises:
          JzeroError: it is below 0, or too large.
        """
        if not 0 <= number < _END:  # which is not shown: it may have thousands of digits
            raise JzeroError(f"{self.path}: {what} is no count: it is below 0, or 2**31 or more")
        return number


def read(path: Path) -> Saved:
    """Reads a file.

    Raises:
      JzeroError: it is damaged, or names something that may not be read.
    """
    return Saved(path, load(path))
