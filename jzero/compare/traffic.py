"""A program's collectives in the user's axis names, against the paper's volume."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jzero.compare.row import Traffic
from jzero.hlo import Collective
from jzero.hlo.groups import UNKNOWN
from jzero.hlo.text import bits
from jzero.layout import Layout
from jzero.mesh import ZeroMesh


def traffic(found: Iterable[Collective], mesh: ZeroMesh) -> tuple[Traffic, ...]:
    """The collectives, largest first, with mesh axes called as the user calls them."""
    own = user_axes(mesh)
    rows = [
        Traffic(
            each.op,
            tuple(own.get(axis, axis) for axis in each.axes),
            each.dtype,
            each.count,
            each.bytes,
            each.elements,
        )
        for each in found
    ]
    return tuple(sorted(rows, key=lambda row: -math.inf if row.bytes is None else -row.bytes))


def user_axes(mesh: ZeroMesh) -> dict[str, str]:
    """What the user calls each mesh axis that a step has under another name."""
    return dict(zip(mesh.manual_data_axes, mesh.data_axes, strict=True))


def volume(rows: Sequence[Traffic], mesh: ZeroMesh) -> int | None:
    """Ring bytes over ZeRO and replica axes alone; None where some collective's are not known."""
    total = 0
    for row in rows:
        unknown = row.axes == UNKNOWN
        if not unknown and not set(row.axes) <= set(mesh.data_axes):
            continue
        if unknown or row.bytes is None:
            return None
        total += row.bytes
    return total


def ratios(
    rows: Sequence[Traffic], mesh: ZeroMesh, layout: Layout
) -> tuple[float | None, float | None]:
    """The volume over the paper's unit, in bytes and in elements.

    The unit is psi (N-1)/N elements of two bytes, where psi is the number of parameters of one
    tensor shard and N the ZeRO group. None with one device, and where the volume is not known.
    """
    group = mesh.group_size
    unit = shard_parameters(layout) * (group - 1) / group
    sent = volume(rows, mesh)
    elements = volume([replace(row, bytes=_elements(row)) for row in rows], mesh)
    if not unit or sent is None or elements is None:
        return None, None
    return sent / (2 * unit), elements / unit


def shard_parameters(layout: Layout) -> int:
    """Parameters of one tensor shard: each leaf's over the mesh axes that shard it beside ZeRO."""
    return sum(leaf.array.size // layout.other_shards(leaf) for leaf in layout.leaves.values())


def _elements(row: Traffic) -> int | None:
    """Elements sent on the ring."""
    return None if row.bytes is None else row.bytes * 8 // bits(row.dtype)
