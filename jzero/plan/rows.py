"""The figures of one stage."""

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
