"""Totals of a program's collectives by opcode, mesh axes and dtype."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from jzero.hlo.known import added_up, product
from jzero.hlo.sites import Site, sites
from jzero.hlo.text import Program


@dataclass(frozen=True)
class Collective:
    """What one device sends in one call of the program, for one opcode, set of axes and dtype.

    Attributes:
      op: HLO opcode, such as "all-gather"; a TPU's fused form counts as "reduce-scatter".
      axes: mesh axes in mesh order, or ("unknown",).
      dtype: as HLO spells it, such as "bf16".
      count: collectives run, loops multiplied out; None where the program does not tell.
      elements: elements of the full tensors (of an all-reduce and others: of the operand), times
          count. Not scaled by the ring.
      bytes: bytes sent on a ring of n devices: (n-1)/n of the full tensor for all-gather,
          reduce-scatter and all-to-all, twice that for all-reduce, the operand for
          collective-permute; times count.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    elements: int | None
    bytes: int | None


def collectives(program: Program, mesh: Mesh | AbstractMesh) -> list[Collective]:
    """Adds up the collectives of a compiled program, per device and call.

    Arguments:
      program: a compiled function, its text, or that text as `parse` read it.
      mesh: the mesh it was compiled for.

    Returns:
      One row for each opcode, axes and dtype, sorted; collectives that run an unknown number of
      times form a row of their own with `count`, `elements` and `bytes` None.

    Raises:
      JzeroError: `program` is text that holds no HLO module.
    """
    return total(sites(program, mesh))


def total(found: Iterable[Site]) -> list[Collective]:
    """Adds up sites, all of a program's or a choice of them, as `collectives` does."""
    table: dict[tuple[str, tuple[str, ...], str, bool], list[Site]] = {}
    for site in found:
        table.setdefault((site.op, site.axes, site.dtype, site.count is None), []).append(site)
    return [
        Collective(
            op,
            axes,
            dtype,
            added_up(site.count for site in group),
            added_up(product(site.count, site.elements) for site in group),
            added_up(product(site.count, site.bytes) for site in group),
        )
        for (op, axes, dtype, _), group in sorted(table.items())
    ]


def count_by(
    rows: Iterable[Collective],
    op: str | None = None,
    axes: str | Sequence[str] | None = None,
    dtype: str | None = None,
) -> int | None:
    """How many collectives run, of the rows with this opcode, these axes and this dtype.

    Arguments:
      rows: from `collectives`.
      op: an HLO opcode; None takes all.
      axes: exactly these mesh axes, or one axis's name; None takes all.
      dtype: an HLO dtype; None takes all.

    Returns:
      The sum, 0 where no row matches; None where a matching row's figure is not known.

    >>> rows = [Collective("all-gather", ("data",), "bf16", 10, 5000, 8750)]
    >>> count_by(rows, "all-gather", "data"), count_by(rows, "all-reduce")
    (10, 0)
    """
    return added_up(row.count for row in _chosen(rows, op, axes, dtype))


def elements_by(
    rows: Iterable[Collective],
    op: str | None = None,
    axes: str | Sequence[str] | None = None,
    dtype: str | None = None,
) -> int | None:
    """Full-tensor elements of the matching rows, to hold against parameters; see `count_by`."""
    return added_up(row.elements for row in _chosen(rows, op, axes, dtype))


def bytes_by(
    rows: Iterable[Collective],
    op: str | None = None,
    axes: str | Sequence[str] | None = None,
    dtype: str | None = None,
) -> int | None:
    """Ring bytes that one device sends, of the matching rows; see `count_by`."""
    return added_up(row.bytes for row in _chosen(rows, op, axes, dtype))


def _chosen(
    rows: Iterable[Collective],
    op: str | None,
    axes: str | Sequence[str] | None,
    dtype: str | None,
) -> list[Collective]:
    wanted = {axes} if isinstance(axes, str) else None if axes is None else set(axes)
    return [
        row
        for row in rows
        if (op is None or row.op == op)
        and (wanted is None or set(row.axes) == wanted)
        and (dtype is None or row.dtype == dtype)
    ]
