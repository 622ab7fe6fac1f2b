"""The figures as tables: the same as the charts show, and those behind them."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape

from jzero.compare.page.bars import paper_ratio
from jzero.compare.page.pieces import MEMORY, UNDIVIDED, of_memory
from jzero.compare.page.play import Played
from jzero.compare.page.words import counted, duration
from jzero.compare.row import Result, Row
from jzero.compare.schedule.parts import Part
from jzero.units import Unit, percent, unit_for

UNKNOWN = "unknown"
_NONE = "–"


def table(caption: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a box that scrolls by itself; cells are markup, the first of a row is its head."""
    head = "".join(f'<th scope="col">{escape(each)}</th>' for each in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    name = escape(caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table>'
        f"<caption>{name}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def memory(found: Result) -> str:
    """Every stage's bytes."""
    unit = unit_for(max((row.peak_bytes or 0 for row in found.rows), default=0))
    parts = {row.stage: {p.key: p.bytes for p in of_memory(row)} for row in found.rows}
    used = [key for key in MEMORY if any(key in each for each in parts.values())]
    measured = any(row.measured_peak_bytes is not None for row in found.rows)
    host = any(row.host_bytes for row in found.rows)
    heads = ["stage", *(MEMORY[key] for key in used), "peak", *["measured peak"] * measured]
    heads += ["of the memory", "fits", "between steps", "arguments", "temporary", "aliased"]
    heads += ["on the host"] * host
    rows = []
    for row in found.rows:
        cells = [_part(row, key, parts[row.stage], unit) for key in used]
        cells.append(_size(row.peak_bytes, unit))
        cells += [_size(row.measured_peak_bytes, unit)] * measured
        share = None
        if row.peak_bytes is not None and found.memory_bytes:
            share = row.peak_bytes / found.memory_bytes
        cells.append(_NONE if share is None else percent(share))
        cells.append(
            "refused" if row.is_refused else {None: _NONE, True: "yes", False: "no"}[row.fits]
        )
        state = None if row.state_bytes is None else sum(row.state_bytes.values())
        sizes = [state, row.argument_bytes, row.temp_bytes, row.alias_bytes]
        cells += [_size(size, unit) for size in sizes + [row.host_bytes] * host]
        rows.append([str(row.stage), *cells])
    return table(f"Memory of a device, in {unit.name}", heads, rows)


def largest(rows: Sequence[Row]) -> str:
    """The largest buffers of the heap at each stage's peak."""
    found = [(row.stage, each) for row in rows for each in row.largest or ()]
    unit = unit_for(max((each.bytes for _, each in found), default=0))
    heads = ["stage", unit.name, "array", "from", "computed by"]
    lines = [
        [
            str(stage),
            _size(each.bytes, unit),
            escape(UNKNOWN if each.shape is None else str(each.shape)),
            escape(each.opcode or each.instruction),
            escape(each.source or _NONE),
        ]
        for stage, each in found
    ]
    return table("The largest buffers at the peak, arguments left out", heads, lines)


def stages(found: Result) -> str:
    """Every stage's volume, and what it took to know it."""
    unit = unit_for(max((row.comm_bytes or 0 for row in found.rows), default=0))
    elements = found.platform == "cpu"
    heads = ["stage", f"sent, {unit.name}", "ratio", "the paper's", "hidden", "compiled in"]
    rows = []
    for row in found.rows:
        ratio = row.comm_ratio_elements if elements else row.comm_ratio
        hidden, seconds = row.overlapped_fraction, row.compile_seconds
        cells = [
            _size(row.comm_bytes, unit),
            UNKNOWN if ratio is None else f"{ratio:.3f}",
            str(paper_ratio(row.stage, found.accumulate)),
            _NONE if hidden is None else f"{hidden:.1%}",
            _NONE if seconds is None else f"{seconds:.1f} s",
        ]
        rows.append([str(row.stage), *cells])
    return table(
        "Traffic of a device in an optimizer step, over ZeRO and replica axes", heads, rows
    )


def collectives(rows: Sequence[Row]) -> str:
    """Every kind of collective of every stage."""
    found = [each for row in rows for each in row.collectives or ()]
    unit = unit_for(max((each.bytes or 0 for each in found), default=0))
    heads = ["stage", "collective", "axes", "dtype", "runs", f"sent, {unit.name}", "elements"]
    lines = [
        [
            str(row.stage),
            escape(each.op),
            escape(", ".join(each.axes)),
            escape(each.dtype),
            _count(each.count),
            _size(each.bytes, unit),
            _count(each.elements),
        ]
        for row in rows
        for each in row.collectives or ()
    ]
    return table("Collectives of a device in an optimizer step, loops multiplied out", heads, lines)


def bounds(rows: Sequence[Row], played: Mapping[int, Played]) -> str:
    """The least that each stage's step takes at peak rates; `played` by stage."""
    measured = any(row.seconds_per_step is not None for row in rows)
    heads = ["stage", "matrix products", "on the links", "at least"]
    lines = []
    for row in rows:
        cells, run = [UNKNOWN] * 3, played.get(row.stage)
        if run is not None:
            times = (run.totals.computing, run.totals.sending, run.length)
            cells = [f"{duration(time, True)}{'' if run.exact else ' and more'}" for time in times]
        if measured:
            taken = row.seconds_per_step
            cells.append(_NONE if taken is None else duration(taken, True))
        lines.append([str(row.stage), *cells])
    heads += ["measured"] * measured
    return table("A step at peak rates", heads, lines)


def transfers(part: Part, run: Played, timed: bool) -> str:
    """Every transfer of a part, and what it has to hide behind."""
    heads = ["collective", "carries", "axes", "dtype", "sent", "products meanwhile"]
    heads += ["on the links", "products' time", "then waits"] * timed
    lines = []
    for flight in run.flights:
        each = part.transfers[flight.index]
        unit = unit_for(each.bytes or 0)
        when = "".join(
            note
            for true, note in (
                (each.for_next, ", for the next iteration"),
                (flight.before or flight.after, ", into the next iteration"),
            )
            if true
        )
        size = UNKNOWN if each.bytes is None else f"{_size(each.bytes, unit)} {unit.name}"
        cells = [
            escape(each.op + when),
            escape(_carried(each.leaves, each.tensors)),
            escape(", ".join(each.axes)),
            escape(each.dtype),
            size,
            f"{flight.meanwhile.products:,}",
        ]
        if timed:
            times = (flight.seconds, flight.meanwhile.computing, flight.waited)
            cells += [duration(time, True) for time in times]
        lines.append(cells)
    return table("Transfers, in the order of the schedule", heads, lines)


def _part(row: Row, key: str, known: dict[str, int], unit: Unit) -> str:
    if key in known:
        return _size(known[key], unit)
    if key in UNDIVIDED:
        return _NONE
    state = row.state_bytes is not None and key in ("parameters", "optimizer")
    return _size(0 if state or row.peak_split is not None else None, unit)


def _carried(leaves: Sequence[str], tensors: int) -> str:
    count = counted(tensors, "array")
    return f"{count}: {', '.join(leaves)}" if leaves else count


def _size(size: int | None, unit: Unit) -> str:
    if size is None:
        return UNKNOWN
    return f'<data value="{size}">{unit.decimal(size)}</data>'


def _count(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"
