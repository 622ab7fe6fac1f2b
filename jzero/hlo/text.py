"""The text of a compiled XLA module as a small tree: computations, instructions, shapes.

Only what jzero asks of a program is kept, in the text's order, which is that of the schedule. The
grammar is XLA's HLO text (https://openxla.org/xla/hlo_dumps), one instruction on one line.
"""

import functools
import math
import re
from dataclasses import dataclass

from jax.stages import Compiled

from jzero.errors import JzeroError

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,<=?\s]*)\]")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{\s*")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
_COMMENT = re.compile(r"/\*.*?\*/")
_CALLED = re.compile(r"\b(calls|to_apply|called_computations)=(\{[^}]*\}|%?[\w.\-]+)")
_BRANCHES = re.compile(
    r"\b(branch_computations|true_computation|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_NAME = re.compile(r"%?([\w.\-]+)")
_DIMS_OR_LAYOUT = re.compile(r"(?<=\[)[^\]]*|\{[^}]*\}")


@dataclass(frozen=True)
class Shape:
    """One array: `dtype` as HLO spells it and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    def __str__(self) -> str:
        """As HLO writes it: `bf16[8,128,1024]`."""
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return (self.elements * bits(self.dtype) + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    `shapes` are the arrays of the result (a tuple's leaves in order), `operands` names in the same
    computation, `argument` the text between the parentheses, `attributes` the text after them,
    `result` the text of the result's type.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    argument: str
    attributes: str
    result: str

    @property
    def widths(self) -> tuple[int, ...]:
        """How many arrays each element of the result's tuple holds; (1,) of an array."""
        return _widths(self.result)

    @property
    def called(self) -> tuple[str, ...]:
        """Computations that run once each time this does: of a fusion, a call, an async wrapper."""
        return self._computations(_CALLED)

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations of which a conditional runs one."""
        return self._computations(_BRANCHES)

    @property
    def source(self) -> str:
        """The JAX operation it came from (`op_name`), or "" where the compiler kept none."""
        found = re.search(r'\bop_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def body(self) -> str | None:
        """The computation that a `while` repeats; None of other instructions."""
        return self.attribute("body") if self.opcode == "while" else None

    @property
    def condition(self) -> str | None:
        """The computation that says whether a `while` goes on; None of other instructions."""
        return self.attribute("condition") if self.opcode == "while" else None

    def attribute(self, key: str) -> str | None:
        """A one-word attribute's value, such as `index`, `body` or `direction`."""
        found = re.search(rf"\b{key}=%?([\w.\-]+)", self._own)
        return found[1] if found else None

    @property
    def _own(self) -> str:
        # Metadata repeats what the user's functions are called: never search it for attributes.
        return self.attributes.split(", metadata=", 1)[0]

    def _computations(self, pattern: re.Pattern[str]) -> tuple[str, ...]:
        return tuple(
            name for _, names in pattern.findall(self._own) for name in _NAME.findall(names)
        )


@dataclass(frozen=True)
class Computation:
    """Instructions in text order, which is schedule order in a scheduled module."""

    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {each.name: each for each in self.instructions}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """What one of its instructions reads.

        Raises:
          JzeroError: some of it is not here: the text was cut.
        """
        lost = [name for name in instruction.operands if name not in self.by_name]
        if lost:
            raise JzeroError(
                f"HLO instruction %{instruction.name} reads %{lost[0]}, which %{self.name} does "
                "not hold: the text is not complete"
            )
        return [self.by_name[name] for name in instruction.operands]


@dataclass(frozen=True)
class Module:
    """A whole program; `partitions` x `replicas` devices run it."""

    computations: dict[str, Computation]
    entry: str
    partitions: int
    replicas: int


Program = Compiled | str | Module
"""A compiled function, `jit(f).lower(...).compile()`; its text; or that text as it was read."""


def parse(program: Program) -> Module:
    """Reads the text of one compiled program.

    Arguments:
      program: what is read already comes back as it is.

    Returns:
      The module.

    Raises:
      JzeroError: the text holds no entry computation.
    """
    if isinstance(program, Module):
        return program
    text = program if isinstance(program, str) else program.as_text() or ""
    computations: dict[str, Computation] = {}
    entry = name = ""
    lines: list[Instruction] = []
    root: Instruction | None = None
    for line in text.splitlines():
        if line.startswith("}"):
            if name and lines:
                computations[name] = Computation(name, tuple(lines), root or lines[-1])
            name = ""
        elif not name and line and not line[0].isspace() and not line.startswith("HloModule"):
            # The stack frame tables above the first computation have no opening brace at their end.
            head = _COMPUTATION.fullmatch(line)
            if head:
                name, lines, root = head[2], [], None
                entry = name if head[1] else entry
        elif name:
            match = _INSTRUCTION.fullmatch(_COMMENT.sub("", line))
            if match:
                instruction = _instruction(match[2], match[3])
                lines.append(instruction)
                root = instruction if match[1] else root
    if not entry:
        raise JzeroError(
            "this is not the text of a compiled HLO module (no ENTRY computation): "
            "pass what compiled.as_text() returns"
        )
    return Module(
        computations, entry, _header(text, "num_partitions"), _header(text, "replica_count")
    )


def _instruction(name: str, rest: str) -> Instruction:
    end = _closing(rest, 0) if rest.startswith("(") else rest.find(" ")
    opcode = _OPCODE.match(rest, end)
    if opcode is None:
        raise JzeroError(f"cannot read HLO instruction %{name}: no opcode in {rest[:80]!r}")
    close = _closing(rest, opcode.end() - 1)
    argument = rest[opcode.end() : close - 1]
    constant = opcode[1] in ("constant", "parameter")
    operands = () if constant else tuple(part.split()[-1].lstrip("%") for part in _split(argument))
    result, attributes = rest[:end], rest[close:]
    return Instruction(name, opcode[1], _shapes(result), operands, argument, attributes, result)


def _split(argument: str) -> list[str]:
    # Operands may carry their shapes, and shapes hold commas: with "%" the names alone are marked.
    names = re.findall(r"%[\w.\-]+", argument)
    return names or [part for part in argument.split(",") if part.strip()]


def _closing(text: str, start: int) -> int:
    """Position just after the bracket that closes the one at `start`; strings are passed over."""
    depth, quoted = 0, False
    for position in range(start, len(text)):
        char = text[position]
        if char == '"' and text[position - 1] != "\\":
            quoted = not quoted
        elif quoted:
            continue
        elif char == "(":
            depth += 1
        elif char == ")":
            depth -= 1
            if depth == 0:
                return position + 1
    return len(text)


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(dim.strip(" <=?") or 0) for dim in dims.split(",") if dim.strip()))
        for dtype, dims in _SHAPE.findall(text)
    )


@functools.lru_cache(maxsize=4096)
def _widths(text: str) -> tuple[int, ...]:
    if not text.startswith("("):
        return (1,)
    # What is left of the type are its tuples' brackets and commas, and "[" for each array.
    marks = re.findall(r"[(),\[]", _DIMS_OR_LAYOUT.sub("", text))
    found, arrays, depth = [], 0, 0
    for mark in marks[1:]:
        if depth == 0 and mark in ",)":
            found.append(arrays)
            arrays = 0
        depth += (mark == "(") - (mark == ")")
        arrays += mark == "["
    return tuple(found) if any(found) else ()


def bits(dtype: str) -> int:
    """Of an element, by its dtype as HLO spells it."""
    if dtype == "pred":
        return 8
    if dtype in ("token", "opaque"):
        return 0
    width = re.match(r"(?:s|u|f|bf|c)(\d+)", dtype)
    if width is None:
        raise JzeroError(f"cannot size HLO dtype {dtype!r}: it is not one that this reader knows")
    return int(width[1])


def _header(text: str, key: str) -> int:
    found = re.search(rf"^HloModule .*\b{key}=(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else 1
