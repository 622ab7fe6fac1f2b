"""What XLA:GPU makes of a step, compiled without a GPU: dtypes, combined collectives, peaks.

Weights are large and activations tiny, 6 tokens on a device, so that memory is weights.
"""

import jax
import pytest
from models import Net
from steps import Step, step

from jzero import targets
from jzero.errors import JzeroError

TARGET = "h100:8"
DATA = ("data",)
NET = Net("nnx", layers=4, width=1024, hidden=4096, vocab=2048, remat=True)
WIDE = {"width": 1024, "hidden": 8192, "vocab": 128}


@pytest.fixture(autouse=True, scope="module")
def gpu_compiler():
    try:
        targets.devices(targets.parse(TARGET))
    except JzeroError as error:
        pytest.skip(str(error))


def is_layer(path: str) -> bool:
    return path.startswith("blocks")


# stage -> bytes at the peak as first measured, with JAX 0.10.2 and 0.12.0.1; of the steps that
# test_bf16_travels_as_bf16 compiles. Less is welcome; 3 % more has cost memory somewhere.
PEAKS = {
    0: {"0.10": 613_118_559, "0.12": 621_531_743},
    1: {"0.10": 367_757_095, "0.12": 368_125_735},
    2: {"0.10": 203_992_583, "0.12": 201_672_409},
    3: {"0.10": 126_171_405, "0.12": 109_334_507},
}


def assert_peak(found: Step, stage: int) -> None:
    known = PEAKS[stage]
    most = known.get(".".join(jax.__version__.split(".")[:2]), max(known.values()))
    assert found.memory.peak_bytes <= 1.03 * most


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 4), (2, 4), (3, 1)])
def test_bf16_travels_as_bf16(stage: int, accumulation: int):
    found = step(NET, TARGET, stage=stage, accumulation=accumulation)
    psi, layers = found.size(), found.size(is_layer)
    added = found.size(lambda path: path.endswith("blocks/down/bias"))
    scattered, gathered = ("reduce-scatter", DATA), ("all-gather", DATA)
    want = {
        0: {("all-reduce", DATA): psi},
        1: {scattered: psi, gathered: psi},
        2: {scattered: accumulation * psi, gathered: psi},
        3: {scattered: psi, gathered: psi + layers - added},
    }
    assert found.volume == want[stage]
    assert all(dtypes == {"bf16"} for dtypes in found.dtypes.values())
    if stage == 1:
        assert [s.count for s in found.large if s.op == "reduce-scatter"] == [1]
    assert_peak(found, stage)


def test_gradients_are_reduced_in_the_communication_dtype():
    net = Net("nnx", layers=2, remat=True)
    found = step(net, TARGET, stage=3, communication_dtype="fp32")
    assert found.dtypes == {"all-gather": {"bf16"}, "reduce-scatter": {"f32"}}
    found = step(net, TARGET, stage=1, communication_dtype="fp32")
    assert found.dtypes == {"all-gather": {"bf16"}, "reduce-scatter": {"f32"}}


def gathered_once(path: str, remat: bool) -> bool:
    """Backward needs neither the embedding nor vectors that are only added to what is kept."""
    if path == "embed/embedding" or path.endswith("down/bias"):
        return True
    if remat and is_layer(path):
        return False
    return path.endswith("bias") or (remat and not is_layer(path))


@pytest.mark.parametrize("remat", [True, False])
def test_unrolled_layers_are_gathered_twice(remat: bool):
    """XLA combines their collectives, so elements tell it: all but the added vectors twice."""
    found = step(Net("nnx", False, layers=4, remat=remat, **WIDE), TARGET, stage=3)
    psi = found.size()
    once = found.size(lambda path: gathered_once(path, remat))
    assert found.volume == {("reduce-scatter", DATA): psi, ("all-gather", DATA): 2 * psi - once}


def test_gathered_weights_of_scanned_layers_are_not_kept():
    """Without remat in the model: memory grows with the layers by shards, not by weights."""
    net = {layers: Net("nnx", layers=layers, **WIDE) for layers in (4, 8)}
    few, many = (step(net[layers], TARGET, stage=3) for layers in (4, 8))
    added = 2 * (many.size() - few.size())  # bytes of four layers, whole in bf16
    grown = many.memory.temp_bytes - few.memory.temp_bytes
    assert grown < 0.25 * added, "an eighth is the gradients' shards"
    kept = step(net[8], TARGET, stage=3, keep_gathered=True)
    assert kept.memory.peak_bytes > many.memory.peak_bytes + 2 * many.size(is_layer)
    assert kept.volume["all-gather", DATA] == kept.size()
    assert many.volume["all-gather", DATA] > 1.99 * many.size()


@pytest.mark.parametrize("remat", [True, False])
def test_gathered_weights_of_unrolled_layers_do_not_pile_up(remat: bool):
    """XLA would start all gathers at once and, without remat in the model, keep their results."""
    net = {layers: Net("nnx", False, layers=layers, remat=remat, **WIDE) for layers in (4, 8)}
    few, many = (step(net[n], TARGET, stage=3, prefetch_elements=1_000_000) for n in (4, 8))
    added = 2 * (many.size() - few.size())  # bytes of four layers, whole in bf16
    grown = many.memory.temp_bytes - few.memory.temp_bytes
    assert grown < 0.25 * added, "an eighth is the gradients' shards"
