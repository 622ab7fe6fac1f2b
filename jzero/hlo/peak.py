"""What lies in a device's memory at the moment when a program needs the most of it."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jzero.hlo.buffers import ALLOC, FREE, SHARE, Allocation, Buffer, Buffers, Event, Value

_DEVICE = 0  # the color of the device's own memory


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
