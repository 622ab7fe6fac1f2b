"""What lies in a device's memory at the moment when a program needs the most of it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jzero.hlo.buffers import ALLOC, FREE, SHARE, Allocation, Buffer, Buffers, Event, Value
from jzero.hlo.flow import Flow
from jzero.hlo.text import Program, Shape, parse
from jzero.hlo.ways import Way

_DEVICE = 0  # the color of the device's own memory
# What has a name, but that of where an array is on its way, or of zeros that are to be filled.
_HANDS_ON = frozenset(
    "parameter get-tuple-element tuple while conditional call fusion broadcast constant".split()
)


@dataclass(frozen=True)
class Live:
    """A buffer of the heap that is in use at the peak.

    Attributes:
      bytes: its size.
      values: what lies in it, the latest last: of a loop's array that of this time round.
    """

    bytes: int
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Peak:
    """The device memory in use at the peak.

    Attributes:
      bytes: in all.
      allocated: with the whole heap, holes and all: what the program takes when it runs.
      held: what is there for the whole run: arguments, outputs, constants.
      live: buffers of the heap, the largest first.
    """

    bytes: int
    allocated: int
    held: tuple[Allocation, ...]
    live: tuple[Live, ...]


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

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Large":
        """From what `dataclasses.asdict` gives, after JSON."""
        shape = data["shape"] and Shape(data["shape"]["dtype"], tuple(data["shape"]["dims"]))
        return Large(**{**data, "shape": shape})


def peak(buffers: Buffers) -> Peak | None:
    """Finds the peak of a program's device memory.

    Arguments:
      buffers: its buffer assignment.

    Returns:
      The peak, the first of several; None where the compiler kept no record of the heap, or there
      is more than one.
    """
    mine = [each for each in buffers.allocations if each.color == _DEVICE and each.bytes]
    held = tuple(each for each in mine if each.held)
    heaps = [each for each in mine if not each.held]
    traces = [t for t in buffers.traces if t and buffers.all[t[0].buffer].color == _DEVICE]
    if len(heaps) > 1 or len(traces) != len(heaps):
        return None
    always = sum(each.bytes for each in held)
    live = _most(buffers.all, traces[0]) if traces else ()
    return Peak(
        bytes=always + sum(each.bytes for each in live),
        allocated=always + sum(each.bytes for each in heaps),
        held=held,
        live=live,
    )


def largest(found: Peak, program: Program, count: int = 15) -> tuple[Large, ...]:
    """The largest buffers of the heap at the peak, to see what a program's temporaries are.

    Arguments:
      found: from `peak`.
      program: the compiled program.
      count: how many.

    Returns:
      The buffers, the largest first.
    """
    flow = Flow(parse(program))
    return tuple(_large(flow, each) for each in found.live[:count])


def array_of(flow: Flow, value: Value) -> int | None:
    """The number of a value in a program's flow; None where the text does not show it."""
    computation = flow.module.computations.get(value.computation)
    instruction = computation and computation.by_name.get(value.instruction)
    if computation is None or instruction is None:
        return None
    return flow.results(computation, instruction)[value.element]


def same(_: int, __: int, way: Way) -> bool:
    """Follows an array where it is moved, cast or cut out, in `Flow.reach`."""
    return way is Way.SAME


def _large(flow: Flow, live: Live) -> Large:
    value = live.values[-1]
    array = array_of(flow, value)
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


def _most(buffers: Mapping[int, Buffer], trace: Sequence[Event]) -> tuple[Live, ...]:
    """The buffers in use when their sum is largest."""
    sizes = [size for size, _ in _moments(buffers, trace)]
    top = sizes.index(max(sizes))
    _, there = next(itertools.islice(_moments(buffers, trace), top, None))
    found = [
        Live(buffers[place].bytes, tuple(buffers[each].value for each in now))
        for place, now in there.items()
    ]
    return tuple(sorted(found, key=lambda each: -each.bytes))


def _moments(
    buffers: Mapping[int, Buffer], trace: Sequence[Event]
) -> Iterator[tuple[int, dict[int, list[int]]]]:
    """After each event the bytes in use, and place -> the buffers that live in it."""
    places, size = _places(trace), 0
    there: dict[int, list[int]] = {}
    for event in trace:
        place = places[event.buffer]
        if event.kind == FREE:
            there[place].remove(event.buffer)
            if not there[place]:
                del there[place]
                size -= buffers[place].bytes
        else:
            if place not in there:
                there[place] = []
                size += buffers[place].bytes
            there[place].append(event.buffer)
        yield size, there


def _places(trace: Sequence[Event]) -> dict[int, int]:
    """Buffer -> the first of those that share a place, often itself."""
    found: dict[int, int] = {}
    for event in trace:
        if event.kind == ALLOC:
            found[event.buffer] = event.buffer
        elif event.kind == SHARE:
            found[event.buffer] = found[event.shared]
    return found
