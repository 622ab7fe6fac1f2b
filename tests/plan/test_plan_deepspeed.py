"""DeepSpeed's estimators against values that its own functions give (model `cold`, 8 GPUs)."""

import pytest

from jzero.plan.deepspeed import autotuner, stage2, stage3

PARAMS, LAYER = 2_851_000_000, 32_000_000


def gib(n):
    return round(n / 2**30, 2)


def test_stage_2():
    found = {e.offload: (gib(e.host_bytes), gib(e.device_bytes)) for e in stage2(PARAMS, 8)}
    assert found == {"optimizer": (127.45, 5.31), "none": (127.45, 11.28)}


@pytest.mark.parametrize(
    "offload, zero_init, host, device",
    [
        ("optimizer,params", True, 71.69, 0.12),
        ("optimizer,params", False, 127.45, 0.12),
        ("optimizer", True, 63.72, 0.78),
        ("optimizer", False, 127.45, 0.78),
        ("none", True, 1.43, 6.09),
        ("none", False, 127.45, 6.09),
    ],
)
def test_stage_3(offload, zero_init, host, device):
    found = {(e.offload, e.zero_init): e for e in stage3(PARAMS, LAYER, 8)}
    one = found[offload, zero_init]
    assert (gib(one.host_bytes), gib(one.device_bytes)) == (host, device)


def test_stage_2_counts_the_gpus_of_all_nodes():
    assert stage2(PARAMS, 8, 2)[0].host_bytes == PARAMS * 64 * 1.5


def test_stage_3_shares_the_host_part_over_nodes():
    found = {(e.offload, e.zero_init): e.host_bytes for e in stage3(PARAMS, LAYER, 8, 2)}
    assert found["optimizer,params", True] == PARAMS * 9 * 1.5
    assert found["optimizer", False] == PARAMS * 32 * 1.5


def test_the_autotuner_has_stages_0_and_1():
    assert [autotuner(800, stage, 8) for stage in range(4)] == [16000, 4800, 3400, 2000]
    assert autotuner(800, 0, 8, fp32=True) == 800 * 16
