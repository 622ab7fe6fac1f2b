"""What there is to tell apart by colour: the parts of a stage's peak, and of what it sends."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jzero.compare.row import Row, Traffic

MEMORY = {
    "parameters": "parameters",
    "optimizer": "optimizer state",
    "gradients": "gradients",
    "gathered": "gathered weights",
    "activations": "activations",
    "temporaries": "temporaries",
    "rest": "the rest, undivided",
    "whole": "undivided",
}
"""Parts of a peak, in the order of the bars, and what they are called."""

NAMES = {
    **MEMORY,
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-reduce": "all-reduce",
    "other-collective": "other collectives",
    "forward": "forward",
    "recomputed": "recomputed",
    "backward": "backward",
}
"""What all keys are called."""

MEANINGS = {
    "parameters": "in the compute dtype, as they stay between steps (in fp32, the only ones)",
    "optimizer": "the optimizer's state and the fp32 master weights",
    "gradients": "whole or sharded, as they are at the peak",
    "gathered": "weights made whole, cast or cut out for their use",
    "activations": "what forward computes, for the first time or again",
    "temporaries": "all else at the peak, with the batch and gaps between buffers",
    "rest": "gradients, gathered weights, activations and temporaries, which this program does "
    "not tell apart",
    "whole": "the compiler names this figure alone, and no parts of it",
    "all-gather": "makes whole weights of shards",
    "reduce-scatter": "adds gradients up and leaves each device its shard",
    "all-reduce": "adds up and leaves every device the whole: twice the bytes",
    "other-collective": "all-to-all, collective-permute and the like",
    "forward": "matrix products of the forward pass",
    "recomputed": "forward a second time, for backward",
    "backward": "matrix products of the backward pass",
}

UNDIVIDED = ("rest", "whole")
"""Parts of which it is not known what they are: drawn paler."""

OPS = ("all-gather", "reduce-scatter", "all-reduce")
"""Collectives that have a colour of their own; the others share "other-collective"."""


@dataclass(frozen=True)
class Piece:
    """A part of a bar.

    Attributes:
      label: what it is called.
      key: of `NAMES`.
      bytes: of one device.
    """

    label: str
    key: str
    bytes: int

    @property
    def fill(self) -> str:
        """The name of its colour."""
        return "temporaries" if self.key in UNDIVIDED else self.key

    @property
    def paint(self) -> str:
        """The classes of its area."""
        return f"{self.fill} {'ghost' if self.key in UNDIVIDED else 'gap'}"


def of_memory(row: Row) -> tuple[Piece, ...]:
    """The parts of a stage's peak; where they are not known, its state and one rest."""
    sizes: dict[str, int] = {}
    if row.peak_split is not None:
        sizes = row.peak_split
    elif row.state_bytes is not None:
        state, params = sum(row.state_bytes.values()), row.state_bytes["params"]
        sizes = {"parameters": params, "optimizer": state - params}
        sizes["rest"] = max(0, (row.peak_bytes or 0) - state)
    elif row.peak_bytes is not None:
        sizes = {"whole": row.peak_bytes}
    return tuple(Piece(label, key, sizes[key]) for key, label in MEMORY.items() if sizes.get(key))


def of_traffic(row: Row) -> tuple[Piece, ...]:
    """What a stage sends, by collective; and by mesh axes where there are several sets of them."""
    found = row.collectives or ()
    several = len({each.axes for each in found if each.bytes}) > 1
    sizes: dict[tuple[str, str], int] = {}
    for each in sorted(found, key=_place):
        label = f"{each.op} over {', '.join(each.axes)}" if several else each.op
        key = each.op if each.op in OPS else "other-collective"
        sizes[label, key] = sizes.get((label, key), 0) + (each.bytes or 0)
    return tuple(Piece(label, key, size) for (label, key), size in sizes.items() if size)


def keys(found: Iterable[Sequence[Piece]]) -> list[str]:
    """The keys that occur, in the order of `NAMES`."""
    there = {piece.key for pieces in found for piece in pieces}
    return [key for key in NAMES if key in there]


def _place(each: Traffic) -> tuple[int, str]:
    return (OPS.index(each.op) if each.op in OPS else len(OPS)), each.op
