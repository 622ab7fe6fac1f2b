"""Whether a stage fits a device, and which share of its memory JAX must be given for it."""

import math
from dataclasses import dataclass
from typing import Any

from jzero.plan.demand import Demand
from jzero.plan.rows import Row
from jzero.targets import Target

USABLE = 0.95
"""Of a device's memory, what a run can have: the rest is the driver's and the allocator's."""

JAX_FRACTION = 0.75
"""Of a GPU's memory, what JAX takes unless XLA_CLIENT_MEM_FRACTION says otherwise."""

# Whole layers beside the state: at stage 2 a layer's gradient, before it is reduce-scattered; at
# stage 3 its gathered weights too.
_WHOLE_LAYERS = {0: 0, 1: 0, 2: 1, 3: 2}


@dataclass(frozen=True)
class Fit:
    """One stage on one device of a target; all bytes.

    Attributes:
      stage: 0 to 3.
      layer_bytes: the largest layer, whole: its gathered weights and its gradient.
      activation_bytes: activations at their most.
      micro_gradient_bytes: with several micro-batches, one's gradients beside their sum; else 0.
      peak_bytes: these and the state and gradients.
      capacity_bytes: the device's memory; None on CPU.
      fraction: peak over capacity; None on CPU.
      fits: whether the peak is at most 0.95 of capacity; None on CPU.
    """

    stage: int
    layer_bytes: int
    activation_bytes: int
    micro_gradient_bytes: int
    peak_bytes: int
    capacity_bytes: int | None
    fraction: float | None
    fits: bool | None

    @property
    def setting(self) -> float | None:
        """See `memory_setting`."""
        return memory_setting(self.fraction)

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON, without the stage."""
        return {name: value for name, value in vars(self).items() if name != "stage"}


def memory_setting(share: float | None) -> float | None:
    """What to set XLA_CLIENT_MEM_FRACTION to, for a share of a GPU's memory.

    None where JAX's own share suffices, or nothing is known.
    """
    if share is None or share <= JAX_FRACTION:
        return None
    return math.ceil(share * 100) / 100


def advice(stage: int, setting: float) -> str:
    """What to do where a stage fits and JAX's own share of the memory does not suffice."""
    return (
        f"Stage {stage} needs more than the 75 % of the memory that JAX takes unless told: set "
        f"XLA_CLIENT_MEM_FRACTION={setting:.2f}."
    )


def fits(share: float | None) -> bool | None:
    """Whether so much of a device's memory can be used; None where it is not known."""
    return None if share is None else share <= USABLE


def fit(
    row: Row, demand: Demand, element_bytes: int, accumulator_bytes: int | None, target: Target
) -> Fit:
    """What a stage needs at its peak, against a target's memory.

    Arguments:
      row: the stage's state and gradients.
      demand: what a step needs beside them.
      element_bytes: of the compute dtype.
      accumulator_bytes: of the dtype in which micro-batches are summed; None with one.
      target: the devices.
    """
    layer = _WHOLE_LAYERS[row.stage] * demand.layer_elements * element_bytes
    gradients = 0
    if accumulator_bytes is not None:
        gradients = row.gradients_bytes * element_bytes // accumulator_bytes
    peak = row.total_bytes + layer + demand.activation_bytes + gradients
    capacity = target.memory_bytes
    fraction = None if capacity is None else peak / capacity
    return Fit(
        stage=row.stage,
        layer_bytes=layer,
        activation_bytes=demand.activation_bytes,
        micro_gradient_bytes=gradients,
        peak_bytes=peak,
        capacity_bytes=capacity,
        fraction=fraction,
        fits=fits(fraction),
    )
