"""The peak of a heap, from a record of what lives in it when."""

import pytest

from jzero.hlo.buffers import ALLOC, FREE, SHARE, Allocation, Buffer, Buffers, Event, Value
from jzero.hlo.flow import Flow
from jzero.hlo.large import Large, largest
from jzero.hlo.peak import Live, Peak, peak
from jzero.hlo.text import Shape, parse

SIZES = {"a": 100, "b": 30, "c": 30, "d": 50, "e": 1}
NUMBERS = {name: number for number, name in enumerate(SIZES, 10)}
KINDS = {"+": ALLOC, "-": FREE, "=": SHARE}
ARGUMENT, OUTPUT = Allocation(1000, 0, argument=0, held=True), Allocation(8, 0, None, held=True)


def value(name: str) -> Value:
    return Value("main", name, 0)


def trace(text: str) -> tuple[Event, ...]:
    """`+a -a` begins and ends a buffer; `b=a` begins b in the place of a."""
    found = []
    for word in text.split():
        first, sign, second = word.partition("=")
        if sign:
            found.append(Event(SHARE, NUMBERS[first], NUMBERS[second]))
        else:
            found.append(Event(KINDS[word[0]], NUMBERS[word[1]], 0))
    return tuple(found)


def buffers(*traces: str, allocations: tuple[Allocation, ...] = ()) -> Buffers:
    heap = Allocation(500, 0, argument=None, held=False)
    found = {NUMBERS[name]: Buffer(size, 0, value(name)) for name, size in SIZES.items()}
    heaps = (heap,) * len(traces)
    return Buffers(found, (ARGUMENT, OUTPUT, *heaps, *allocations), tuple(map(trace, traces)))


@pytest.mark.parametrize(
    "text, live",
    [
        ("+a +b -a +c +d -b -c -d", ["a", "b"]),
        ("+b +c -b +d +a -c -d -a", ["a", "d", "c"]),
        # c lives in b's place: the place is not counted twice, nor free before both are gone,
        ("+a -a +b c=b -b +d -d -c", ["a"]),
        ("+a +b c=b -b +e -c -e -a", ["a", "c", "e"]),
        # and it may be in use again.
        ("+b -b +d c=b +e -c -d -e", ["d", "c", "e"]),
    ],
)
def test_the_fullest_moment(text: str, live: list[str]):
    found = peak(buffers(text))
    assert found is not None
    assert found.live == tuple(Live(SIZES[name], (value(name),)) for name in live)
    assert found.bytes == 1008 + sum(SIZES[name] for name in live)
    assert found.allocated == 1508
    assert found.held == (ARGUMENT, OUTPUT)


def test_a_program_without_a_heap():
    found = peak(buffers())
    assert found is not None and (found.bytes, found.live) == (1008, ())


def test_other_memory_is_not_the_devices():
    host = Allocation(10**6, 5, argument=1, held=True)
    found = peak(buffers("+a -a", allocations=(host,)))
    assert found is not None and found.bytes == 1108


def test_what_is_not_on_record_is_unknown():
    heap = Allocation(500, 0, argument=None, held=False)
    assert peak(buffers(allocations=(heap,))) is None, "no record"
    assert peak(buffers("+a -a", "+b -b")) is None, "two heaps, whose peaks may not coincide"


PROGRAM = """HloModule step

%more (carried: (f32[4,8], s32[])) -> pred[] {
  %carried_there = (f32[4,8], s32[]) parameter(0)
  ROOT %go = pred[] constant(true)
}

%again (carried: (f32[4,8], s32[])) -> (f32[4,8], s32[]) {
  %carried = (f32[4,8], s32[]) parameter(0)
  %before = f32[4,8] get-tuple-element(%carried), index=0
  %count = s32[] get-tuple-element(%carried), index=1
  %row = f32[1,8] tanh(%count), metadata={op_name="jit(f)/while/body/tanh"}
  %after = f32[4,8] dynamic-update-slice(%before, %row, %count)
  ROOT %next = (f32[4,8], s32[]) tuple(%after, %count)
}

ENTRY %main (x: s32[]) -> f32[4,8] {
  %x = s32[] parameter(0), metadata={op_name="x"}
  %zeros = f32[4,8] broadcast(), metadata={op_name="jit(f)/broadcast"}
  %begin = (f32[4,8], s32[]) tuple(%zeros, %x)
  %loop = (f32[4,8], s32[]) while(%begin), condition=%more, body=%again
  ROOT %out = f32[4,8] get-tuple-element(%loop), index=0
}
"""


def test_the_largest_by_what_computed_them():
    rows = [Value("again", "carried", 0), Value("main", "zeros", 0), Value("gone", "gone", 0)]
    live = tuple(Live(128 - number, (rows[1], value)) for number, value in enumerate(rows))
    found = largest(Peak(384, 384, (), live), Flow(parse(PROGRAM)), count=3)
    assert found == (
        Large(128, Shape("f32", (4, 8)), "carried", "parameter", "jit(f)/while/body/tanh"),
        Large(127, Shape("f32", (4, 8)), "zeros", "broadcast", "jit(f)/broadcast"),
        Large(126, None, "gone", "", ""),
    )
    assert largest(Peak(384, 384, (), live), Flow(parse(PROGRAM)), count=1) == found[:1]
