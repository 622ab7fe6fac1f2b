"""The figures of one stage, and how bytes are written."""

from dataclasses import dataclass
from typing import Any

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element, by the names that `--dtype` takes."""


@dataclass(frozen=True)
class Row:
    """What one device keeps at one stage, and what it sends in one optimizer step.

    Attributes:
      stage: 0 to 3.
      params_bytes: of the parameters in the compute dtype, as they are between steps.
      gradients_bytes: of the gradients, as they are accumulated.
      optimizer_bytes: of the optimizer's state with the fp32 master weights.
      comm_elements: elements that a device sends in a step, without the factor (N-1)/N of a ring.
      host_bytes: of what is kept in the host's memory instead; not part of the figures above.
    """

    stage: int
    params_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    comm_elements: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.params_bytes + self.gradients_bytes + self.optimizer_bytes

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return {
            "stage": self.stage,
            "params_bytes": self.params_bytes,
            "gradients_bytes": self.gradients_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "total_bytes": self.total_bytes,
            "comm_elements": self.comm_elements,
            "host_bytes": self.host_bytes,
        }


@dataclass(frozen=True)
class Unit:
    """A decimal unit of bytes and its binary neighbour."""

    name: str
    size: int
    binary_name: str
    binary_size: int

    def decimal(self, count: float) -> str:
        return f"{count / self.size:,.2f}"

    def binary(self, count: float) -> str:
        return f"{count / self.binary_size:,.2f}"

    def both(self, count: float) -> str:
        return f"{self.decimal(count)} {self.name} ({self.binary(count)} {self.binary_name})"


_UNITS = (
    Unit("GB", 10**9, "GiB", 2**30),
    Unit("MB", 10**6, "MiB", 2**20),
    Unit("kB", 10**3, "KiB", 2**10),
)


def size(count: int) -> str:
    """Bytes in the unit that suits them, decimal and binary.

    >>> size(26 * 10**9)
    '26.00 GB (24.21 GiB)'
    """
    return unit_for(count).both(count)


def percent(share: float) -> str:
    """A share in whole percent, or less than one.

    >>> percent(0.6), percent(0.0001)
    ('60%', 'under 1%')
    """
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def unit_for(count: int) -> Unit:
    """The unit in which the largest of some figures is at least 1."""
    return next((unit for unit in _UNITS if count >= unit.size), _UNITS[-1])
