"""What is said of a compiled step: reduce-scatters run as all-reduces, gathers that remat pins."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from factories import Tensor, batch, init, stack
from jax.sharding import AbstractMesh

import jzero
from jzero import hlo
from jzero.compare.notes import pinned_gathers, reductions_for_scatters
from jzero.compare.traffic import traffic
from jzero.setup import Setup

# One weight of 64 x 32 and a bias of 32; in bf16 an all-reduce of both over 8 devices sends
# 2 x 7/8 x 2,080 x 2 bytes, of which a reduce-scatter would send half: 3,640.
SHAPES = {"w": (64, 32), "b": (32,)}
GROUP = "replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"


def laid_out(stage: int, accumulation: int = 1, **axes: int) -> Setup:
    axes = axes or {"data": 8}
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes))
    zero = jzero.Zero(stage=stage, precision="bf16", accumulation=accumulation, mesh=mesh)
    return zero.setup_for(
        lambda key: {name: jnp.zeros(shape) for name, shape in SHAPES.items()}, optax.sgd(1)
    )


def note(setup: Setup, *collectives: str) -> str | None:
    """Of a program with these collectives, each as "opcode operand result groups"."""
    lines = []
    for number, each in enumerate(collectives):
        opcode, operand, result, *groups = each.split()
        lines.append(f"  %p.{number} = {operand} parameter({number})")
        lines.append(
            f"  %c.{number} = {result} {opcode}(%p.{number}), channel_id={number + 1}, "
            f"{' '.join(groups) or GROUP}, to_apply=%add"
        )
    text = "HloModule step, num_partitions=8\n\nENTRY %main {\n" + "\n".join(lines) + "\n}\n"
    found = hlo.collectives(text, setup.mesh.manual)
    return reductions_for_scatters(traffic(found, setup.mesh), setup)


LOSS = "all-reduce f32[13] f32[13]"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_of_them_run_as_all_reduces(stage: int):
    said = note(
        laid_out(stage), "all-reduce bf16[64,32] bf16[64,32]", "all-reduce bf16[32] bf16[32]"
    )
    assert said == (
        "this compiler runs the step's reduce-scatters as all-reduces, which send twice the bytes: "
        "3.64 kB (3.55 KiB) more are sent than the stage asks for"
    )


def test_some_of_them():
    scatter = "reduce-scatter bf16[64,32] bf16[8,32]"
    assert note(laid_out(1), scatter, "reduce-scatter bf16[32] bf16[4]", LOSS) is None
    # 32 of 2,080 elements.
    said = note(laid_out(1), scatter, "all-reduce bf16[32] bf16[32]")
    assert said is not None and "runs 2% of the step's reduce-scatters" in said
    assert "0.06 kB (0.05 KiB) more" in said


def test_with_micro_batches_each_is_asked_for():
    """Stage 2 reduces in every micro-batch, so half of its reductions are missing here."""
    one = ["reduce-scatter bf16[64,32] bf16[8,32]", "reduce-scatter bf16[32] bf16[4]"]
    reduced = ["all-reduce bf16[64,32] bf16[64,32]", "all-reduce bf16[32] bf16[32]"]
    said = note(laid_out(2, accumulation=2), *one, *reduced)
    assert said is not None and "runs 50% of" in said and "3.64 kB" in said
    assert note(laid_out(2, accumulation=2), *one, *one) is None
    assert note(laid_out(1, accumulation=2), *one) is None, "stage 1 reduces once in a step"


@pytest.mark.parametrize(
    "setup, collectives",
    [
        # Stage 0 asks for all-reduces.
        ((0,), ["all-reduce bf16[64,32] bf16[64,32]", "all-reduce bf16[32] bf16[32]"]),
        # Gradients that the loss does not need are reduced by nobody.
        ((2,), ["reduce-scatter bf16[32] bf16[4]"]),
    ],
)
def test_what_is_not_that(setup: tuple[int, ...], collectives: list[str]):
    assert note(laid_out(*setup), *collectives, LOSS) is None


def test_only_the_groups_own_axes_count():
    setup = laid_out(1, replica=2, data=4)
    over = {name: f"replica_groups={groups}, use_global_device_ids=true" for name, groups in {
        "data": "{{0,1,2,3},{4,5,6,7}}",
        "replica": "{{0,4},{1,5},{2,6},{3,7}}",
    }.items()}  # fmt: skip
    scatter = f"reduce-scatter bf16[64,32] bf16[16,32] {over['data']}"
    bias = f"reduce-scatter bf16[32] bf16[8] {over['data']}"
    across = f"all-reduce bf16[16,32] bf16[16,32] {over['replica']}"
    assert note(setup, scatter, bias, across) is None
    said = note(setup, f"all-reduce bf16[64,32] bf16[64,32] {over['data']}", bias, across)
    # 2,048 elements of 2 bytes, times 3/4.
    assert said is not None and "3.07 kB" in said


def test_beside_a_tensor_axis_a_shard_of_it_is_asked_for():
    mesh = AbstractMesh((4, 2), ("data", "tensor"))
    setup = jzero.Zero(stage=1, precision="bf16", mesh=mesh).setup_for(Tensor, optax.sgd(1))
    over = "replica_groups={{0,2,4,6},{1,3,5,7}}, use_global_device_ids=true"
    said = note(setup, f"all-reduce bf16[3,2,16,16] bf16[3,2,16,16] {over}")
    # All of 3 x 2 x 16 x 16 elements of 2 bytes, times 3/4.
    assert said is not None and "runs the step's" in said and "2.30 kB" in said


@pytest.mark.parametrize(
    "remat, says",
    [
        (jax.checkpoint, True),
        (functools.partial(jax.checkpoint, prevent_cse=False), False),
        (lambda layer: layer, False),
    ],
    ids=["barrier", "no-barrier", "no-remat"],
)
def test_remat_that_pins_gathers(remat: Any, says: bool):
    mesh = AbstractMesh((8,), ("data",))
    setup = jzero.Zero(stage=3, precision="bf16", mesh=mesh).setup_for(init, optax.sgd(1))
    said = pinned_gathers(0.667, setup, jzero.Workload(init, stack(remat), batch), rows=8)
    assert (said is not None) == says
    if said is not None:
        assert "(66.7% of the layers' traffic is hidden)" in said
        assert "write jax.checkpoint(layer, prevent_cse=False)" in said


def test_remat_around_no_weights_pins_nothing():
    def around(layer):
        return lambda x, weights: layer(jax.checkpoint(jnp.tanh)(x), weights)

    mesh = AbstractMesh((8,), ("data",))
    setup = jzero.Zero(stage=3, precision="bf16", mesh=mesh).setup_for(init, optax.sgd(1))
    workload = jzero.Workload(init, stack(around), batch)
    assert pinned_gathers(0.667, setup, workload, rows=8) is None


def test_unrolled_layers_need_the_barrier():
    def loss_fn(params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        x = batch["x"]
        for weight in params:
            x = jax.checkpoint(lambda x, weight=weight: jnp.tanh(x @ jzero.gather(weight)))(x)
        return jnp.mean(x)

    mesh = AbstractMesh((8,), ("data",))
    zero = jzero.Zero(stage=3, precision="bf16", mesh=mesh)
    setup = zero.setup_for(lambda key: [jnp.ones((64, 64))] * 2, optax.sgd(1))
    workload = jzero.Workload(
        None, loss_fn, lambda rows: {"x": jax.ShapeDtypeStruct((rows, 64), jnp.float32)}
    )
    assert pinned_gathers(0.667, setup, workload, rows=8) is None
