"""What XLA:TPU makes of a step, compiled without a TPU."""

import pytest
from models import Net
from steps import Step, compile_net

from jzero import hlo, targets
from jzero.errors import JzeroError
from jzero.hlo.text import Instruction
from jzero.mesh import ZeroMesh

TARGET = "v5p:2x2x1"
DATA = (("data", 4),)
NET = Net("nnx", layers=4, width=1024, hidden=4096, vocab=2048, remat=True)


@pytest.fixture(autouse=True, scope="module")
def tpu_compiler():
    try:
        targets.devices(targets.parse(TARGET))
    except JzeroError as error:
        pytest.skip(str(error))


def casts_of_stacks(found: Step) -> list[Instruction]:
    """To the compute dtype, of all layers at once."""
    return [
        each
        for computation in hlo.parse(found.compiled).computations.values()
        for each in computation.instructions
        if each.opcode == "convert"
        and each.shapes[0].dtype == "bf16"
        and each.shapes[0].dims[:1] == (NET.layers,)
    ]


def test_no_copy_of_all_shards_in_the_compute_dtype(monkeypatch: pytest.MonkeyPatch):
    found = compile_net(NET, TARGET, axes=DATA, stage=3)
    assert casts_of_stacks(found) == []
    monkeypatch.setattr(ZeroMesh, "platform", "")  # one of which nothing is known
    other = compile_net(NET, TARGET, axes=DATA, stage=3)
    assert casts_of_stacks(other) and found.volume == other.volume
