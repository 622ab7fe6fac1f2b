"""From where to where a collective is under way in a compiled program's schedule.

XLA:GPU writes `all-gather-start` and `all-gather-done`, or wraps the collective in `async-start`
and `async-done`; XLA:TPU marks the first and the last fusion of a chain. What stands between the
two in the schedule can run meanwhile. A loop that is pipelined starts a collective in one iteration
and ends it in the next: the loop's carried tuple hands it on.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from jzero.hlo.text import Computation, Instruction, Module

_HANDS_ON = frozenset({"get-tuple-element", "bitcast", "copy", "tuple", "opt-barrier"})


@dataclass(frozen=True)
class Span:
    """An asynchronous collective: its start, and all instructions scheduled until its done."""

    start: Instruction
    between: tuple[Instruction, ...]


class Callers:
    """Which instruction calls a computation."""

    def __init__(self, module: Module):
        self._module = module
        self._of: dict[str, tuple[Computation, Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions:
                for name in _entered(instruction):
                    self._of.setdefault(name, (computation, instruction))

    def above(self, computation: str) -> Iterator[tuple[Computation, Instruction]]:
        """The instructions through which the program comes to a computation, innermost first."""
        seen: set[str] = set()
        while computation in self._of and computation not in seen:
            seen.add(computation)
            found = self._of[computation]
            yield found
            computation = found[0].name


def span(
    module: Module, callers: Callers, within: Computation, collective: Instruction
) -> Span | None:
    """What is scheduled while a collective is under way; None where it is synchronous.

    Arguments:
      module: a scheduled module.
      callers: of the same module.
      within: the computation that holds the collective.
      collective: the instruction, at its first mention.
    """
    at: tuple[Computation, Instruction] | None = within, collective
    if not is_start(module, collective):
        # Wrapped: the start is the instruction that runs the computation that holds it.
        at = next((c for c in callers.above(within.name) if is_start(module, c[1])), None)
    if at is None:
        return None
    computation, start = at
    found = _until_done(module, computation, start)
    return None if found is None else Span(start, found)


def is_start(module: Module, instruction: Instruction) -> bool:
    """Whether it starts something that another instruction ends."""
    if instruction.opcode.endswith("-start"):
        return '"is_sync":true' not in instruction.attributes.replace(" ", "")
    return _marked(module, instruction, "AsyncCollectiveStart")


def _until_done(
    module: Module, within: Computation, start: Instruction
) -> tuple[Instruction, ...] | None:
    order = within.instructions
    at = next(i for i, each in enumerate(order) if each is start)
    done = _done(module, within, order[at + 1 :], {start.name})
    if isinstance(done, Instruction):
        return order[at + 1 : _position(within, done)]
    for index in done:  # carried into the next iteration: on from the top of the body
        values = {
            each.name
            for each in order
            if each.opcode == "get-tuple-element"
            and each.attribute("index") == str(index)
            and within.by_name[each.operands[0]].opcode == "parameter"
        }
        ended = _done(module, within, order, values)
        if isinstance(ended, Instruction):
            return order[at + 1 :] + order[: _position(within, ended)]
    return None


def _done(
    module: Module, within: Computation, order: tuple[Instruction, ...], values: set[str]
) -> Instruction | set[int]:
    """The instruction that ends one of the values, or else where the root tuple carries them."""
    values = set(values)
    for each in order:
        if values.isdisjoint(each.operands):
            continue
        if each.opcode.endswith("-done") or _marked(module, each, "AsyncCollectiveDone"):
            return each
        if each is within.root and each.opcode == "tuple":
            return {i for i, name in enumerate(each.operands) if name in values}
        if each.opcode in _HANDS_ON or each.opcode.endswith("-update") or _chains(module, each):
            values.add(each.name)
    return set()


def _position(within: Computation, wanted: Instruction) -> int:
    return next(i for i, each in enumerate(within.instructions) if each is wanted)


def _marked(module: Module, instruction: Instruction, mark: str) -> bool:
    return instruction.opcode == "fusion" and any(
        f'"{mark}"' in each.attributes for each in _inside(module, instruction)
    )


def _chains(module: Module, instruction: Instruction) -> bool:
    """Whether it is a fusion in the middle of a TPU's chain: it mentions the collective again."""
    return instruction.opcode == "fusion" and any(
        "chain_id=" in each.attributes for each in _inside(module, instruction)
    )


def _inside(module: Module, instruction: Instruction) -> Iterator[Instruction]:
    for name in instruction.called:
        if name in module.computations:
            yield from module.computations[name].instructions


def _entered(instruction: Instruction) -> tuple[str, ...]:
    loop = filter(None, (instruction.body, instruction.condition))
    return (*loop, *instruction.called, *instruction.branches)
