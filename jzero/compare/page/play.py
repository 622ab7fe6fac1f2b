"""Playing a schedule: when each step would begin and end if nothing but peak rates counted.

Products take their FLOPs at the peak rate, transfers their bytes at the links', one transfer at a
time and in the order in which they start; everything else takes nothing. A device waits where the
schedule has a transfer's end and the transfer is not through. So the whole is the least that this
schedule can take, not what a run takes. Without rates, products take their FLOPs and transfers
nothing: the order alone is left.
"""

from dataclasses import dataclass, field, replace

from jzero.compare.page.rates import Rates
from jzero.compare.schedule.parts import Part, Schedule, Step

_ROUNDS = 3
"""Iterations of a loop that are played; the last is in its steady state."""


@dataclass(frozen=True)
class Totals:
    """What has been done up to some moment: products, their time, and time on the links."""

    products: int = 0
    computing: float = 0.0
    sending: float = 0.0

    def plus(self, other: "Totals", times: int = 1) -> "Totals":
        return Totals(
            self.products + times * other.products,
            self.computing + times * other.computing,
            self.sending + times * other.sending,
        )


@dataclass(frozen=True)
class Work:
    """A step that computes, from when to when."""

    begin: float
    end: float
    step: Step


@dataclass(frozen=True)
class Flight:
    """A transfer: from its start to its end in the schedule, and while it has the links.

    Attributes:
      index: of the part's transfer.
      begin, end: within the iteration.
      sends, sent: when it has the links; within the iteration.
      seconds: on the links.
      meanwhile: what is computed between its start and its end.
      waited: how long the device waits at its end.
      before, after: it began in the iteration before, it ends in the one after.
    """

    index: int
    begin: float
    end: float
    sends: float
    sent: float
    seconds: float = 0.0
    meanwhile: Totals = Totals()
    waited: float = 0.0
    before: bool = False
    after: bool = False


@dataclass(frozen=True)
class Played:
    """A part, played; times in seconds, or in FLOPs without rates.

    Attributes:
      length: from beginning to end.
      totals: of all that is done, loops included.
      work: steps that compute, loops as one step.
      flights: what is sent, apart from what loops send.
      waits: from when to when it waits for transfers.
      exact: whether all that was to be counted is known.
    """

    length: float
    totals: Totals
    work: tuple[Work, ...]
    flights: tuple[Flight, ...]
    waits: tuple[tuple[float, float], ...]
    exact: bool


def play(schedule: Schedule, rates: Rates | None) -> tuple[Played, ...]:
    """Plays every part of a schedule, a loop as long as all of its iterations."""
    played: dict[int, Played] = {}
    for number in reversed(range(len(schedule.parts))):  # a loop's number is above its outer's
        played[number] = _Player(schedule.parts, played, rates).part(number)
    return tuple(played[number] for number in range(len(schedule.parts)))


@dataclass
class _Round:
    """One iteration; times count from the first one's beginning."""

    begin: float
    before: Totals
    work: list[Work] = field(default_factory=list)
    waits: list[tuple[float, float]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)


class _Player:
    def __init__(self, parts: tuple[Part, ...], played: dict[int, Played], rates: Rates | None):
        self.parts = parts
        self.played = played
        self.rates = rates
        self.now = self.links_free = 0.0
        self.done = Totals()
        self.exact = True
        self.under_way: dict[int, tuple[Flight, Totals]] = {}

    def part(self, number: int) -> Played:
        part = self.parts[number]
        last = _Round(0.0, Totals())
        for _ in range(1 if number == 0 else _ROUNDS):
            last = _Round(self.now, self.done)
            for step in part.steps:
                self.step(part, step, last)
        return self.steady(part, last)

    def step(self, part: Part, step: Step, last: _Round) -> None:
        index = step.index
        if step.kind in ("start", "send"):
            self.start(part, index)
        if step.kind in ("done", "send"):
            self.end(index, last)
        if step.kind in ("product", "other", "loop"):
            begin = self.now
            self.compute(step)
            last.work.append(Work(begin, self.now, step))

    def compute(self, step: Step) -> None:
        if step.kind == "loop":
            inner, trips = self.played[step.index], self.parts[step.index].trips
            self.exact &= inner.exact and trips is not None
            times = 1 if trips is None else trips
            self.done = self.done.plus(inner.totals, times)
            self.now += inner.length * times
            self.links_free = max(self.links_free, self.now)
        elif step.kind == "product":
            self.exact &= step.flops is not None
            takes = (step.flops or 0) / (self.rates.flops(step.dtype) if self.rates else 1)
            self.done = self.done.plus(Totals(products=1, computing=takes))
            self.now += takes

    def start(self, part: Part, index: int) -> None:
        transfer = part.transfers[index]
        self.exact &= transfer.bytes is not None
        takes = (transfer.bytes or 0) / self.rates.ring(transfer.axes) if self.rates else 0.0
        sends = max(self.now, self.links_free)
        self.links_free = sends + takes
        self.done = self.done.plus(Totals(sending=takes))
        flight = Flight(index, self.now, self.now, sends, self.links_free, takes)
        self.under_way[index] = flight, self.done

    def end(self, index: int, last: _Round) -> None:
        # Before the first iteration, and before the steps that are kept, there is none to end.
        nothing = Flight(index, last.begin, self.now, self.now, self.now), last.before
        flight, at_start = self.under_way.pop(index, nothing)
        waited = max(0.0, flight.sent - self.now)
        if waited:
            last.waits.append((self.now, flight.sent))
            self.now = flight.sent
        meanwhile = self.done.plus(at_start, -1)
        last.flights.append(replace(flight, end=self.now, meanwhile=meanwhile, waited=waited))

    def steady(self, part: Part, last: _Round) -> Played:
        """The last iteration by itself, its beginning at 0."""
        length = self.now - last.begin
        flights = last.flights + [
            replace(flight, end=self.now, after=True) for flight, _ in self.under_way.values()
        ]
        return Played(
            length,
            self.done.plus(last.before, -1),
            tuple(Work(w.begin - last.begin, w.end - last.begin, w.step) for w in last.work),
            tuple(_within(flight, last.begin, length) for flight in flights),
            tuple((begin - last.begin, end - last.begin) for begin, end in last.waits),
            self.exact and part.left_out == (0, 0),
        )


def _within(flight: Flight, origin: float, length: float) -> Flight:
    def at(time: float) -> float:
        return min(max(time - origin, 0.0), length)

    return replace(
        flight,
        begin=at(flight.begin),
        end=at(flight.end),
        sends=at(flight.sends),
        sent=at(flight.sent),
        before=flight.begin < origin,
    )
