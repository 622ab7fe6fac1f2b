"""The largest arrays that a program makes: where to look when its memory is too much."""

from dataclasses import dataclass

from jzero.auditing.frames import Frames
from jzero.hlo.flow import Flow
from jzero.hlo.text import Shape

_MAKES_NOTHING = frozenset(
    "bitcast call conditional constant get-tuple-element parameter tuple while".split()
)


@dataclass(frozen=True)
class Made:
    """An array in memory.

    Attributes:
      shape: on one device.
      op_name: the JAX operation behind it, or "".
      line: `file.py:21`, or "".
    """

    shape: Shape
    op_name: str
    line: str


def largest(flow: Flow, frames: Frames, count: int = 5) -> list[Made]:
    """The largest arrays that a program makes, arguments left out; not all are there at once.

    Arguments:
      flow, frames: of the program.
      count: how many; those of one shape, operation and line are one.
    """
    inside = {
        name
        for _, instruction in flow.at
        if instruction.opcode not in ("call", "async-start")
        for name in instruction.called
    }
    found = [
        (shape, instruction)
        for shape, (computation, instruction) in zip(flow.shapes, flow.at, strict=True)
        if computation.name not in inside
        and instruction.opcode not in _MAKES_NOTHING
        and not instruction.opcode.endswith(("-start", "-done", "-update"))
    ]
    found.sort(key=lambda each: -each[0].bytes)
    made: dict[Made, None] = {}
    for shape, instruction in found:
        if len(made) == count:
            break
        made[Made(shape, instruction.source, frames.line(instruction))] = None
    return list(made)
