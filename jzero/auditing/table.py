"""The parts of a report as tables and lines for people."""

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from jzero.auditing.lines import array, held, merged, short
from jzero.auditing.moved import Moved
from jzero.auditing.origins import Kind
from jzero.hlo import Memory
from jzero.hlo.known import added_up
from jzero.units import Unit, size, unit_for

MOST = 12
"""Rows of a table that names single arrays; the rest is counted in its last row."""

_WARNS = {Kind.ACTIVATION, Kind.UNKNOWN}


def memory_line(memory: Memory) -> str:
    """The peak and what it is made of."""
    fresh = memory.output_bytes - memory.alias_bytes
    host = f", and {size(memory.host_bytes)} in the host's memory" if memory.host_bytes else ""
    return (
        f"Peak {size(memory.peak_bytes)}: arguments {size(memory.argument_bytes)}, temporaries "
        f"{size(memory.temp_bytes)}, outputs that overwrite no argument {size(fresh)}{host}."
    )


def kinds_table(found: Sequence[Moved]) -> Table:
    """Everything that is moved, by kind, opcode, axes and dtype."""
    table = _table("What a device sends in a call, loops multiplied out")
    for name in ("what", "collective", "axes", "dtype"):
        table.add_column(name)
    groups: dict[tuple[Kind, str, tuple[str, ...], str], list[Moved]] = {}
    for each in found:
        groups.setdefault((each.kind, each.op, each.axes, each.dtype), []).append(each)
    totals = {key: added_up(each.bytes for each in group) for key, group in groups.items()}
    unit = unit_for(max((total or 0 for total in totals.values()), default=0))
    for name in ("arrays", f"sent, {unit.name}", "elements"):
        table.add_column(name, justify="right")
    for kind in Kind:
        rows = sorted(key[1:] for key in groups if key[0] is kind)
        for number, (op, axes, dtype) in enumerate(rows):
            key = kind, op, axes, dtype
            table.add_row(
                kind.value if number == 0 else "",
                op,
                ", ".join(axes),
                dtype,
                _figure(added_up(each.count for each in groups[key])),
                _sent(totals[key], unit),
                _figure(added_up(each.elements for each in groups[key])),
                style="bold yellow" if kind in _WARNS else "",
            )
        table.add_section()
    return table


def arrays_table(title: str, found: Sequence[Moved]) -> Table:
    """Single arrays that are moved, and what is behind each."""
    unit = _unit(found)
    table = _table(title)
    table.add_column("array")
    table.add_column("collective")
    table.add_column("times", justify="right")
    table.add_column(f"sent, {unit.name}", justify="right")
    table.add_column("behind it", overflow="fold")
    for each in found[:MOST]:
        moved = f"{each.op}, {', '.join(each.axes)}"
        sent = _sent(each.bytes, unit)
        table.add_row(array(each), moved, _figure(each.count), sent, Text(short(each)))
    _rest(table, found, _sent(added_up(each.bytes for each in found[MOST:]), unit))
    return table


def kept_table(weights: Sequence[Moved]) -> Table:
    """Gathered weights that are kept from forward for backward."""
    unit = unit_for(held(weights) or 0)
    table = _table("Gathered weights that are kept from forward for backward, at the least")
    table.add_column("array")
    table.add_column("gathered over")
    table.add_column("times", justify="right")
    table.add_column(f"kept, {unit.name}", justify="right")
    table.add_column("behind it", overflow="fold")
    found = merged(weights)
    for each in found[:MOST]:
        kept = _sent(held([each]), unit)
        over = ", ".join(each.axes)
        table.add_row(array(each), over, _figure(each.count), kept, Text(short(each)))
    _rest(table, found, _sent(held(found[MOST:]), unit))
    return table


def _rest(table: Table, found: Sequence[Moved], amount: str) -> None:
    if len(found) > MOST:
        table.add_section()
        table.add_row(f"{len(found) - MOST} more", "", "", amount, "")


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left")


def _unit(found: Sequence[Moved]) -> Unit:
    return unit_for(max((each.bytes or 0 for each in found), default=0))


def _figure(count: int | None) -> str:
    return "unknown" if count is None else f"{count:,}"


def _sent(count: int | None, unit: Unit) -> str:
    return "unknown" if count is None else unit.decimal(count)
