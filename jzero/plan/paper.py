"""The ZeRO paper's accounting (arXiv 1910.02054, sections 3.1, 5 and 7): a count is enough."""

from collections.abc import Sequence

from jzero.errors import JzeroError
from jzero.partition import STAGES
from jzero.plan.rows import DTYPE_BYTES, Row

OFFLOADS = ("optimizer", "params")
MASTER_BYTES = 4


def closed_form(
    params: int,
    devices: int,
    dtype: str = "bf16",
    grad_accum_dtype: str = "fp32",
    optimizer_bytes: int = 8,
    accumulate: int = 1,
    offload: Sequence[str] = (),
) -> list[Row]:
    """Bytes per device and elements sent at each stage, of a model of so many parameters.

    Arguments:
      params: parameters, the paper's psi.
      devices: devices of the ZeRO group, the paper's N_d.
      dtype: "bf16", "fp16" or "fp32", of parameters and gradients.
      grad_accum_dtype: of gradients where there are several micro-batches.
      optimizer_bytes: of the optimizer's state for a parameter, without the master: 8 for Adam.
      accumulate: micro-batches in a step.
      offload: "optimizer" (master and optimizer state) and "params" (the parameters' shards, at
        stage 3 alone), which the host then keeps.

    Returns:
      A row for each stage, 0 to 3. A device's share is rounded up to a byte.

    Raises:
      JzeroError: an unknown dtype or thing to offload.

    >>> [row.total_bytes / 1e9 for row in closed_form(13 * 10**9, 8)]
    [208.0, 71.5, 48.75, 26.0]
    >>> [row.comm_elements // 10**9 for row in closed_form(13 * 10**9, 8, accumulate=4)]
    [26, 26, 65, 156]
    """
    for given in (dtype, grad_accum_dtype):
        if given not in DTYPE_BYTES:
            raise JzeroError(f"dtype {given!r}; allowed: {', '.join(DTYPE_BYTES)}")
    for given in offload:
        if given not in OFFLOADS:
            raise JzeroError(f"offload {given!r}; allowed: {', '.join(OFFLOADS)}")
    width = DTYPE_BYTES[dtype]
    gradient = width if accumulate == 1 else DTYPE_BYTES[grad_accum_dtype]
    # fp32 parameters are their own master weights.
    state = optimizer_bytes + (0 if dtype == "fp32" else MASTER_BYTES)
    rows = []
    for stage, shards in STAGES.items():

        def share(each: int, sharded: bool) -> int:
            return -(-each * params // devices) if sharded else each * params

        weights = share(width, shards.parameters)
        optimizer = share(state, shards.optimizer)
        host = 0
        if "optimizer" in offload:
            host, optimizer = host + optimizer, 0
        if "params" in offload and shards.parameters:
            host, weights = host + weights, 0
        rows.append(
            Row(
                stage=stage,
                params_bytes=weights,
                gradients_bytes=share(gradient, shards.gradients),
                optimizer_bytes=optimizer,
                comm_elements=comm_elements(stage, params, devices, accumulate),
                host_bytes=host,
            )
        )
    return rows


def comm_elements(stage: int, params: int, devices: int, accumulate: int = 1) -> int:
    """Elements that a device sends in an optimizer step, without the factor (N-1)/N.

    Stage 0 all-reduces gradients once, which is a reduce-scatter and an all-gather; stage 1
    reduce-scatters them once and gathers the new parameters; stage 2 reduce-scatters in every
    micro-batch; stage 3 in every micro-batch gathers for forward, for backward, and
    reduce-scatters (section 7).

    >>> [comm_elements(stage, 10, 8, accumulate=4) for stage in range(4)]
    [20, 20, 50, 120]
    """
    if devices == 1:
        return 0
    return params * {0: 2, 1: 2, 2: accumulate + 1, 3: 3 * accumulate}[stage]
