"""The largest buffers of a program at its peak, and what computed them."""

from dataclasses import dataclass

from jzero.hlo.flow import Flow
from jzero.hlo.peak import Live, Peak
from jzero.hlo.text import Shape
from jzero.hlo.ways import Way

# What has a name, but that of where an array is on its way, or of zeros that are to be filled.
_HANDS_ON = frozenset(
    "parameter get-tuple-element tuple while conditional call fusion broadcast constant".split()
)


@dataclass(frozen=True)
class Large:
    """A buffer of the heap, as a reader of the program looks for it.

    Attributes:
      bytes: its size.
      shape: of the array in it; None where the text does not show the instruction.
      instruction, opcode: what gives that array.
      source: the JAX operation (`op_name`) that computed it, before copies and loops; "" where
          the compiler kept none.
    """

    bytes: int
    shape: Shape | None
    instruction: str
    opcode: str
    source: str


def largest(found: Peak, flow: Flow, count: int = 15) -> tuple[Large, ...]:
    """The largest buffers of the heap at the peak, to see what a program's temporaries are.

    Arguments:
      found: from `peak`.
      flow: of the compiled program.
      count: how many.

    Returns:
      The buffers, the largest first.
    """
    return tuple(_large(flow, each) for each in found.live[:count])


def _large(flow: Flow, live: Live) -> Large:
    value = live.values[-1]
    array = flow.array(value)
    if array is None:
        return Large(live.bytes, None, value.instruction, "", "")
    own = flow.at[array][1]
    return Large(live.bytes, flow.shapes[array], own.name, own.opcode, _source(flow, array))


def _source(flow: Flow, array: int) -> str:
    """The name of the nearest operation that computed an array."""
    found, near, otherwise = {array}, [array], ""
    for each in near:
        instruction = flow.at[each][1]
        if instruction.source and instruction.opcode not in _HANDS_ON:
            return instruction.source
        otherwise = otherwise or instruction.source
        further = {before for before, way in flow.sources[each] if way is Way.SAME} - found
        found |= further
        near += sorted(further)
    return otherwise
