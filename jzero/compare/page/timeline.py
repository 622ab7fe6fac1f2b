"""A schedule as a drawing: what is computed, and below it each transfer while it is under way."""

import math

from jzero.compare.page import lanes
from jzero.compare.page.play import Played, Work
from jzero.compare.page.svg import Chart, area, room_for, text, upright
from jzero.compare.page.words import counted, duration, iterations
from jzero.compare.schedule.parts import Schedule

_TOP, _BAR, _BELOW = 18, 24, 12
_AXIS = 24
_MARKS = 500
"""Marks that the whole width has room for."""


def timeline(schedule: Schedule, played: tuple[Played, ...], number: int, timed: bool) -> Chart:
    """Draws one part.

    Arguments:
      schedule: of a compiled step.
      played: its parts, played.
      number: the part to draw.
      timed: whether lengths are seconds, not FLOPs.
    """
    part, run = schedule.parts[number], played[number]
    found = lanes.lanes(schedule, played, number, timed)
    shapes = _work(schedule, played, run, timed)
    top = _TOP + _BAR + _BELOW
    for lane in found:
        shapes += lanes.draw(lane, top)
        top += lanes.HEIGHT
    shapes += _axis(run.length, top, timed)
    products = counted(run.totals.products, "matrix product")
    said = "; ".join([products, *(each.title for lane in found for each in lane)])
    return Chart(f"Schedule of {iterations(part)}", f"{said}.", top + _AXIS, "".join(shapes))


def _work(schedule: Schedule, played: tuple[Played, ...], run: Played, timed: bool) -> list[str]:
    whole = run.length or 1.0
    shapes = [area(0, 1, _TOP, _BAR, "track")]
    marks = sorted({round(_MARKS * w.begin / whole) for w in run.work if w.step.kind == "other"})
    for mark in marks:
        shapes.append(upright(mark / _MARKS, _TOP + _BAR + 1, _TOP + _BAR + 6, "tick"))
    for work in run.work:
        if work.step.kind == "loop":
            shapes += _loop(schedule, played, work, whole, timed)
        elif work.step.kind == "product":
            step, takes = work.step, duration(work.end - work.begin, timed)
            name = step.name or counted(step.count, "operation")
            title = f"{step.phase} product {name}: {takes}".strip()
            fill = f"{step.phase or 'forward'} gap"
            shapes.append(area(work.begin / whole, work.end / whole, _TOP, _BAR, fill, title))
    for begin, end in run.waits:
        title = f"waits for a transfer: {duration(end - begin, timed)}"
        shapes += _waits(begin / whole, end / whole, title)
    if not any(work.step.kind == "loop" for work in run.work):
        shapes.append(text("computes", 0, 12, "muted small"))
    return shapes


def _loop(
    schedule: Schedule, played: tuple[Played, ...], work: Work, whole: float, timed: bool
) -> list[str]:
    """A loop, as high as the share of it for which it computes."""
    part, run = schedule.parts[work.step.index], played[work.step.index]
    begin, end = work.begin / whole, work.end / whole
    trips = "?" if part.trips is None else f"{part.trips:,}"
    name = f"{part.phase or 'loop'} × {trips}"
    title = f"{name}: {duration(work.end - work.begin, timed)}"
    if run.totals.products == 0:
        return _waits(begin, end, f"{title}, which only send")
    share = run.totals.computing / run.length if run.length else 1.0
    high = round(_BAR * share, 1)
    fill = part.phase if part.phase in ("forward", "backward") else "mixed"
    title += f", of which it computes {share:.0%}"
    shapes = [
        *_waits(begin, end, title),
        area(begin, end, _TOP + _BAR - high, high, f"{fill} gap", title),
    ]
    room = room_for(name, end - begin, 12)
    if room is not None:
        shapes.append(text(name, begin, 12, f"small {room}".strip()))
    return shapes


def _waits(begin: float, end: float, title: str) -> list[str]:
    if end <= begin:
        return []
    shapes = [area(begin, end, _TOP + 1, _BAR - 2, "wait", title, pointer_events="all")]
    room = room_for("waits", end - begin, 12)
    if room is not None and title.startswith("waits"):
        words = f"small {room}".strip()
        shapes.append(text("waits", (begin + end) / 2, _TOP + 16, words, "middle"))
    return shapes


def _axis(length: float, y: int, timed: bool) -> list[str]:
    shapes = [upright(0, y, y + 5, "axis"), upright(1, y, y + 5, "axis")]
    step = _round_step(length)
    for number in range(1, int(length / step) + 1 if step else 0):
        at = number * step / length
        shapes.append(upright(at, y, y + 5, "axis"))
        if at < 0.88:
            words = duration(number * step, timed)
            shapes.append(text(words, at, y + 18, "muted small at560", "middle"))
    shapes.append(text("0", 0, y + 18, "muted small"))
    shapes.append(text(duration(length, timed), 1, y + 18, "muted small", "end"))
    return shapes


def _round_step(length: float) -> float:
    """1, 2 or 5 times a power of ten: between a third and an eighth of a length."""
    if length <= 0:
        return 0.0
    power = 10 ** math.floor(math.log10(length / 3))
    return max(n * power for n in (1, 2, 5) if n == 1 or n * power <= length / 3)
