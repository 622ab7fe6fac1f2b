"""How fast a target computes and sends, at its makers' peak figures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jzero.plan.speed import ring_bytes_per_s
from jzero.targets import Target


@dataclass(frozen=True)
class Rates:
    """Peak figures of one device.

    Attributes:
      target: the devices.
      mesh: the axes' sizes in order; devices of the last axis stand side by side.
    """

    target: Target
    mesh: Mapping[str, int]

    @staticmethod
    def of(target: Target | None, mesh: Mapping[str, int]) -> "Rates | None":
        """None where there is no target, or one without figures."""
        if target is None or target.flops is None or target.link_bytes_per_s is None:
            return None
        return Rates(target, mesh)

    def flops(self, dtype: str) -> float:
        """Operations per second of products whose operands have this HLO dtype."""
        # As `jzero plan` counts: fp32 products run at half the rate of bf16, or less.
        return (self.target.flops or math.inf) / (2 if dtype in ("f32", "f64") else 1)

    def ring(self, axes: Sequence[str]) -> float:
        """Bytes per second that a device sends on a ring over these axes."""
        names = list(self.mesh)
        first = min((names.index(axis) for axis in axes if axis in names), default=0)
        wide = math.prod(list(self.mesh.values())[first:])  # devices from the first to the last
        return ring_bytes_per_s(replace(self.target, count=wide)) or math.inf
