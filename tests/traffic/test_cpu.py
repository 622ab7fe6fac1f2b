"""What a step sends, read from the program that XLA:CPU compiles: in elements, for it widens bf16.

psi is the number of parameters, A that of micro-batches. numbers of the ZeRO paper (arXiv
1910.02054), section 7: 2 psi for stages 0 to 2 and 3 psi for stage 3.
"""

import flax.linen as nn
import jax
import optax
import pytest
from flax import nnx
from models import Net
from steps import Step, assert_only_weights, step

DATA = ("data",)
NET = Net("nnx", layers=3, remat=True)


def is_layer(path: str) -> bool:
    return path.startswith("block")


def added(net: Net) -> tuple[str, ...]:
    """Endings of the layers' vectors whose value backward does not need, so is not gathered for.

    They are only added to something: without remat in the model to what is kept, with it to what
    the layer hands on.
    """
    if net.kind == "plain":
        return () if net.remat else ("up_bias",)
    return ("down/bias",) if net.remat else ("down/bias", "up/bias", "norm/bias")


def is_read_once(net: Net, path: str) -> bool:
    return not is_layer(path) or path.endswith(added(net) or "none")


def stage_3_gathers(found: Step, net: Net, accumulation: int) -> int:
    """Elements: layers twice per micro-batch, the others, which no loop over layers has, once."""
    layers, added_only = found.size(is_layer), found.size(lambda p: is_layer(p) and is_read_once(net, p))
    return accumulation * (2 * layers - added_only) + found.size() - layers


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_stage_sends_what_the_paper_says(stage: int, accumulation: int):
    few = step(NET, stage=stage, accumulation=accumulation, rows=1)
    many = step(NET, stage=stage, accumulation=accumulation, rows=8)
    psi = few.size()
    want = {
        0: {("all-reduce", DATA): psi},
        1: {("reduce-scatter", DATA): psi, ("all-gather", DATA): psi},
        2: {("reduce-scatter", DATA): accumulation * psi, ("all-gather", DATA): psi},
        3: {
            ("reduce-scatter", DATA): accumulation * psi,
            ("all-gather", DATA): stage_3_gathers(few, NET, accumulation),
        },
    }[stage]
    for found in (few, many):
        assert found.volume() == want
        assert_only_weights(found)
    assert sorted((s.op, s.count, s.elements) for s in few.sites) == sorted(
        (s.op, s.count, s.elements) for s in many.sites
    )
