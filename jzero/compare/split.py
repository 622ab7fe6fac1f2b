"""What the peak of a step is made of: parameters, optimizer, gradients, activations and the rest.

Arguments are told by their names. For what lies in the heap, jzero's own scopes and JAX's autodiff
give names to operations: a value is followed back, through copies, casts, slices and loops, to
those that computed it.
"""

import re
from collections.abc import Sequence

from jzero.hlo.buffers import Value
from jzero.hlo.flow import Flow
from jzero.hlo.memory import Memory
from jzero.hlo.passes import phase
from jzero.hlo.peak import Live, Peak
from jzero.hlo.text import Instruction, Module
from jzero.hlo.ways import Way, same

PARTS: tuple[str, ...] = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "activations",
    "temporaries",
)

_ARGUMENTS = {
    "state.params": "parameters",
    "state.master": "optimizer",
    "state.opt_state": "optimizer",
}
_WEIGHTS = ("state.params", "state.master")
# jzero's scopes. The first three take gradients and give them.
_GRADIENT = re.compile(r"\bzero_(reduce|accumulate|norm)")
_GATHER, _UPDATE = "zero_gather", "zero_update"
_FORWARD = ("forward", "recomputed")
# How autodiff sums the gradients of several uses of a weight, and those of a lookup into zeros.
_SUMS = ("add_any", "scatter-add")


def peak_split(found: Peak, flow: Flow, memory: Memory) -> dict[str, int] | None:
    """Splits the peak of a training step.

    Arguments:
      found: what lies in memory at the peak.
      flow: of the compiled step.
      memory: its memory analysis.

    Returns:
      A device's bytes for each of `PARTS`, which add up to `memory.peak_bytes`. Parameters and
      optimizer (master weights, Optax state) are what is kept between steps; gathered are weights
      made whole, cast or cut out for their use; activations are what forward computes, for the
      first time or again; temporaries are the rest, with the batch and holes in the heap. None
      where the compiler's record does not account for the peak.
    """
    if not found.bytes <= memory.peak_bytes <= found.allocated:
        return None
    arguments, heap = _arguments(flow.module), _Heap(flow)
    sizes = [
        ("temporaries" if each.argument is None else arguments.get(each.argument), each.bytes)
        for each in found.held
    ]
    sizes += [(heap.part(each), each.bytes) for each in found.live]
    parts: dict[str, int] = dict.fromkeys(PARTS, 0)
    for part, size in sizes:
        if part is None:
            return None
        parts[part] += size
    parts["temporaries"] += memory.peak_bytes - found.bytes
    return parts


def _arguments(module: Module) -> dict[int, str]:
    """Number of an argument -> its part; those without a name are left out."""
    return {
        int(each.argument): next(
            (part for start, part in _ARGUMENTS.items() if each.source.startswith(start)),
            "temporaries",
        )
        for each in module.computations[module.entry].instructions
        if each.opcode == "parameter" and each.source
    }


class _Heap:
    """Says which part a buffer of the heap belongs to."""

    def __init__(self, flow: Flow):
        self._flow = flow
        self._names = [_name(flow.module, instruction) for _, instruction in flow.at]
        self._gradients = _gradients(flow, self._names)

    def part(self, live: Live) -> str | None:
        """The part; None where the text does not show the buffer."""
        parts = {self._part(value) for value in live.values} - {None}
        return min(parts, key=PARTS.index, default=None)

    def _part(self, value: Value) -> str | None:
        array = self._flow.array(value)
        if array is None:
            return None
        origins = self._flow.reach([array], same, back=True)
        names = [self._names[each] for each in origins]
        if array in self._gradients or any(_GRADIENT.search(name) for name in names):
            return "gradients"
        updated = any(_UPDATE in name for name in names)
        weights = any(name.startswith(_WEIGHTS) for name in names)
        if any(_GATHER in name for name in names) or (weights and not updated):
            return "gathered"
        return "activations" if any(phase(name) in _FORWARD for name in names) else "temporaries"


def _name(module: Module, instruction: Instruction) -> str:
    """The JAX operation that an instruction came from."""
    if instruction.source or not instruction.opcode.startswith(("all-reduce", "reduce-scatter")):
        return instruction.source
    # XLA:TPU keeps the name on what it reduces with alone.
    reducers = [module.computations[each] for each in instruction.called]
    return next((each.root.source for each in reducers), "")


def _gradients(flow: Flow, names: Sequence[str]) -> set[int]:
    """The arrays on their way into a reduction, an accumulator or the norm."""

    def follow(array: int, before: int, way: Way) -> bool:
        return way is Way.SAME or (way is Way.EACH and names[array].endswith(_SUMS))

    taken = (
        operand
        for array, name in enumerate(names)
        if _GRADIENT.search(name)
        for operand, way in flow.sources[array]
        if way is not Way.INDEX
    )
    return flow.reach(taken, follow, back=True)
