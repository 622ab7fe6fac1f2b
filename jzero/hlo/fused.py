"""Forms that XLA:TPU gives its collectives: chains of fusions, and the fused reduce-scatter."""

import re

from jzero.hlo.text import Computation, Instruction


def begins(within: Computation, collective: Instruction) -> bool:
    """False for the later mentions of a collective that a TPU program runs as a chain of fusions.

    Such a chain opens with a fusion that ends in the custom call AsyncCollectiveStart and closes
    with one that ends in AsyncCollectiveDone; the fusions after the first repeat the collective.
    """
    marks = [each for each in within.instructions if "AsyncCollective" in each.attributes]
    chained = bool(marks) or "chain_id=" in collective.attributes
    if not (chained or within.name.startswith("async_collective_fusion")):
        return True
    starts = [each.name for each in marks if '"AsyncCollectiveStart"' in each.attributes]
    return any(_reaches(within, start, collective.name) for start in starts)


def _reaches(within: Computation, name: str, wanted: str) -> bool:
    pending, seen = [name], set()
    while pending:
        name = pending.pop()
        if name == wanted:
            return True
        if name not in seen and name in within.by_name:
            seen.add(name)
            pending += within.by_name[name].operands
    return False


def is_fused_reduce_scatter(instruction: Instruction) -> bool:
    names = (instruction.name, *instruction.called)
    return instruction.opcode == "fusion" and any(
        re.match(r"all-reduce-scatter\b", name) for name in names
    )
