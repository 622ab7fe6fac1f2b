"""Figures and results in words."""

from jzero.compare.row import Result, Row
from jzero.compare.schedule.parts import Part
from jzero.units import unit_for

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_FLOPS = ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


def amount(size: int | None) -> str:
    """Bytes, short.

    >>> amount(555107840), amount(None)
    ('555.1 MB', 'unknown bytes')
    """
    if size is None:
        return "unknown bytes"
    unit = unit_for(size)
    return f"{size / unit.size:,.1f} {unit.name}" if size >= 1000 else f"{size} B"


def duration(length: float, timed: bool) -> str:
    """A length of a played schedule: seconds, or FLOPs where there are no rates.

    >>> duration(0.00123, True), duration(2.5e9, False)
    ('1.23 ms', '2.5 GFLOP')
    """
    if not length:
        return "0"
    units = _SECONDS if timed else _FLOPS
    size, name = next((unit for unit in units if length >= unit[0]), units[-1])
    return f"{length / size:,.3g} {name}"


def counted(number: int, what: str) -> str:
    """A number of things.

    >>> counted(1, "product"), counted(1200, "product")
    ('1 product', '1,200 products')
    """
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def iterations(part: Part) -> str:
    """What a part is."""
    if part.phase == "step":
        return "the whole step"
    times = "an unknown number of" if part.trips is None else f"{part.trips:,}"
    kind = f"{part.phase} loop" if part.phase else "loop"
    return f"one of {times} iterations of the {kind}"


def headline(found: Result) -> str:
    """The result in one sentence, or two."""
    rows = sorted(found.rows, key=lambda row: row.stage)
    known = [row for row in rows if row.peak_bytes is not None and not row.is_refused]
    if not known:
        return "The compiler refuses every stage for memory."
    unit = unit_for(max(found.memory_bytes or 0, *(row.peak_bytes or 0 for row in known)))

    def peak(row: Row) -> str:
        return f"{(row.peak_bytes or 0) / unit.size:,.1f}"

    if found.memory_bytes is None:
        each = ", ".join(f"{peak(row)} at stage {row.stage}" for row in known)
        return f"Peak memory of a device, in {unit.name}: {each}."
    of = f"of {found.memory_bytes / unit.size:,.1f} {unit.name}"
    fitting = [row for row in known if row.fits]
    if not fitting:
        least = min(known, key=lambda row: row.peak_bytes or 0)
        return f"No stage fits: stage {least.stage} needs {peak(least)} {of}."
    first, last = fitting[0], known[-1]
    if len(rows) == 1:
        said = f"Stage {first.stage} fits: {peak(first)} {of}"
    elif len(fitting) == len(rows):
        said = f"Every stage fits: {peak(first)} {of} at stage {first.stage}"
        said += f", {peak(last)} at stage {last.stage}"
    else:
        said = f"Stage {first.stage} is the first that fits: {peak(first)} {of}"
    if first.mem_fraction is None:
        return f"{said}."
    said += f", if JAX may take {first.mem_fraction:.0%} of the memory."
    unaided = next((row for row in fitting if row.mem_fraction is None), None)
    if unaided is None:
        return said
    return f"{said} Stage {unaided.stage} fits without: {peak(unaided)}."
