"""XLA's buffer assignment: which values of a compiled program lie where, and for how long.

The memory analysis of a compiled function gives sums. What they are made of is in the HloProto that
XLA writes with `xla_dump_hlo_as_proto` (xla/service/hlo.proto), for GPUs and TPUs that are not
there as well. Only what the text does not tell is read from it.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.stages import Compiled, Lowered

from jzero.hlo.wire import Message, integers, repeated

ALLOC, FREE, SHARE = 0, 1, 2  # HeapSimulatorTrace.Event.Kind

_TUPLE = 13  # PrimitiveType


@dataclass(frozen=True)
class Value:
    """One array that an instruction gives: `element` of its result, a nested tuple's in order."""

    computation: str
    instruction: str
    element: int


@dataclass(frozen=True)
class Buffer:
    """The memory of a value; `color` is the memory space, 0 the device's own."""

    bytes: int
    color: int
    value: Value


@dataclass(frozen=True)
class Allocation:
    """A piece of memory.

    Attributes:
      bytes: its size.
      color: the memory space.
      argument: the entry parameter that lies in it; None for none.
      held: an argument, an output or a constant: there for the whole run.
    """

    bytes: int
    color: int
    argument: int | None
    held: bool


@dataclass(frozen=True)
class Event:
    """A buffer begins to live (ALLOC), or in the place of `shared` (SHARE), or ends (FREE)."""

    kind: int
    buffer: int
    shared: int


@dataclass(frozen=True)
class Buffers:
    """A program's buffer assignment.

    Attributes:
      all: by id.
      allocations: all but those of single threads.
      traces: for each heap what happens in it, in the order of the schedule.
    """

    all: Mapping[int, Buffer]
    allocations: tuple[Allocation, ...]
    traces: tuple[tuple[Event, ...], ...]


def compile_with_buffers(
    lowered: Lowered, options: Mapping[str, bool | str] | None = None
) -> tuple[Compiled, Buffers | None]:
    """Compiles, and reads the buffer assignment that XLA writes meanwhile.

    Arguments:
      lowered: `jit(f).lower(...)`.
      options: further compiler options.

    Returns:
      The compiled function, and its buffers; None where XLA does not tell: the program came from
      JAX's compilation cache, or the process's own XLA_FLAGS say where to dump.
    """
    options = dict(options or {})
    if "--xla_dump_to" in os.environ.get("XLA_FLAGS", ""):
        return lowered.compile(compiler_options=options), None
    with tempfile.TemporaryDirectory(prefix="jzero-hlo-") as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
        compiled = lowered.compile(compiler_options={**options, **dump})
        found = list(Path(folder).glob("*after_optimizations.hlo.pb"))
        return compiled, read(found[0].read_bytes()) if len(found) == 1 else None


def read(proto: bytes) -> Buffers | None:
    """Reads an HloProto.

    Arguments:
      proto: a file `*after_optimizations.hlo.pb` of XLA's dump.

    Returns:
      Its buffer assignment; None where it has none: the program was loaded, not compiled.

    Raises:
      JzeroError: these bytes are no protocol buffer.
    """
    module, buffer_assignment = 1, 3  # HloProto
    hlo = Message(memoryview(proto))
    if buffer_assignment not in hlo:
        return None
    places, assignment = _places(hlo.bytes(module)), hlo.bytes(buffer_assignment)
    buffers, allocations, traces, events = 1, 3, 4, 1  # BufferAssignmentProto, HeapSimulatorTrace
    return Buffers(
        dict(_buffer(each, places) for each in repeated(assignment, buffers)),
        tuple(
            each
            for message in repeated(assignment, allocations)
            for each in _allocation(Message(message))
        ),
        tuple(tuple(map(_event, repeated(each, events))) for each in repeated(assignment, traces)),
    )


@dataclass(frozen=True)
class _Place:
    """An instruction, and the nested tuple of what it gives; None stands for an array.

    `within` is the part of that tuple which is the instruction's own.
    """

    computation: str
    instruction: str
    shape: Any
    within: tuple[int, ...] = ()

    def value(self, index: tuple[int, ...]) -> Value:
        shape, element = self.shape, 0
        for number in self.within + index:
            element += sum(map(_arrays, shape[:number]))
            shape = shape[number]
        return Value(self.computation, self.instruction, element)


def _places(module: memoryview) -> dict[int, _Place]:
    """Instruction -> its place in the program's text."""
    computations, name = 3, 1  # HloModuleProto; of the other two the name is 1 as well
    instructions, own_id, root_id = 2, 5, 6  # HloComputationProto
    opcode, shape, id_, called_ids = 2, 3, 35, 38  # HloInstructionProto
    places: dict[int, _Place] = {}
    roots: dict[int, int] = {}
    starts: dict[int, _Place] = {}  # wrapped computation -> the start that wraps it
    for message in repeated(module, computations):
        computation = Message(message)
        roots[computation.integer(own_id)] = computation.integer(root_id)
        for each in repeated(message, instructions):
            found = Message(each)
            place = _Place(computation.text(name), found.text(name), _shape(found.bytes(shape)))
            places[found.integer(id_)] = place
            if found.text(opcode) == "async-start":
                starts |= dict.fromkeys(integers(each, called_ids), place)
    # The text writes a wrapped instruction as one start, which gives (operands, results, ...).
    for computation, start in starts.items():
        places[roots[computation]] = _Place(start.computation, start.instruction, start.shape, (1,))
    return places


def _shape(message: memoryview) -> Any:
    element_type, tuple_shapes = 2, 4  # ShapeProto
    inner = tuple(_shape(each) for each in repeated(message, tuple_shapes))
    return inner if inner or Message(message).integer(element_type) == _TUPLE else None


def _arrays(shape: Any) -> int:
    return 1 if shape is None else sum(map(_arrays, shape))


def _buffer(message: memoryview, places: Mapping[int, _Place]) -> tuple[int, Buffer]:
    own_id, size, defined_at, color = 1, 2, 3, 4  # LogicalBufferProto
    shape_index, instruction_id = 3, 4  # LogicalBufferProto.Location
    found = Message(message)
    defined = found.bytes(defined_at)
    place = places[Message(defined).integer(instruction_id)]
    value = place.value(tuple(integers(defined, shape_index)))
    return found.integer(own_id), Buffer(found.integer(size), found.integer(color), value)


def _allocation(found: Message) -> Iterator[Allocation]:
    size, parameter_number, color = 2, 6, 8  # BufferAllocationProto
    thread_local, parameter, output, constant = (found.integer(n) for n in (3, 5, 7, 12))
    if not thread_local:
        yield Allocation(
            bytes=found.integer(size),
            color=found.integer(color),
            argument=found.integer(parameter_number) if parameter else None,
            held=bool(parameter or output or constant),
        )


def _event(message: memoryview) -> Event:
    kind, buffer_id, share_with = 1, 2, 5  # HeapSimulatorTrace.Event
    found = Message(message)
    return Event(found.integer(kind), found.integer(buffer_id), found.integer(share_with))
