"""A plan: every stage's figures, and on a target what fits, what hides and what to take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jzero.plan.advice import Advice, advise
from jzero.plan.demand import Demand, of_count, of_job
from jzero.plan.fit import Fit, fit
from jzero.plan.leaves import Job, by_leaf
from jzero.plan.paper import closed_form
from jzero.plan.rows import DTYPE_BYTES, Row
from jzero.plan.speed import Speed, speed
from jzero.targets import Target

_NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}

TOKENS = 1024
"""Tokens per device and micro-batch, where only a number of parameters is known."""


@dataclass(frozen=True)
class OnTarget:
    """A plan on a target; figures of stages 0 to 3, in order."""

    target: Target
    demand: Demand
    fits: tuple[Fit, ...]
    speeds: tuple[Speed, ...]
    advice: Advice


@dataclass(frozen=True)
class Plan:
    """What each stage keeps and sends.

    Attributes:
      params: parameters.
      devices: on which the state is shared out.
      dtype: of parameters and gradients: "bf16", "fp16" or "fp32".
      grad_accum_dtype: of the sum of gradients over several micro-batches.
      accumulate: micro-batches in a step.
      rows: of stages 0 to 3, in order.
      by_leaf: whether the rows are sums over a model's leaves, or of a count alone.
      on: on a target, if one was given.
    """

    params: int
    devices: int
    dtype: str
    grad_accum_dtype: str
    accumulate: int
    rows: tuple[Row, ...]
    by_leaf: bool
    on: OnTarget | None = None

    def as_dict(self, stages: Sequence[int] = (0, 1, 2, 3)) -> dict[str, Any]:
        """The same as data for JSON, of some stages."""
        data: dict[str, Any] = {
            "params": self.params,
            "devices": self.devices,
            "dtype": self.dtype,
            "grad_accum_dtype": self.grad_accum_dtype,
            "accumulate": self.accumulate,
            "rows": [self.rows[stage].as_dict() for stage in stages],
        }
        if self.on is None:
            return data
        on = self.on
        for row in data["rows"]:
            stage = row["stage"]
            row |= on.fits[stage].as_dict() | on.speeds[stage].as_dict()
            row["verdict"] = on.advice.verdicts.get(stage)
        return data | {
            "target": on.target.name,
            "tokens": on.demand.tokens,
            "operations": on.demand.operations * self.accumulate,
            "activations": on.demand.source,
            "recommended_stage": on.advice.stage,
            "reason": on.advice.reason,
        }


def of_params(
    params: int,
    devices: int,
    dtype: str = "bf16",
    grad_accum_dtype: str = "fp32",
    optimizer_bytes: int = 8,
    accumulate: int = 1,
    offload: Sequence[str] = (),
    target: Target | None = None,
    tokens: int = TOKENS,
) -> Plan:
    """A plan of a number of parameters, by the ZeRO paper's accounting.

    Arguments:
      params, devices, dtype, grad_accum_dtype, optimizer_bytes, accumulate, offload: as
        `closed_form` takes them.
      target: devices to put it on.
      tokens: per device and micro-batch.

    Raises:
      JzeroError: an unknown dtype or thing to offload.
    """
    rows = closed_form(
        params, devices, dtype, grad_accum_dtype, optimizer_bytes, accumulate, offload
    )
    plan = Plan(params, devices, dtype, grad_accum_dtype, accumulate, tuple(rows), by_leaf=False)
    if target is None:
        return plan
    return _on(plan, target, of_count(params, tokens, DTYPE_BYTES[dtype]), devices)


def of_model(job: Job, target: Target | None = None) -> Plan:
    """A plan of a model, from the specs of its leaves.

    Arguments:
      job: from `jzero.plan.lay_out`.
      target: devices to put it on.

    Raises:
      JzeroError: the model's loss cannot be traced.
    """
    mesh = job.setup.mesh
    config, rows = job.setup.config, tuple(by_leaf(job))
    dtype, accum = _NAMES[config.compute_dtype], _NAMES[config.accumulation_dtype]
    plan = Plan(job.params, mesh.data_size, dtype, accum, job.accumulate, rows, by_leaf=True)
    return plan if target is None else _on(plan, target, of_job(job), mesh.group_size)


def _on(plan: Plan, target: Target, demand: Demand, group: int) -> Plan:
    width = DTYPE_BYTES[plan.dtype]
    accum = None if plan.accumulate == 1 else DTYPE_BYTES[plan.grad_accum_dtype]
    fits = tuple(fit(row, demand, width, accum, target) for row in plan.rows)
    speeds = tuple(speed(row, demand, plan.accumulate, group, width, target) for row in plan.rows)
    advice = advise(plan.rows, fits, speeds, target)
    return replace(plan, on=OnTarget(target, demand, fits, speeds, advice))
