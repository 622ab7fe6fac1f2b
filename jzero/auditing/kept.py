"""Gathered weights that a program keeps from forward for backward, instead of gathering them again.

The names of JAX's operations tell the two passes apart. In a layer scan the weights lie stacked
between the two loops; in unrolled layers each stays where it is, over the layers that follow.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from jzero.auditing.moved import Moved
from jzero.auditing.origins import Kind, Origins
from jzero.hlo.flow import Flow
from jzero.hlo.passes import AGAIN, BACKWARD, FORWARD
from jzero.hlo.spans import Callers
from jzero.hlo.text import Computation, Instruction
from jzero.hlo.ways import Way, same


def kept(flow: Flow, origins: Origins, gathers: Iterable[Moved]) -> list[Moved] | None:
    """Finds the gathered weights that forward and backward multiply with, both.

    A weight that backward uses right after forward, before any other weight, as that of a last
    layer, is not kept: it is in use.

    Arguments:
      flow, origins: of the program.
      gathers: what its collectives move.

    Returns:
      Those of them that are kept; None where no operation's name tells forward from backward.
    """
    if not any(FORWARD in instruction.source for _, instruction in flow.at):
        return None
    reader = _Reader(flow, origins)
    return [
        each
        for each in gathers
        if each.kind is Kind.WEIGHT and each.op == "all-gather" and reader.keeps(each.array)
    ]


@dataclass(frozen=True)
class _Step:
    """An instruction on the way from the entry to another that runs inside of it."""

    computation: str
    position: int
    loops: bool


class _Reader:
    def __init__(self, flow: Flow, origins: Origins):
        self.flow = flow
        self.callers = Callers(flow.module)
        self.positions: dict[str, dict[str, int]] = {}
        self.weights = [
            (array, self.steps(user))
            for array, uses in enumerate(flow.uses)
            if origins.is_of_state(array)
            for user, way in uses
            if way is Way.PRODUCT and AGAIN not in flow.at[user][1].source
        ]

    def keeps(self, gathered: int) -> bool:
        views = self.flow.reach([gathered], same)
        used = [
            (self.flow.at[user][1].source, self.steps(user))
            for view in views
            for user, way in self.flow.uses[view]
            if way is Way.PRODUCT
        ]
        forward = [steps for name, steps in used if FORWARD in name and BACKWARD not in name]
        backward = [steps for name, steps in used if BACKWARD in name]
        others = [steps for array, steps in self.weights if array not in views]
        origin = self.steps(gathered)
        return any(
            self.lies_over(origin, one, other, others) for one in forward for other in backward
        )

    def lies_over(
        self, origin: list[_Step], first: list[_Step], last: list[_Step], others: list[list[_Step]]
    ) -> bool:
        """Whether between two uses of a weight lies a loop, or a product with another weight."""
        both = zip(first, last, strict=False)
        level = next((i for i, (one, other) in enumerate(both) if one != other), None)
        if level is None:
            return False
        if any(step.loops for step in first[:level] if step not in origin):
            return True  # gathered outside of a loop that both are in
        if first[level].loops or last[level].loops:
            return True
        return any(
            len(steps) > level
            and steps[:level] == first[:level]
            and first[level].position < steps[level].position < last[level].position
            for steps in others
        )

    def steps(self, array: int) -> list[_Step]:
        """How the program comes to the instruction that gives an array, outermost first."""
        computation, instruction = self.flow.at[array]
        above = [*self.callers.above(computation.name)]
        return [self.step(*each) for each in (*reversed(above), (computation, instruction))]

    def step(self, computation: Computation, instruction: Instruction) -> _Step:
        if computation.name not in self.positions:
            names = enumerate(computation.by_name)
            self.positions[computation.name] = {name: position for position, name in names}
        position = self.positions[computation.name][instruction.name]
        return _Step(computation.name, position, instruction.opcode == "while")
