"""What is sent, in lanes: transfers that are under way at once lie in different ones."""

from dataclasses import dataclass
from typing import TypeVar

from jzero.compare.page.pieces import OPS
from jzero.compare.page.play import Flight, Played, Work
from jzero.compare.page.svg import area, room_for, text, upright
from jzero.compare.page.words import amount, counted, duration
from jzero.compare.schedule.parts import Schedule, Transfer
from jzero.hlo.known import added_up

HEIGHT = 36
"""Pixels of a lane."""

SMALL = 1e-3
"""A share of a part's bytes below which a transfer is not drawn."""

_Key = TypeVar("_Key")

_LABEL, _BAR = 15, 13
_NARROW = 0.004


@dataclass(frozen=True)
class Sent:
    """Something in a lane; places are shares of the width.

    Attributes:
      begin, end: from its start to its end in the schedule.
      sends, sent: when it has the links.
      share: how much of them it has in that time.
      fill: the name of its colour.
      labels: what to write above it, the longest first.
      title: all that there is to say.
      before, after: it goes on to the left, to the right.
    """

    begin: float
    end: float
    sends: float
    sent: float
    share: float
    fill: str
    labels: tuple[str, ...]
    title: str
    before: bool = False
    after: bool = False


def lanes(
    schedule: Schedule, played: tuple[Played, ...], number: int, timed: bool
) -> list[list[Sent]]:
    """What a part sends, its loops' transfers together, in as few lanes as there are at once."""
    run = played[number]
    whole = run.length or 1.0
    transfers = schedule.parts[number].transfers
    moments: dict[tuple[float, str], _Total] = {}
    sent: list[tuple[int | None, Sent]] = []
    for flight in run.flights:
        each = transfers[flight.index]
        if flight.end > flight.begin:
            sent.append((each.bytes, _of_flight(each, flight, whole, timed)))
        else:
            _add(moments, (flight.begin / whole, each.op), _Total(1, each.bytes))
    for work in run.work:
        if work.step.kind == "loop":
            for op, total in _totals(schedule, played, work.step.index).items():
                if work.end > work.begin:
                    sent.append((total.bytes, _of_loop(op, total, work, whole)))
                else:
                    _add(moments, (work.begin / whole, op), total)
    sent += [(total.bytes, _of_moment(at, op, total)) for (at, op), total in moments.items()]
    most = sum(size or 0 for size, _ in sent)
    drawn = [each for size, each in sent if size is None or size >= SMALL * most]
    found: list[list[Sent]] = []
    for each in sorted(drawn, key=lambda each: (each.begin, each.end)):
        free = (lane for lane in found if _right(lane[-1]) <= each.begin + 1e-9)
        lane = next(free, None)
        if lane is None:
            lane = []
            found.append(lane)
        lane.append(each)
    return found


def draw(lane: list[Sent], top: int) -> list[str]:
    """A lane, its upper edge at `top`."""
    shapes = []
    for place, sent in enumerate(lane):
        y = top + _LABEL
        shapes += _shape(sent, y)
        if sent.before:
            shapes.append(text("◂", sent.begin, y + 11, "small", "end"))
        if sent.after:
            shapes.append(text("▸", sent.end, y + 11, "small"))
        shapes += _label(lane, place, top + 11)
    return shapes


def _shape(sent: Sent, y: int) -> list[str]:
    if sent.end == sent.begin:
        mark = f"mark edge-{sent.fill}"
        return [upright(sent.begin, y, y + _BAR, mark, sent.title)]
    shapes = []
    high = round(_BAR * min(sent.share, 1.0), 1)
    if high < _BAR or (sent.sends, sent.sent) != (sent.begin, sent.end):
        window = f"{sent.fill} window edge-{sent.fill}"
        shapes.append(area(sent.begin, sent.end, y, _BAR, window, sent.title))
    solid = (sent.sends, sent.sent, y + _BAR - high, high, sent.fill)
    return [*shapes, area(*solid, sent.title), upright(sent.end, y, y + _BAR, "gap")]


def _of_flight(transfer: Transfer, flight: Flight, whole: float, timed: bool) -> Sent:
    size = amount(transfer.bytes)
    short = f"{transfer.op} {size}"
    long = f"{short}, for the next iteration" if transfer.for_next else short
    alone = f", {duration(flight.seconds, timed)} on the links" if timed else ""
    return Sent(
        flight.begin / whole,
        flight.end / whole,
        flight.sends / whole,
        flight.sent / whole,
        1.0,
        _fill(transfer.op),
        (long, short, size),
        f"{long}{alone}; {counted(flight.meanwhile.products, 'product')} meanwhile",
        before=flight.before,
        after=flight.after,
    )


def _of_loop(op: str, total: "_Total", work: Work, whole: float) -> Sent:
    """What a loop sends of a kind, all along it."""
    begin, end, size = work.begin / whole, work.end / whole, amount(total.bytes)
    long, share = f"{counted(total.count, op)}, {size}", total.seconds / (work.end - work.begin)
    title = f"{long}: on the links for {share:.0%} of the loop"
    return Sent(begin, end, begin, end, share, _fill(op), (long, size), title)


def _of_moment(at: float, op: str, total: "_Total") -> Sent:
    """All of a kind that is sent where nothing is computed, and no time is known."""
    size = amount(total.bytes)
    long = f"{counted(total.count, op)}, {size}"
    return Sent(at, at, at, at, 1.0, _fill(op), (long, size), long)


@dataclass(frozen=True)
class _Total:
    count: int = 0
    bytes: int | None = 0
    seconds: float = 0.0

    def plus(self, other: "_Total") -> "_Total":
        size = added_up((self.bytes, other.bytes))
        return _Total(self.count + other.count, size, self.seconds + other.seconds)

    def times(self, n: int) -> "_Total":
        return _Total(n * self.count, self.bytes and n * self.bytes, n * self.seconds)


def _totals(schedule: Schedule, played: tuple[Played, ...], number: int) -> dict[str, _Total]:
    """Opcode -> what all iterations of a loop send, the loops inside included."""
    part = schedule.parts[number]
    seconds = {flight.index: flight.seconds for flight in played[number].flights}
    each = [(t.op, _Total(1, t.bytes, seconds.get(i, 0.0))) for i, t in enumerate(part.transfers)]
    for step in part.steps:
        if step.kind == "loop":
            each += _totals(schedule, played, step.index).items()
    found: dict[str, _Total] = {}
    for op, total in each:
        _add(found, op, total)
    trips = 1 if part.trips is None else part.trips
    return {op: total.times(trips) for op, total in found.items()}


def _add(totals: dict[_Key, _Total], key: _Key, more: _Total) -> None:
    totals[key] = totals.get(key, _Total()).plus(more)


def _label(lane: list[Sent], place: int, y: float) -> list[str]:
    """The longest of the labels that there is room for, from narrow screens to wide ones."""
    sent = lane[place]
    right = lane[place + 1].begin if place + 1 < len(lane) else 1.0
    left = _right(lane[place - 1]) if place else 0.0
    at, room, anchor = sent.begin, right - sent.begin, "start"
    if room < 0.3 and place + 1 == len(lane):
        at, room, anchor = 1.0, 1.0 - left, "end"
    shapes: list[str] = []
    wider: str | None = None  # the class of the label that a wider screen shows
    for words in dict.fromkeys(sent.labels):
        class_ = room_for(words, room, 12)
        if class_ is None or class_ == wider:
            continue
        below = f"below{wider[2:]}" if wider else ""
        shapes.append(text(words, at, y, " ".join(["small", class_, below]).strip(), anchor))
        wider = class_
        if not class_:
            break
    return shapes


def _right(sent: Sent) -> float:
    return max(sent.end, sent.begin + _NARROW)


def _fill(op: str) -> str:
    return op if op in OPS else "other-collective"
