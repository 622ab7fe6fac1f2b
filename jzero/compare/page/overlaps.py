"""The section of the page that shows which transfers have what computation beside them."""

from jzero.compare.page import lanes, tables
from jzero.compare.page.markup import details, figure, legend, paragraph, section
from jzero.compare.page.pieces import keys, of_traffic
from jzero.compare.page.play import Played, play
from jzero.compare.page.rates import Rates
from jzero.compare.page.timeline import timeline
from jzero.compare.page.words import duration, iterations
from jzero.compare.row import Result
from jzero.compare.schedule.parts import Part, Schedule

_TITLE = "What overlaps with what"
_READING = (
    "The upper lane is what a device computes; dashed is where it waits for a transfer. Below lie "
    "the transfers, each from its start to its end in the schedule, solid for as long as it needs "
    "the links. Of a loop in a whole step, the height of what is solid is the share of the time. A "
    "transfer that counts as hidden can be waited for all the same, where the products meanwhile "
    f"are shorter. Transfers under {lanes.SMALL:.1%} of the bytes are in the tables alone."
)
_ORDER = (
    "The order of the compiler's schedule. Widths are the matrix products' operations: this target "
    "has no peak figures to make times of them. The ticks are all other operations. Below lie the "
    "transfers, each from its start to its end in the schedule, and all of a loop along the loop; "
    "one that nothing is computed beside is a mark. "
    f"Transfers under {lanes.SMALL:.1%} of the bytes are in the tables alone."
)


def overlaps(found: Result, rates: Rates | None) -> str:
    """The timelines of all stages.

    Arguments:
      found: the figures.
      rates: what to make times of; None where only the order is to be shown.
    """
    played = {row.stage: play(row.schedule, rates) for row in found.rows if row.schedule}
    if not played:
        return section(_TITLE, "No stage has a schedule to show.")
    drawn = [
        _stage(row.stage, row.schedule, played[row.stage], rates is not None)
        for row in found.rows
        if row.schedule
    ]
    used = legend(["forward", "recomputed", "backward", *keys(map(of_traffic, found.rows))])
    if rates is None:
        return section(_TITLE, _ORDER, used, *drawn)
    whole = {stage: runs[0] for stage, runs in played.items()}
    bounds = tables.bounds(found.rows, whole)
    return section(_TITLE, _bound(rates), paragraph(_READING), used, bounds, *drawn)


def _bound(rates: Rates) -> str:
    return (
        f"Not measured. The order is that of the compiler's schedule; the lengths are what the "
        f"makers' peak figures make of it: matrix products at {rates.flops('bf16') / 1e12:,.0f} "
        f"TFLOP/s (fp32 at half), transfers at {rates.ring(()) / 1e9:,.0f} GB/s over all devices, "
        f"one at a time, and nothing for all else, which the ticks stand for. So each length is "
        f"the least that the schedule can take; a run takes longer."
    )


def _stage(stage: int, schedule: Schedule, played: tuple[Played, ...], timed: bool) -> str:
    shown, silent = [f"<h3>Stage {stage}</h3>"], []
    for number, (part, run) in enumerate(zip(schedule.parts, played, strict=True)):
        if number and not run.totals.products:
            continue  # it shows in the whole step, and there is nothing in it to overlap with
        if number and not part.transfers and all(step.kind != "loop" for step in part.steps):
            silent.append(f"the {part.phase} loop" if part.phase else "a loop")
            continue
        chart = timeline(schedule, played, number, timed)
        shown.append(figure(chart, f"stage-{stage}-part-{number}", _caption(part, run, timed)))
        if part.transfers:
            listed = f'<div class="words">{tables.transfers(part, run, timed)}</div>'
            shown.append(details(f"The transfers of {iterations(part)}", listed))
    if silent:
        shown.append(paragraph(f"Nothing is sent in {' and '.join(silent)}.", "muted"))
    return "".join(shown)


def _caption(part: Part, run: Played, timed: bool) -> str:
    name = iterations(part)
    said = f"{name[0].upper()}{name[1:]}: "
    more = "" if run.exact else " and more"
    if timed:
        waits = run.length - run.totals.computing
        waiting = f"of which {duration(waits, True)} waiting" if waits > 0 else "none waiting"
        said += f"at least {duration(run.length, True)}{more}, {waiting}."
    else:
        said += f"{duration(run.length, False)}{more} of matrix products."
    if part.left_out != (0, 0):
        before, after = part.left_out
        last = before + len(part.steps)
        said += f" Shown are steps {before + 1:,} to {last:,} of {last + after:,}."
    return said
