"""How the leaves of a checkpoint differ from those of a model and its optimizer."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from jzero.checkpoint.entries import Entry, part_of
from jzero.checkpoint.manifest import LeafEntry
from jzero.errors import JzeroError

_LISTED = 20


@dataclass(frozen=True)
class Difference:
    """A leaf that is not the same in both.

    Attributes:
      saved, expected: its shape and dtype; None where it is missing.
    """

    name: str
    saved: tuple[tuple[int, ...], str] | None
    expected: tuple[tuple[int, ...], str] | None

    def __str__(self) -> str:
        saved = "not saved" if self.saved is None else f"saved {_text(*self.saved)}"
        expected = "not expected" if self.expected is None else f"expected {_text(*self.expected)}"
        return f"{saved}, {expected}"


def differences(
    saved: Mapping[str, LeafEntry], expected: Mapping[str, Entry], parts: Collection[str]
) -> dict[str, Difference]:
    """name -> difference, of the leaves of some parts."""
    found = {}
    for name in (*expected, *(name for name in saved if name not in expected)):
        if part_of(name) not in parts:
            continue
        have = (saved[name].shape, saved[name].dtype) if name in saved else None
        want = (expected[name].shape, expected[name].dtype) if name in expected else None
        if have != want:
            found[name] = Difference(name, have, want)
    return found


def refusal(where: str, found: Collection[Difference]) -> JzeroError:
    """The error that lists differences."""
    lines = [f"{difference.name}: {difference}" for difference in list(found)[:_LISTED]]
    if len(found) > _LISTED:
        lines.append(f"and {len(found) - _LISTED} more")
    leaves = "1 leaf differs" if len(found) == 1 else f"{len(found)} leaves differ"
    return JzeroError(
        f"{where} does not fit this model and optimizer: {leaves} ({'; '.join(lines)}). Nothing is "
        f"cast or reshaped: take only some parts=, or strict=False, with base= for the rest"
    )


def _text(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype}[{','.join(map(str, shape))}]"
