"""Arrays that a compiler lays end to end, moves as one, and cuts apart again.

XLA:GPU combines all-reduces so. Read as one array, a gradient and an activation in it would be one.
"""

import re

from jzero.hlo.flow import Flow
from jzero.hlo.ways import Way

_RANGE = re.compile(r"\bslice=\{\[(\d+):(\d+)\]\}")


def unpack(flow: Flow) -> None:
    """Leads each piece past what it is packed into, from its source straight to what is cut out.

    Where a packed array is used in another way, it stays one array.
    """
    for array, (_, instruction) in enumerate(flow.at):
        flat = len(flow.shapes[array].dims) == 1
        if instruction.opcode == "concatenate" and flat and len(instruction.operands) > 1:
            _unpack(flow, array)


def _unpack(flow: Flow, packed: int) -> None:
    dims = flow.shapes[packed].dims

    def goes_on(_: int, after: int, way: Way) -> bool:
        return way in (Way.SAME, Way.EACH) and flow.shapes[after].dims == dims

    chain = flow.reach([packed], goes_on)
    entry = flow.module.computations[flow.module.entry]
    if not chain.isdisjoint(flow.results(entry, entry.root)):
        return
    cuts = [(array, *use) for array in chain for use in flow.uses[array] if use[0] not in chain]
    pieces, start = [], 0
    for source, _ in flow.sources[packed]:
        end = start + flow.shapes[source].elements
        pieces.append((start, end, source))
        start = end
    edges = []
    for array, result, _ in cuts:
        found = _RANGE.search(flow.at[result][1].attributes)
        low, high = (int(found[1]), int(found[2])) if found else (0, 0)
        inside = [source for a, b, source in pieces if a <= low < high <= b]
        if not inside:
            return
        edges.append((array, result, inside[0]))
    beside = {source for array in chain - {packed} for source, _ in flow.sources[array]} - chain
    if any(flow.at[source][1].opcode not in ("broadcast", "constant") for source in beside):
        return
    way = Way.EACH if any(w is Way.EACH for a in chain for _, w in flow.uses[a]) else Way.SAME
    for array, result, source in edges:
        flow.lead(array, result, source, way)
    found = [(source, tuple(r for _, r, of in edges if of == source)) for _, _, source in pieces]
    flow.pieces.update(dict.fromkeys(chain, found))
