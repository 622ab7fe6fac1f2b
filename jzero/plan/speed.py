"""Time to send against time to compute: from how many tokens on a stage's traffic can hide."""

import math
from dataclasses import dataclass
from typing import Any

from jzero.plan.demand import Demand
from jzero.plan.rows import Row
from jzero.targets import NODE, Target


@dataclass(frozen=True)
class Speed:
    """One stage on a target, at the makers' peak figures.

    Attributes:
      stage: 0 to 3.
      send_seconds: of a step's traffic, alone; None where the target has no figures.
      compute_seconds: of a step's operations, alone; None likewise.
      break_even_tokens: tokens per device and micro-batch from which computing takes at least as
        long as sending; None where there are no figures or no tokens.
    """

    stage: int
    send_seconds: float | None
    compute_seconds: float | None
    break_even_tokens: int | None

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON, without the stage."""
        return {name: value for name, value in vars(self).items() if name != "stage"}


def speed(
    row: Row, demand: Demand, accumulate: int, devices: int, element_bytes: int, target: Target
) -> Speed:
    """How long a stage's step sends and computes.

    Arguments:
      row: the stage.
      demand: one micro-batch's operations and tokens.
      accumulate: micro-batches in a step.
      devices: of the ZeRO group.
      element_bytes: of what is sent.
      target: the devices.
    """
    bandwidth = ring_bytes_per_s(target)
    if bandwidth is None or target.flops is None:
        return Speed(row.stage, None, None, None)
    # fp32 matrix products run at half the rate of bf16 or less; this is the kindest figure.
    rate = target.flops * 2 / max(element_bytes, 2)
    send = row.comm_elements * element_bytes * (devices - 1) / devices / bandwidth
    compute = accumulate * demand.operations / rate
    tokens = None
    if demand.tokens is not None and compute > 0:
        tokens = math.ceil(demand.tokens * send / compute)
    return Speed(row.stage, send, compute, tokens)


def ring_bytes_per_s(target: Target) -> float | None:
    """Bytes per second that each device sends in a ring over all of a target's devices.

    Over several nodes there are as many rings as a node has network cards, so that each card
    carries 1/8 of what an NVLink does: the slower of NVLink and 8 cards decides.

    >>> from jzero import targets
    >>> [ring_bytes_per_s(targets.parse(name)) / 1e9 for name in ("h100:8", "h100:16")]
    [450.0, 400.0]
    """
    if target.link_bytes_per_s is None:
        return None
    if target.count <= NODE or target.network_bytes_per_s is None:
        return target.link_bytes_per_s
    return min(target.link_bytes_per_s, NODE * target.network_bytes_per_s)
