"""Which stage to take: the lowest that fits, since none below it does and those above cost more."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jzero.plan.fit import USABLE, Fit
from jzero.plan.rows import Row
from jzero.plan.speed import Speed
from jzero.targets import Target
from jzero.units import percent, size


@dataclass(frozen=True)
class Advice:
    """A recommendation.

    Attributes:
      stage: the stage to take; None where none fits, or nothing is known of the memory.
      reason: why, in one or two sentences.
      verdicts: stage -> what is to be said of it: "recommended", that it does not fit, or what it
        costs more than the one to take.
    """

    stage: int | None
    reason: str
    verdicts: Mapping[int, str]


def advise(
    rows: Sequence[Row], fits: Sequence[Fit], speeds: Sequence[Speed], target: Target
) -> Advice:
    """The stage that memory demands.

    Arguments:
      rows, fits, speeds: of stages 0 to 3, in order.
      target: the devices.
    """
    if target.memory_bytes is None:
        return Advice(None, f"the memory of {target.name} is not known", {})
    best = next((fit.stage for fit in fits if fit.fits), None)
    verdicts = {}
    for fit in fits:
        if not fit.fits:
            verdicts[fit.stage] = f"does not fit: needs {percent(fit.fraction or 0)} of the memory"
        elif fit.stage == best:
            verdicts[fit.stage] = "recommended"
        else:
            assert best is not None
            verdicts[fit.stage] = _too_high(fit.stage, best, rows, fits, speeds)
    if best is None:
        last = fits[-1]
        reason = (
            f"none fits {target.name}: stage 3 needs {size(last.peak_bytes)} of "
            f"{size(target.memory_bytes)} a device"
        )
        needed = _devices(rows[-1], last, target)
        if needed is not None:
            reason += f"; stage 3 would fit on about {needed:,} of these devices"
        return Advice(None, reason, verdicts)
    chosen = fits[best]
    below = "nothing need be sharded"
    if best > 0:
        below = f"stage {best - 1} would need {percent(fits[best - 1].fraction or 0)}"
    reason = (
        f"stage {best}, the lowest that fits: it needs {size(chosen.peak_bytes)}, which is "
        f"{percent(chosen.fraction or 0)} of {size(target.memory_bytes)}; {below}"
    )
    return Advice(best, reason, verdicts)


def _too_high(
    stage: int, best: int, rows: Sequence[Row], fits: Sequence[Fit], speeds: Sequence[Speed]
) -> str:
    """What a stage above the lowest that fits costs, and what is had for it."""
    more = rows[stage].comm_elements - rows[best].comm_elements
    if more <= 0:
        freed = size(fits[best].peak_bytes - fits[stage].peak_bytes)
        return f"more than memory demands: it sends as much as stage {best} and frees {freed}"
    times = rows[stage].comm_elements / rows[best].comm_elements
    text = (
        f"a mistake: stage {best} fits, and this sends {times:.3g} times as much, {more:,} "
        f"elements more a step"
    )
    before, after = speeds[best].send_seconds, speeds[stage].send_seconds
    return text if before is None or after is None else f"{text} ({seconds(after - before)})"


def seconds(value: float) -> str:
    """A duration in ms, or in s from 1 s on.

    >>> seconds(0.0578), seconds(12.34), seconds(2e-6)
    ('57.8 ms', '12.3 s', '0.002 ms')
    """
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _devices(row: Row, fit: Fit, target: Target) -> int | None:
    """Devices on which stage 3 would fit, its state being shared out evenly."""
    assert target.memory_bytes is not None
    room = USABLE * target.memory_bytes - fit.layer_bytes - fit.activation_bytes
    if room <= 0:
        return None
    exact = row.total_bytes * target.count / room
    return -(-int(exact + 1) // 8) * 8 if exact > 8 else int(exact + 1)
