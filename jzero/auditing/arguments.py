"""Which of a program's arguments are training state, and which are the batch.

A program does not say so. What it tells is which arguments its outputs overwrite (donated state),
which outputs have an argument's shape (new state, or gradients), and which arguments are integers
(tokens, labels, keys). What none of this settles stays open.
"""

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from jzero.errors import JzeroError
from jzero.hlo.flow import Flow
from jzero.hlo.passes import BACKWARD
from jzero.hlo.text import Shape

SMALL = 1024
"""Elements up to which an array is a counter or a statistic rather than a tensor."""

_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{\}, (?:may|must)-alias\)")
_ROOT = re.compile(r"(?:args|kwargs)\[[^\]]*\]|\w+")


class Role(Enum):
    """What an argument is."""

    STATE = "state"
    BATCH = "batch"
    UNSURE = "unsure"  # weights that never change, or a batch of floats
    SCALAR = "scalar"  # a learning rate, a counter, a key of the state


@dataclass(frozen=True)
class Argument:
    """An argument of a program.

    Attributes:
      array: in the program's `Flow`.
      name: as JAX calls it, such as "params['up']"; "argument 3" where the text has no name.
      role: what it is.
    """

    array: int
    name: str
    role: Role

    @property
    def root(self) -> str:
        """Of the function's own arguments, the one that it is part of."""
        return root(self.name)


@dataclass(frozen=True)
class Arguments:
    """A program's arguments, and the outputs that are new state or gradients.

    Attributes:
      all: in order.
      state_outputs: of the outputs that are new state or gradients the arrays in the program's
        `Flow`; scalars left out.
      has_backward: whether the program has operations of a backward pass.
    """

    all: tuple[Argument, ...]
    state_outputs: frozenset[int]
    has_backward: bool

    def of(self, *roles: Role) -> list[Argument]:
        return [each for each in self.all if each.role in roles]


def root(name: str) -> str:
    """
    >>> root("params['up']"), root("args[0].mu['up']"), root("argument 3")
    ('params', 'args[0]', 'argument 3')
    """
    found = None if name.startswith("argument ") else _ROOT.match(name)
    return found[0] if found else name


def arguments(flow: Flow, header: str, weights: Sequence[str] | None = None) -> Arguments:
    """Finds a program's arguments and their roles.

    Arguments:
      flow: of the program.
      header: the first line of its text.
      weights: names of the arguments that are state, or of what they are part of ("params" for
        "params['up']"); all others are then the batch. None finds out.

    Raises:
      JzeroError: a name in `weights` that no argument has.
    """
    entry = flow.module.computations[flow.module.entry]
    arrays, names = {}, {}
    for each in entry.instructions:
        if each.opcode == "parameter":
            number = int(each.argument)
            arrays[number] = flow.results(entry, each)[0]
            names[number] = each.source.replace("\\'", "'") or f"argument {number}"
    outputs = flow.results(entry, entry.root)
    becomes = {int(number): outputs[int(output or 0)] for output, number in _ALIAS.findall(header)}
    named = None if weights is None else _named(names, weights)
    if named is not None:
        becomes = {number: output for number, output in becomes.items() if number in named}
    has_backward = any(BACKWARD in instruction.source for _, instruction in flow.at)
    if has_backward:
        others = [n for n in arrays if n not in becomes and (named is None or n in named)]
        groups: dict[object, list[int]] = {}
        for number in others:
            groups.setdefault(root(names[number]) if named is None else number, []).append(number)
        left = [output for output in outputs if output not in becomes.values()]
        becomes |= _alike(flow, arrays, list(groups.values()), left)
    state = set(becomes) if named is None else named
    found = [
        Argument(array, names[number], _role(flow.shapes[array], number in state, named is None))
        for number, array in sorted(arrays.items())
    ]
    tensors = [n for n in becomes if flow.shapes[arrays[n]].dims]
    return Arguments(tuple(found), frozenset(becomes[n] for n in tensors), has_backward)


def _named(names: dict[int, str], weights: Sequence[str]) -> set[int]:
    found: set[int] = set()
    for want in weights:
        parts = {n for n, name in names.items() if re.match(rf"{re.escape(want)}($|[.\[])", name)}
        if not parts:
            known = ", ".join(sorted({root(name) for name in names.values()}))
            raise JzeroError(f"weights: no argument of the program is {want!r}; it has {known}")
        found |= parts
    return found


def _alike(
    flow: Flow, arrays: dict[int, int], groups: Sequence[list[int]], outputs: list[int]
) -> dict[int, int]:
    """Argument -> an output of its global shape; only of groups in which every argument has one.

    Those outputs are gradients, or new state that is not written in place.
    """
    shapes, free = flow.shapes, set(outputs)
    found: dict[int, int] = {}
    # First those that are sharded as their argument is.
    for match in (operator.eq, functools.partial(_resharded, devices=flow.module.partitions)):
        for group in sorted(groups, key=lambda group: -sum(shapes[arrays[n]].bytes for n in group)):
            tensors = [n for n in group if shapes[arrays[n]].dims and n not in found]
            taken: dict[int, int] = {}
            for number in tensors:
                left = sorted(free - set(taken.values()))
                same = (out for out in left if match(shapes[arrays[number]], shapes[out]))
                output = next(same, None)
                if output is not None:
                    taken[number] = output
            if len(taken) == len(tensors):
                found |= taken
                free -= set(taken.values())
    return found


def _resharded(one: Shape, other: Shape, devices: int) -> bool:
    """Whether two pieces may be of arrays of one shape: as many elements, or one of them whole."""
    if one.dtype != other.dtype or len(one.dims) != len(other.dims):
        return False
    pairs = [(max(pair), min(pair)) for pair in zip(one.dims, other.dims, strict=True)]
    sizes = sorted((one.elements, other.elements))
    return sizes[1] in (sizes[0], sizes[0] * devices) and all(
        low and high % low == 0 and devices % (high // low) == 0 for high, low in pairs
    )


def _role(shape: Shape, is_state: bool, may_be_unsure: bool) -> Role:
    integer = not re.match(r"b?f\d", shape.dtype)
    if not shape.dims or (is_state and integer and shape.elements <= SMALL):
        return Role.SCALAR
    if is_state:
        return Role.STATE
    return Role.UNSURE if may_be_unsure and not integer else Role.BATCH
