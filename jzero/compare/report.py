"""A comparison as tables for people."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jzero.compare.here import is_here
from jzero.compare.row import Result, Row
from jzero.compare.running import WARM_UP
from jzero.console import say
from jzero.plan.fit import advice
from jzero.units import Unit, percent, size, unit_for

_WIDE = 112
"""Columns of a console from which the whole table fits."""

_ONLY_WIDE = frozenset({"state", "temp", "memory", "GiB", "MiB", "KiB"})


def show(found: Result, console: Console) -> None:
    """Prints a comparison: memory and volume by stage, then every kind of collective.

    What running the steps took stands in between, where they ran.

    Arguments:
      found: the figures.
      console: where to.
    """
    console.print(_stages(found, wide=console.width >= _WIDE))
    for row in found.rows:
        if row.error is not None:
            say(console, f"Stage {row.stage}: {row.error}.")
        if row.mem_fraction is not None and row.fits:
            say(console, advice(row.stage, row.mem_fraction))
    ran = [row for row in found.rows if row.timed_steps is not None]
    if ran:
        _show_measured(ran, console)
    if any(row.collectives for row in found.rows):
        console.print(_collectives(found.rows))
    for row in found.rows:
        for note in row.notes or ():
            say(console, f"Stage {row.stage}: {note}.")
    if found.xla_flags:
        say(console, f"XLA options: {' '.join(found.xla_flags)}")
    if found.environment:
        alone = f"JAX {found.jax} takes some of them in the environment alone."
        if is_here(found.target):
            alone += " These steps ran without; set this before compare, and before your run"
        else:
            alone += " Your run needs this before it starts"
        say(console, f"{alone}: {found.environment}")


def _stages(found: Result, wide: bool) -> Table:
    unit = unit_for(max((row.peak_bytes or 0 for row in found.rows), default=0))
    sent = unit_for(max((row.comm_bytes or 0 for row in found.rows), default=0))
    mesh = " x ".join(f"{name}={n}" for name, n in found.mesh.items())
    has = "" if found.memory_bytes is None else f", {size(found.memory_bytes)} each"
    table = Table(
        title=Text(
            f"{found.model}: {found.parameters:,} parameters on {found.target} "
            f"({found.description}{has}), mesh {mesh}, micro-batch {found.micro_batch}, "
            f"accumulation {found.accumulate}, JAX {found.jax}"
        ),
        title_justify="left",
        caption_justify="left",
    )
    rows = [_cells(row, found, unit, sent) for row in found.rows]
    for name in rows[0]:
        if wide or name.split(",")[0] not in _ONLY_WIDE:
            style = "bold" if name == f"peak, {unit.name}" else None
            table.add_column(name, justify="right", no_wrap=True, style=style)
    shown = [column.header for column in table.columns]
    for row in rows:
        table.add_row(*(row[str(name)] for name in shown))
    table.caption = (
        "A device's bytes; args: the program's arguments, temp: its temporaries. ratio: bytes sent "
        "over psi x 2 bytes x (N-1)/N; the ZeRO paper's are 2, 2, 2, 3. hidden: of the bytes sent "
        "in layer loops, those with a matrix product to run meanwhile."
    )
    if found.platform == "cpu":
        table.caption += " XLA:CPU sends bf16 as f32: the ratio is in elements here."
    return table


def _cells(row: Row, found: Result, unit: Unit, sent: Unit) -> dict[str, str]:
    """Column -> cell."""
    state = None if row.state_bytes is None else sum(row.state_bytes.values())
    share = None
    if row.peak_bytes is not None and found.memory_bytes is not None:
        share = row.peak_bytes / found.memory_bytes
    ratio = row.comm_ratio_elements if found.platform == "cpu" else row.comm_ratio
    hidden, seconds = row.overlapped_fraction, row.compile_seconds
    return {
        "stage": str(row.stage),
        f"state, {unit.name}": _amount(state, unit),
        f"args, {unit.name}": _amount(row.argument_bytes, unit),
        f"temp, {unit.name}": _amount(row.temp_bytes, unit),
        f"peak, {unit.name}": _amount(row.peak_bytes, unit),
        unit.binary_name: "" if row.peak_bytes is None else unit.binary(row.peak_bytes),
        "memory": "" if share is None else percent(share),
        "fits": {None: "", True: "yes", False: "no"}[row.fits],
        f"sent, {sent.name}": _amount(row.comm_bytes, sent),
        "ratio": "" if ratio is None else f"{ratio:.3f}",
        "hidden": "" if hidden is None else f"{hidden:.1%}",
        "compile": "" if seconds is None else f"{seconds:.1f} s",
    }


def _show_measured(rows: Sequence[Row], console: Console) -> None:
    table = Table(title=Text("Measured as the steps ran"), title_justify="left")
    unit = unit_for(max(row.peak_bytes or 0 for row in rows))
    compiler, measured = f"compiler's peak, {unit.name}", f"measured peak, {unit.name}"
    told = any(row.measured_peak_bytes is not None for row in rows)
    shown = ["stage", *((compiler, measured, "compiler is") if told else ())]
    for name in (*shown, "a step", "fastest", "slowest", "steps timed"):
        table.add_column(name, justify="right")
    for row in rows:
        peaks = [_amount(row.peak_bytes, unit), _amount(row.measured_peak_bytes, unit), _off(row)]
        times = (row.seconds_per_step, row.seconds_fastest, row.seconds_slowest)
        table.add_row(
            str(row.stage),
            *(peaks if told else ()),
            *(_seconds(each or 0) for each in times),
            str(row.timed_steps),
        )
    console.print(table)
    told_of = f"a step: the median, after {WARM_UP} to warm up, each waited for, on made-up data."
    say(console, told_of if told else f"{told_of} These devices do not tell their peak memory.")


def _off(row: Row) -> str:
    """The compiler's peak against the measured one."""
    if not row.peak_bytes or not row.measured_peak_bytes:
        return ""
    return f"{row.peak_bytes / row.measured_peak_bytes - 1:+.1%}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def _collectives(rows: Iterable[Row]) -> Table:
    table = Table(
        title=Text("Collectives of a device in an optimizer step, loops multiplied out"),
        title_justify="left",
    )
    for name in ("stage", "collective", "axes", "dtype"):
        table.add_column(name)
    rows = list(rows)
    found = [each for row in rows for each in row.collectives or ()]
    unit = unit_for(max((each.bytes or 0 for each in found), default=0))
    for name in ("count", f"sent, {unit.name}", "elements"):
        table.add_column(name, justify="right")
    for row in rows:
        for number, each in enumerate(row.collectives or ()):
            table.add_row(
                str(row.stage) if number == 0 else "",
                each.op,
                ", ".join(each.axes),
                each.dtype,
                "unknown" if each.count is None else f"{each.count:,}",
                "unknown" if each.bytes is None else unit.decimal(each.bytes),
                "unknown" if each.elements is None else f"{each.elements:,}",
            )
        table.add_section()
    return table


def _amount(count: int | None, unit: Unit) -> str:
    return "" if count is None else unit.decimal(count)
