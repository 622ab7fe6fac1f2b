"""What a program's collectives move: weights, gradients, or activations."""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jzero.auditing.frames import Frames
from jzero.auditing.origins import Kind, Origins
from jzero.hlo.flow import Flow, Piece
from jzero.hlo.known import product
from jzero.hlo.sites import Site


@dataclass(frozen=True)
class Moved:
    """One array that a collective moves; figures are for one device and call of the program.

    Attributes:
      kind: what it is.
      op, axes, dtype: as `jzero.hlo.Site` has them.
      dims: of the full tensor: of an all-gather the result, else the operand (of an all-to-all that
        is written in pieces, one of them).
      count: runs, loops multiplied out; None where unknown.
      elements: of the full tensor, times count; None where unknown.
      bytes: ring bytes that a device sends, times count; None where unknown.
      arguments: names of the arguments of the program whose elements these are.
      op_name: the JAX operation behind it, or "".
      line: `file.py:21`, or "".
      name: of the HLO instruction.
      array: the full tensor in the program's `Flow`.
    """

    kind: Kind
    op: str
    axes: tuple[str, ...]
    dtype: str
    dims: tuple[int, ...]
    count: int | None
    elements: int | None
    bytes: int | None
    arguments: tuple[str, ...]
    op_name: str
    line: str
    name: str
    array: int


def moved(flow: Flow, origins: Origins, sites: Iterable[Site], frames: Frames) -> list[Moved]:
    """Takes collectives apart into the arrays that they move, and says what each is.

    Arguments:
      flow, origins, frames: of the program.
      sites: its collectives.

    Returns:
      In the order of the sites; what one instruction combines is several.
    """
    found = []
    for site in sites:
        computation = flow.module.computations[site.computation]
        collective = computation.by_name[site.name]
        everything = flow.moved(computation, collective)
        pairs = [pair for pair in everything if flow.shapes[pair[0]].dtype == site.dtype]
        if site.op == "all-to-all":  # written as a piece for each device
            pairs = pairs[:1]
        for (operand, results), sent in zip(pairs, _shares(site, flow, pairs), strict=True):
            array = results[0] if site.op == "all-gather" else operand
            shape = flow.shapes[array]
            elements = site.elements if len(pairs) == 1 or site.elements is None else shape.elements
            full = elements or shape.elements
            combined = len(everything) > 1 or not collective.source
            behind = (origins.maker(operand) if combined else None) or collective
            found.append(
                Moved(
                    kind=origins.kind(site.op, operand, results, full, behind.source),
                    op=site.op,
                    axes=site.axes,
                    dtype=site.dtype,
                    dims=shape.dims,
                    count=site.count,
                    elements=product(elements, site.count),
                    bytes=product(sent, site.count),
                    arguments=origins.names(operand),
                    op_name=behind.source,
                    line=frames.line(behind),
                    name=site.name,
                    array=array,
                )
            )
    return found


def _shares(site: Site, flow: Flow, pairs: Sequence[Piece]) -> list[int | None]:
    """Of what a site sends, the part of each array that it moves; they add up to the whole."""
    if site.bytes is None:
        return [None] * len(pairs)
    ends = list(itertools.accumulate(flow.shapes[operand].bytes for operand, _ in pairs))
    cuts = [0, *(site.bytes * end // max(ends[-1], 1) for end in ends)]
    return [high - low for low, high in itertools.pairwise(cuts)]
