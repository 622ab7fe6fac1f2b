"""Stacked bars by stage: memory against what a device has, and what is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jzero.compare.page.pieces import Piece, of_memory, of_traffic
from jzero.compare.page.svg import Chart, area, room_for, tag, text, upright
from jzero.compare.page.words import amount
from jzero.compare.row import Row
from jzero.plan.paper import comm_elements
from jzero.units import Unit, unit_for

_TOP, _ROW, _HEADING, _BAR = 26, 58, 23, 26
_FAR = 4
"""How many times the longest bar a device's memory may be, for its line to be drawn."""

_AMOUNT = 64
"""Pixels from the left at which a bar's amount stands, after its stage."""

_SPACE = "\N{NO-BREAK SPACE}"  # SVG readers drop a common one where a tspan begins


@dataclass(frozen=True)
class _Bar:
    stage: int
    amount: str
    note: str
    more: str
    pieces: tuple[Piece, ...]

    def __str__(self) -> str:
        return f"stage {self.stage}: {self.amount}" + (f", {self.note}" if self.note else "")


def memory(rows: Sequence[Row], capacity: int | None) -> Chart:
    """Draws what each stage's peak is made of.

    Arguments:
      rows: the stages.
      capacity: bytes of a device; None for no line.
    """
    unit = unit_for(max((row.peak_bytes or 0 for row in rows), default=0))
    bars = [_memory_bar(row, unit) for row in rows]
    longest = _longest(bars)
    near = capacity if capacity is not None and capacity <= _FAR * longest else None
    most = 1.01 * max(longest, near or 0)
    height = _TOP + len(rows) * _ROW
    shapes = _stacked(bars, most, unit, _TOP)
    if capacity is not None:
        words = f"{amount(capacity)} in a device"
        shapes += _far(words) if near is None else _capacity(near / most, words, len(rows))
    return Chart("Memory of a device at its peak, by stage", _said(bars), height, "".join(shapes))


def traffic(rows: Sequence[Row], accumulate: int, elements: bool) -> Chart:
    """Draws what each stage's collectives send.

    Arguments:
      rows: the stages.
      accumulate: micro-batches of a step.
      elements: whether ratios are in elements, not bytes.
    """
    unit = unit_for(max((sum(p.bytes for p in of_traffic(row)) for row in rows), default=0))
    bars = [_traffic_bar(row, unit, accumulate, elements) for row in rows]
    shapes = _stacked(bars, 1.01 * _longest(bars), unit, 0)
    title = "What a device sends in an optimizer step, by stage"
    return Chart(title, _said(bars), len(rows) * _ROW, "".join(shapes))


def paper_ratio(stage: int, accumulate: int) -> int:
    """What the ZeRO paper says a stage sends, in units of psi (N-1)/N."""
    return comm_elements(stage, params=1, devices=2, accumulate=accumulate)


def _capacity(at: float, words: str, rows: int) -> list[str]:
    """The line of a device's memory, past each bar."""
    beside, anchor = (at - 0.008, "end") if at > 0.5 else (at + 0.008, "start")
    shapes = [upright(at, 2, 16, "capacity"), text(words, beside, 13, "capacity-text", anchor)]
    for row in range(rows):
        top = _TOP + row * _ROW + _HEADING
        shapes.append(upright(at, top - 3, top + _BAR + 3, "capacity"))
    return shapes


def _far(words: str) -> list[str]:
    return [text(f"{words}, further to the right ▸", 1, 13, "capacity-text", "end")]


def _memory_bar(row: Row, unit: Unit) -> _Bar:
    note = {None: "", True: "fits", False: "does not fit"}[row.fits]
    more = ""
    if row.is_refused:
        note = "refused for memory"
    elif row.fits and row.mem_fraction is not None:
        more = f"{_SPACE}with XLA_CLIENT_MEM_FRACTION={row.mem_fraction:.2f}"
    peak = "no figure"
    if row.peak_bytes is not None:
        peak = f"{unit.decimal(row.peak_bytes)} {unit.name}"
    return _Bar(row.stage, peak, note, more, of_memory(row))


def _traffic_bar(row: Row, unit: Unit, accumulate: int, elements: bool) -> _Bar:
    found = of_traffic(row)
    if row.collectives is None:
        return _Bar(row.stage, "no figure", "", "", ())
    total = sum(piece.bytes for piece in found)
    sent = f"{unit.decimal(total)} {unit.name}"
    if any(each.bytes is None for each in row.collectives):
        sent += " and more, unknown"
    ratio = row.comm_ratio_elements if elements else row.comm_ratio
    note = "" if ratio is None else f"ratio {ratio:.3f}"
    more = "" if ratio is None else f", the paper's: {paper_ratio(row.stage, accumulate)}"
    return _Bar(row.stage, sent, note, more, found)


def _stacked(bars: Sequence[_Bar], most: float, unit: Unit, top: int) -> list[str]:
    shapes = []
    for number, bar in enumerate(bars):
        y = top + number * _ROW
        shapes += [_heading(bar, y + 16), area(0, 1, y + _HEADING, _BAR, "track")]
        left = 0.0
        for piece in bar.pieces:
            right = left + piece.bytes / most
            title = f"Stage {bar.stage}, {piece.label}: {unit.decimal(piece.bytes)} {unit.name}"
            shapes.append(area(left, right, y + _HEADING, _BAR, piece.paint, title))
            shapes += _inside(piece, left, right, y + _HEADING + 17.5, unit)
            left = right
    return shapes


def _heading(bar: _Bar, y: int) -> str:
    note = tag("tspan", escape(f"{_SPACE}{bar.note}"), class_="muted") if bar.note else ""
    more = tag("tspan", escape(bar.more), class_="muted at560") if bar.more else ""
    return text(f"Stage {bar.stage}", 0, y, "strong") + tag(
        "text", escape(bar.amount), note, more, x=_AMOUNT, y=y
    )


def _inside(piece: Piece, left: float, right: float, y: float, unit: Unit) -> list[str]:
    """The label of a part, as long as there is room for; on a narrow screen the figure alone."""
    figure = f"{piece.bytes / unit.size:,.1f}"
    whole = f"{piece.label} {figure}"
    shapes = []
    room, room_whole = room_for(figure, right - left), room_for(whole, right - left)
    middle, ink = (left + right) / 2, f"ink-{piece.fill}"
    if room_whole is not None:
        shapes.append(text(whole, middle, y, f"{ink} {room_whole}".strip(), "middle"))
    if room is not None and room_whole != "":
        below = f"below{room_whole[2:]}" if room_whole else ""
        shapes.append(text(figure, middle, y, " ".join([ink, room, below]).strip(), "middle"))
    return shapes


def _longest(bars: Sequence[_Bar]) -> int:
    return max([1, *(sum(piece.bytes for piece in bar.pieces) for bar in bars)])


def _said(bars: Sequence[_Bar]) -> str:
    return "; ".join(map(str, bars)) + "."
