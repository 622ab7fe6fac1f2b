"""The parts of a schedule, their steps and transfers; to JSON and back."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from jzero.hlo.known import added_up


@dataclass(frozen=True)
class Step:
    """One thing that a device does, in schedule order.

    Attributes:
      kind: "product" (an instruction with a matrix product), "other" (instructions without),
        "loop" (all iterations of a part), "start" and "done" of an asynchronous transfer, "send"
        (a synchronous one, start to end).
      flops: of a product or a loop's products; None where they cannot be counted.
      count: instructions that stand here as one.
      index: of a loop, the part; of a start, done or send, the part's transfer.
      dtype: of a product's operands, as HLO spells it.
      phase: of a product: "forward", "recomputed", "backward" or "".
      name: of a product: its result and the contracted size.
    """

    kind: str
    flops: int | None = 0
    count: int = 1
    index: int = 0
    dtype: str = ""
    phase: str = ""
    name: str = ""

    def as_dict(self) -> dict[str, Any]:
        defaults = Step(self.kind)
        given = {k: v for k, v in vars(self).items() if v != getattr(defaults, k)}
        return {"kind": self.kind, **given}


@dataclass(frozen=True)
class Transfer:
    """One collective instruction in one run of its part.

    Attributes:
      op, axes, dtype: see `jzero.hlo.Site`.
      bytes: ring bytes that a device sends; None where unknown.
      tensors: how many arrays it carries.
      leaves: paths of the model's leaves, where its source names one for each tensor.
      for_next: what it brings is used in the next iteration alone.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    bytes: int | None
    tensors: int
    leaves: tuple[str, ...] = ()
    for_next: bool = False


@dataclass(frozen=True)
class Part:
    """The whole program, or one iteration of a loop of it.

    Attributes:
      phase: "step" for the whole program; for a loop "forward", "backward", "micro-batch" (both),
        "update" or "".
      trips: iterations of the loop, each time that it runs; None where unknown.
      steps: in schedule order.
      transfers: what `index` of steps refers to.
      left_out: steps before and after those that are kept, where there are too many.
    """

    phase: str
    trips: int | None
    steps: tuple[Step, ...]
    transfers: tuple[Transfer, ...]
    left_out: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Schedule:
    """The parts of a program: the whole first, then its loops as the program comes to them."""

    parts: tuple[Part, ...]

    def as_dict(self) -> dict[str, Any]:
        """As data for JSON."""
        parts = [
            {**asdict(part), "steps": [step.as_dict() for step in part.steps]}
            for part in self.parts
        ]
        return {"parts": parts}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Schedule":
        return Schedule(tuple(_part(**part) for part in data["parts"]))


def shortened(steps: Iterable[Step], most: int) -> tuple[tuple[Step, ...], tuple[int, int]]:
    """At most so many steps: instructions without products as one; where that is not enough, all
    that is computed between two transfers as one; and then the middle alone.

    Returns:
      The steps, and how many were left out before and after them.
    """
    merged = _merged(steps, {"other"})
    if len(merged) > most:
        merged = _merged(merged, {"other", "product"})
    before = max(0, len(merged) - most) // 2
    kept = merged[before : before + most]
    return tuple(kept), (before, len(merged) - before - len(kept))


def _merged(steps: Iterable[Step], kinds: set[str]) -> list[Step]:
    merged: list[Step] = []
    for step in steps:
        if merged and step.kind in kinds and merged[-1].kind in kinds:
            merged[-1] = _together(merged[-1], step)
        else:
            merged.append(step)
    return merged


def _together(first: Step, second: Step) -> Step:
    products = [step for step in (first, second) if step.kind == "product"]
    dtypes, phases = ({getattr(step, key) for step in products} for key in ("dtype", "phase"))
    return Step(
        "product" if products else "other",
        added_up((first.flops, second.flops)),
        first.count + second.count,
        dtype=dtypes.pop() if len(dtypes) == 1 else "",
        phase=phases.pop() if len(phases) == 1 else "",
    )


def _part(**data: Any) -> Part:
    steps = tuple(Step(**step) for step in data["steps"])
    transfers = tuple(
        Transfer(**{**each, "axes": tuple(each["axes"]), "leaves": tuple(each["leaves"])})
        for each in data["transfers"]
    )
    left_out = (data["left_out"][0], data["left_out"][1])
    return Part(**{**data, "steps": steps, "transfers": transfers, "left_out": left_out})
