"""What a step sends, read from the program that XLA:CPU compiles: in elements, for it widens bf16.

The ZeRO paper (arXiv 1910.02054), section 7: 2 psi at stages 0 to 2 and 3 psi at stage 3, where psi
is the number of parameters; with A micro-batches 2 psi, (A + 1) psi and 3A psi.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from models import Net
from steps import Step, Volume, build_mesh, compile_net, compiled, step

import jzero

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
    return not is_layer(path) or path.endswith(added(net))


def volume_of(found: Step, net: Net) -> Volume:
    """What the paper says that a step sends: elements by op."""
    psi, accumulation = found.size(), found.zero.batch.accumulation
    match found.zero.config.stage:
        case 0:
            return {("all-reduce", DATA): psi}
        case 1:
            return {("reduce-scatter", DATA): psi, ("all-gather", DATA): psi}
        case 2:
            return {("reduce-scatter", DATA): accumulation * psi, ("all-gather", DATA): psi}
        case _:
            layers = found.size(is_layer)
            once = found.size(lambda path: is_layer(path) and is_read_once(net, path))
            gathered = accumulation * (2 * layers - once) + psi - layers
            return {("reduce-scatter", DATA): accumulation * psi, ("all-gather", DATA): gathered}


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_volume_of_each_stage(stage: int, accumulation: int):
    found = step(NET, stage=stage, accumulation=accumulation)
    assert found.volume == volume_of(found, NET)
    found.assert_only_weights()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_larger_batch_sends_no_more(stage: int):
    few, many = (step(NET, stage=stage, rows=rows) for rows in (1, 16))
    many.assert_only_weights()
    sent = [sorted((s.op, s.count, s.elements) for s in found.sites) for found in (few, many)]
    assert sent[0] == sent[1]


@pytest.mark.parametrize("stage", [1, 2])
def test_where_gradients_are_reduced(stage: int):
    """At stage 1 once per step; at stage 2 in each micro-batch, in the loop over the layers."""
    accumulation = 4
    found = step(NET, stage=stage, accumulation=accumulation)
    each = {p: NET.layers if x.array.layer_axes else 1 for p, x in found.leaves.items()}
    assert found.updates == each, "gathered once after the update, layer by layer"
    if stage == 1:
        counts = [s.count for s in found.large if s.op == "reduce-scatter"]
        assert set(counts) == {1} and found.scatters == {}
    else:
        assert found.scatters == {path: accumulation * n for path, n in each.items()}


@pytest.mark.parametrize(
    "kind, remat, accumulation",
    [
        ("nnx", True, 4),
        ("nnx", False, 1),
        ("nnx", False, 4),
        ("linen", True, 1),
        ("linen", False, 4),
        ("plain", True, 1),
        ("plain", False, 4),
    ],
)
def test_stage_3_leaf_by_leaf(kind: str, remat: bool, accumulation: int):
    """Two gathers and one reduce-scatter per layer and micro-batch, whoever rematerialises.

    Leaves outside the layers are gathered once per step: XLA lifts that out of both loops.
    """
    net = Net(kind, layers=3, remat=remat)
    found = step(net, stage=3, accumulation=accumulation)
    gathers, scatters = {}, {}
    for path in found.leaves:
        runs = accumulation * (net.layers if is_layer(path) else 1)
        scatters[path] = runs
        gathers[path] = (runs if is_read_once(net, path) else 2 * runs) if is_layer(path) else 1
    assert found.gathers == gathers
    assert found.scatters == scatters
    assert found.updates == {}
    assert found.volume == volume_of(found, net)
    found.assert_only_weights()


def test_gathered_weights_may_be_kept():
    """What a user asks for with keep_gathered: 2 psi instead of 3 psi, one gather for each leaf."""
    found = step(Net("nnx", layers=3), stage=3, keep_gathered=True)
    assert found.volume == {
        ("reduce-scatter", DATA): found.size(),
        ("all-gather", DATA): found.size(),
    }


def test_fp32_sends_the_same():
    found = step(NET, stage=3, precision="fp32")
    assert found.volume == volume_of(found, NET)


def frozen(path: str) -> bool:
    return path.startswith("blocks/up") or path == "embed/embedding"


def set_to_zero() -> optax.GradientTransformation:
    """An optimizer that does not look at the gradients of frozen leaves."""

    def labels(params):
        def label(path, _):
            return frozen("/".join(key.key for key in path))

        return jax.tree_util.tree_map_with_path(label, params)

    return optax.partition({True: optax.set_to_zero(), False: optax.adamw(1e-3)}, labels)


@pytest.mark.parametrize("by", ["trainable", "set_to_zero"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_parameters_have_no_gradient_traffic(stage: int, by: str):
    if by == "trainable":
        found = compile_net(NET, stage=stage, trainable=lambda path: not frozen(path))
    else:
        found = compile_net(NET, stage=stage, tx=set_to_zero())
        assert found.zero.setup.layout.unused == set(filter(frozen, found.leaves))
    trained = found.size(lambda path: not frozen(path))
    op = "reduce-scatter" if stage else "all-reduce"
    assert found.volume[op, DATA] == trained
    if stage >= 2:
        assert found.scatters.keys() == {path for path in found.leaves if not frozen(path)}
    if by == "trainable" and stage == 2:
        assert found.updates.keys() == found.scatters.keys()
    if stage == 3:
        assert found.gathers.keys() == found.leaves.keys()
    found.assert_only_weights()


def test_small_leaves_stay_whole_below_the_threshold():
    """Their state shards all the same; a step reduces and gathers each of them once."""
    accumulation = 4
    found = step(NET, stage=3, accumulation=accumulation, persistence_threshold=50)
    small = {path for path, leaf in found.leaves.items() if leaf.array.layer_size <= 50}
    assert 0 < len(small) < len(found.leaves)
    assert found.gathers.keys() == found.scatters.keys() == found.leaves.keys() - small
    assert found.updates == dict.fromkeys(small, 1)
    few = found.size(lambda path: path in small)
    assert found.volume["reduce-scatter", DATA] == accumulation * (found.size() - few) + few
    found.assert_only_weights()


@pytest.mark.parametrize("kind", ["nnx", "plain"])
@pytest.mark.parametrize("stage", [2, 3])
def test_tied_weights_are_reduced_once(stage: int, kind: str):
    """The embedding is read at both ends; its two gradients meet before they are sent."""
    net = Net(kind, layers=3, tied=True)
    found = step(net, stage=stage)
    assert found.volume == volume_of(found, net)
    embedding = {path for path in found.leaves if path.startswith("embed")}
    assert {path: found.scatters[path] for path in embedding} == dict.fromkeys(embedding, 1)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint])
def test_tied_weights_are_reduced_once_whatever_is_around_the_loss(around: Callable[..., Any]):
    def loss(params: dict[str, Any], batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        x = jnp.tanh(batch["x"] @ jzero.gather(params["tied"]))
        return jnp.mean(x @ jzero.gather(params["tied"]).T)

    zero = jzero.Zero(stage=3, mesh=build_mesh("cpu:8", data=8))
    zero.setup_for(lambda key: {"tied": jnp.ones((8, 32))}, optax.adam(1e-3))
    batch = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    found = compiled(zero, lambda *args: around(loss)(*args), batch)
    assert found.volume["reduce-scatter", DATA] == found.size()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_add_up_shards_once_per_step(stage: int):
    """Gathers and reduce-scatters stay in the group; replicas meet after the last micro-batch."""
    axes = (("replica", 2), ("data", 4))
    found = step(NET, stage=stage, accumulation=2, axes=axes)
    psi = found.size()
    if stage == 0:
        want = {("all-reduce", ("replica", "data")): psi}
    else:
        want = volume_of(found, NET) | {("all-reduce", ("replica",)): psi // 4}
    assert found.volume == want
    assert {s.count for s in found.large if "zero_replica" in s.axes} == {1}
    found.assert_only_weights()


class Tensor(nnx.Module):
    """A scanned MLP whose weights the model itself shards over `tensor`."""

    def __init__(self, rngs: nnx.Rngs):
        def linear(rngs: nnx.Rngs, inputs: int, outputs: int, *names: str | None) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def layers(rngs: nnx.Rngs):
            up = linear(rngs, 16, 32, None, "tensor")
            return up, linear(rngs, 32, 16, "tensor", None)

        self.up, self.down = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x, up, down):
            return x + down(nnx.tanh(up(x)))

        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        return scan(x, self.up, self.down)


@pytest.mark.parametrize("stage", [2, 3])
def test_beside_a_tensor_axis_half_of_each_weight_moves(stage: int):
    """Each tensor shard gathers and reduces its own half; the tensor axis carries activations."""
    zero = jzero.Zero(stage=stage, precision="bf16", mesh=build_mesh("cpu:8", data=4, tensor=2))
    zero.setup_for(Tensor, optax.adamw(1e-3))

    def loss(model: Tensor, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(batch["x"])))

    batch = {"x": jax.ShapeDtypeStruct((4 * 5, 16), jnp.float32)}
    found = compiled(zero, loss, batch)
    half = found.size() // 2
    assert {op: n for (op, axes), n in found.volume.items() if "data" in axes} == {
        "reduce-scatter": half,
        "all-gather": 2 * half if stage == 3 else half,
    }
    for site in found.large:
        if site.axes != ("zero_data",):
            assert site.axes == ("tensor",) and site.op == "all-reduce", site
            assert all(operand.dims[0] == 5 for operand in site.operands), site
