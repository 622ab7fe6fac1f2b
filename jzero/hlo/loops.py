"""How often a compiled `while` runs: from the compiler's own note, else from its condition.

XLA:GPU and XLA:CPU write `known_trip_count` beside a loop; XLA:TPU does not, so there the counter
is followed by hand: its start, its step and its limit, where all three are constants.
"""

import re
from dataclasses import dataclass

from jzero.hlo.text import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count"\s*:\s*\{\s*"n"\s*:\s*"?(\d+)')
_SAME_VALUE = frozenset({"copy", "bitcast", "convert", "reshape", "copy-start", "copy-done"})
_MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE"}


@dataclass(frozen=True)
class _Element:
    """Element `index` of the loop's carried tuple."""

    index: int


@dataclass(frozen=True)
class _Step:
    """A carried element plus a constant."""

    index: int
    by: int


@dataclass(frozen=True)
class _Compare:
    direction: str
    left: object
    right: object


_CARRIED = "the whole carried tuple"


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """How many times the body of `loop`, a while in `computation`, runs; None where unknown.

    Arguments:
      module: the program.
      computation: the computation that holds the loop, where its initial values are found.
      loop: the `while` instruction.

    Returns:
      The number of times, or None (a data-dependent loop, or a counter of another form).
    """
    known = _KNOWN.search(loop.attributes)
    if known:
        return int(known[1])
    condition, body = loop.condition, loop.body
    if condition not in module.computations or body not in module.computations:
        return None
    start = _trace(module, computation, loop.operands[0], ())
    test = _root(module, condition, (_CARRIED,))
    after = _root(module, body, (_CARRIED,))
    if (
        not isinstance(test, _Compare)
        or not isinstance(start, tuple)
        or not isinstance(after, tuple)
    ):
        return None

    def constant(value: object) -> object:
        # A limit that the loop only hands on is as good as the constant that it started from.
        if isinstance(value, _Element) and after[value.index] == value:
            return start[value.index]
        return value

    left, right, direction = constant(test.left), constant(test.right), test.direction
    if isinstance(left, int):
        left, right, direction = right, left, _MIRRORED.get(direction, "")
    if not isinstance(left, _Element) or not isinstance(right, int):
        return None
    first, step = start[left.index], after[left.index]
    if not isinstance(first, int) or not isinstance(step, _Step) or step.index != left.index:
        return None
    return _times(first, step.by, right, direction)


def _times(first: int, step: int, limit: int, direction: str) -> int | None:
    if direction in ("LT", "LE") and step > 0:
        distance = limit - first + (direction == "LE")
    elif direction in ("GT", "GE") and step < 0:
        distance = first - limit + (direction == "GE")
    else:
        return None
    return max(0, -(-distance // abs(step)))


def _root(module: Module, name: str, arguments: tuple[object, ...]) -> object:
    computation = module.computations[name]
    return _trace(module, computation, computation.root.name, arguments)


def _trace(module: Module, within: Computation, name: str, arguments: tuple[object, ...]) -> object:
    """What one instruction gives: an int, a part of the carried tuple, or None for neither."""
    instruction = within.by_name.get(name)
    if instruction is None:
        return None

    def operand(number: int) -> object:
        return _trace(module, within, instruction.operands[number], arguments)

    opcode = instruction.opcode
    scalar = all(not shape.dims for shape in instruction.shapes)
    if opcode == "parameter":
        number = int(instruction.argument)
        return arguments[number] if number < len(arguments) else None
    if opcode == "tuple":
        return tuple(operand(number) for number in range(len(instruction.operands)))
    if opcode == "get-tuple-element":
        index, whole = int(instruction.attribute("index") or 0), operand(0)
        if whole is _CARRIED:
            return _Element(index)
        return whole[index] if isinstance(whole, tuple) else None
    if opcode == "constant":
        return int(instruction.argument) if re.fullmatch(r"-?\d+", instruction.argument) else None
    if not scalar:
        return None  # only counters matter, and they are scalars
    if opcode in _SAME_VALUE:
        return operand(0)
    if opcode in ("fusion", "call") and instruction.called:
        values = tuple(operand(number) for number in range(len(instruction.operands)))
        return _root(module, instruction.called[0], values)
    if opcode in ("add", "subtract"):
        return _sum(operand(0), operand(1), opcode == "subtract")
    if opcode == "compare":
        return _Compare(instruction.attribute("direction") or "", operand(0), operand(1))
    return None


def _sum(left: object, right: object, minus: bool) -> object:
    if isinstance(left, int) and not minus:
        left, right = right, left
    if not isinstance(right, int):
        return None
    by = -right if minus else right
    if isinstance(left, int):
        return left + by
    if isinstance(left, _Element):
        return _Step(left.index, by)
    return _Step(left.index, left.by + by) if isinstance(left, _Step) else None
