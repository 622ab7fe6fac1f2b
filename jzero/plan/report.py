"""A plan as tables for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jzero.console import say
from jzero.plan.advice import seconds
from jzero.plan.deepspeed import Estimate
from jzero.plan.fit import advice
from jzero.plan.plan import OnTarget, Plan
from jzero.plan.rows import Row
from jzero.units import Unit, percent, size, unit_for


def show(plan: Plan, console: Console, stages: Sequence[int]) -> None:
    """Prints a plan.

    Arguments:
      plan: the figures.
      console: where to.
      stages: those to show.
    """
    rows = [plan.rows[stage] for stage in stages]
    unit = unit_for(max(row.total_bytes + row.host_bytes for row in rows))
    console.print(_state(plan, rows, unit))
    if plan.on is None:
        return
    console.print(_on_target(plan.on, rows))
    say(console, f"Layer and activations: {plan.on.demand.source}.")
    for line in _settings(plan.on, stages):
        say(console, line)
    advice = plan.on.advice
    found = "No stage is recommended" if advice.stage is None else "Recommended"
    console.print(Text(f"{found}: {advice.reason}.", "bold"), soft_wrap=True)
    for stage in stages:
        if stage != advice.stage and stage in advice.verdicts:
            say(console, f"Stage {stage}: {advice.verdicts[stage]}.")


def show_estimates(
    estimates: Sequence[Estimate], autotuner: Sequence[tuple[int, int]], console: Console
) -> None:
    """Prints DeepSpeed's estimates, named as such."""
    unit = unit_for(max([e.host_bytes for e in estimates] + [n for _, n in autotuner]))
    table = _table("DeepSpeed's estimators (not jzero's accounting): model states alone")
    for name in ("stage", "offloaded", "zero.Init"):
        table.add_column(name)
    for name in ("GPU", "CPU of a node"):
        for suffix in (unit.name, unit.binary_name):
            table.add_column(f"{name}, {suffix}", justify="right")
    for e in estimates:
        init = {None: "", True: "yes", False: "no"}[e.zero_init]
        sizes = (e.device_bytes, e.host_bytes)
        cells = [text for n in sizes for text in (unit.decimal(n), unit.binary(n))]
        table.add_row(str(e.stage), e.offload, init, *cells)
    table.add_section()
    for stage, n in autotuner:
        table.add_row(str(stage), "the autotuner's", "", unit.decimal(n), unit.binary(n), "", "")
    console.print(table)
    say(console, "They have none for stages 0 and 1, and count 18 bytes a parameter, not 16.")


def _state(plan: Plan, rows: Sequence[Row], unit: Unit) -> Table:
    how = "summed over the model's leaves" if plan.by_leaf else "the ZeRO paper's accounting"
    steps = "" if plan.accumulate == 1 else f", {plan.accumulate} micro-batches a step"
    table = _table(
        f"{plan.params:,} parameters on {plan.devices:,} devices, {plan.dtype}{steps}: "
        f"per device, {how}"
    )
    hosted = any(row.host_bytes for row in rows)
    table.add_column("stage", justify="right")
    for name in ("parameters", "gradients", "optimizer"):
        table.add_column(f"{name}, {unit.name}", justify="right")
    table.add_column(f"total, {unit.name}", justify="right", style="bold")
    table.add_column(f"total, {unit.binary_name}", justify="right")
    if hosted:
        table.add_column(f"host, {unit.name}", justify="right")
    table.add_column("elements sent a step", justify="right")
    for row in rows:
        parts = (row.params_bytes, row.gradients_bytes, row.optimizer_bytes, row.total_bytes)
        cells = [*map(unit.decimal, parts), unit.binary(row.total_bytes)]
        if hosted:
            cells.append(unit.decimal(row.host_bytes))
        times = row.comm_elements / plan.params
        table.add_row(str(row.stage), *cells, f"{row.comm_elements:,} = {times:.4g}ψ")
    what = (
        "with master weights and the rest of the state" if plan.by_leaf else "with master weights"
    )
    if plan.dtype == "fp32":
        what = "parameters are their own master weights"
    table.caption = f"optimizer: {what}. A ring sends (N-1)/N of the elements named."
    return table


def _on_target(on: OnTarget, rows: Sequence[Row]) -> Table:
    target = on.target
    unit = unit_for(max(fit.peak_bytes for fit in on.fits))
    has = "" if target.memory_bytes is None else f", {size(target.memory_bytes)} each"
    table = _table(f"On {target.name} ({target.description}{has}), {unit.name} per device")
    table.add_column("stage", justify="right")
    summed = any(fit.micro_gradient_bytes for fit in on.fits)
    parts = ["layer", "activations"] + ["micro-batch's gradients"] * summed
    for name in parts:
        table.add_column(name, justify="right")
    table.add_column("peak", justify="right", style="bold")
    table.add_column(f"peak, {unit.binary_name}", justify="right")
    for name in ("memory", "fits", "send", "compute", "even from tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        fit, speed = on.fits[row.stage], on.speeds[row.stage]
        tokens = speed.break_even_tokens
        extra = (fit.layer_bytes, fit.activation_bytes, fit.micro_gradient_bytes)[: len(parts)]
        table.add_row(
            str(row.stage) + (" *" if row.stage == on.advice.stage else ""),
            *map(unit.decimal, extra),
            unit.decimal(fit.peak_bytes),
            unit.binary(fit.peak_bytes),
            "" if fit.fraction is None else percent(fit.fraction),
            {None: "unknown", True: "yes", False: "no"}[fit.fits],
            "" if speed.send_seconds is None else seconds(speed.send_seconds),
            "" if speed.compute_seconds is None else seconds(speed.compute_seconds),
            "" if tokens is None else f"{tokens:,}",
        )
    table.caption = (
        "* recommended. Estimates, at the makers' peak figures. even: tokens a device and "
        "micro-batch from which computing takes as long as sending."
    )
    return table


def _settings(on: OnTarget, stages: Sequence[int]) -> list[str]:
    if on.target.kind != "gpu":
        return []
    needed = [(stage, on.fits[stage].setting) for stage in stages if on.fits[stage].fits]
    return [advice(stage, setting) for stage, setting in needed if setting is not None]


def _table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", caption_justify="left")
