"""DeepSpeed's own memory estimators, for comparison with what its users have seen.

They count 18 bytes a parameter where the paper counts 16: fp16 parameters and gradients, and fp32
gradients, master weights and two moments (2 + 4 + 4 + 8 without the parameters). There is none for
stages 0 and 1; the autotuner has a formula for every stage.

Follows `estimate_zero2_model_states_mem_needs` (deepspeed/runtime/zero/stage_1_and_2.py),
`estimate_zero3_model_states_mem_needs` (stage3.py) and `get_instantiation_memory_required_per_gpu`
(autotuning/autotuner.py).
"""

from dataclasses import dataclass
from typing import Any

BUFFERS = 1.5
"""`additional_buffer_factor`."""


@dataclass(frozen=True)
class Estimate:
    """One line of an estimator.

    Attributes:
      stage: 2 or 3.
      offload: "none", "optimizer" or "optimizer,params".
      zero_init: whether the model is made under `zero.Init`; None at stage 2.
      host_bytes: of CPU memory per node.
      device_bytes: of GPU memory per GPU.
    """

    stage: int
    offload: str
    zero_init: bool | None
    host_bytes: int
    device_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return dict(vars(self))


def stage2(params: int, gpus_per_node: int = 1, nodes: int = 1) -> list[Estimate]:
    """Stage 2 with and without the optimizer on the CPU.

    Arguments:
      params: parameters.
      gpus_per_node, nodes: the cluster.

    >>> [round(e.device_bytes / 2**30, 2) for e in stage2(2_851_000_000, 8)]
    [5.31, 11.28]
    """
    total = gpus_per_node * nodes
    return [
        # The GPUs of all nodes count here, though the figure is one node's.
        Estimate(2, "optimizer", None, int(params * max(4 * total, 16) * BUFFERS), 2 * params),
        Estimate(
            2,
            "none",
            None,
            int(params * 4 * gpus_per_node * BUFFERS),
            2 * params + int(18 * params / total),
        ),
    ]


def stage3(
    params: int, largest_layer: int, gpus_per_node: int = 1, nodes: int = 1
) -> list[Estimate]:
    """Stage 3 with each kind of offload, made under `zero.Init` or not.

    Arguments:
      params: parameters.
      largest_layer: parameters of the largest single module, those of its children left out.
      gpus_per_node, nodes: the cluster.

    >>> [round(e.host_bytes / 2**30, 2) for e in stage3(2_851_000_000, 32_000_000, 8)]
    [71.69, 127.45, 63.72, 127.45, 1.43, 127.45]
    """
    total = gpus_per_node * nodes
    layer = 4 * largest_layer
    on_devices = {
        "optimizer,params": layer,
        "optimizer": layer + int(2 * params / total),
        "none": layer + int(18 * params / total),
    }
    estimates = []
    for offload, device in on_devices.items():
        for zero_init in (True, False):
            if offload == "none":
                host = (largest_layer if zero_init else params) * 4 * gpus_per_node
            else:
                each = 18 if offload == "optimizer,params" else 16
                # Without zero.Init every process first makes the whole model in fp32.
                host = params * (
                    each / nodes if zero_init else max(4 * gpus_per_node, each / nodes)
                )
            estimates.append(Estimate(3, offload, zero_init, int(host * BUFFERS), device))
    return estimates


def autotuner(params: int, stage: int, devices: int, fp32: bool = False) -> int:
    """Bytes per GPU by the autotuner's formula, the only one of DeepSpeed's for stages 0 and 1.

    >>> [autotuner(1000, stage, 8) for stage in range(4)]
    [20000, 6000, 4250, 2500]
    """
    weights, gradients, optimizer = (4, 4, 8) if fp32 else (2, 2, 16)
    shares = ((weights, 3), (gradients, 2), (optimizer, 1))
    return sum(int(each * params / (devices if stage >= first else 1)) for each, first in shares)
