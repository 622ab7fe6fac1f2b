"""jzero's own steps pass its own audit, and another axis may carry activations."""

import jax
import jax.numpy as jnp
import optax
import pytest
from models import Net
from steps import Step, build_mesh, compile_net

import jzero
from jzero.auditing import Kind, Report

NET = Net("plain", layers=2, remat=True)


def audited(found: Step) -> Report:
    return jzero.audit(found.compiled, found.zero.mesh.storage)


@pytest.mark.parametrize(
    "target, stage",
    [*(("cpu:8", stage) for stage in range(4)), ("h100:8", 1), ("h100:8", 3)],
    indirect=["target"],
)
def test_every_stage_passes(target: str, stage: int):
    found = compile_net(NET, target, stage=stage, tx=optax.sgd(0.1, momentum=0.9))
    report = audited(found)
    report.assert_no_collective_on_activations()
    report.assert_no_kept_weights()
    report.assert_peak_below(found.memory.peak_bytes + 1)
    assert (report.state, report.batch) == (("state",), ("batch",))
    assert {each.kind for each in report.moved} <= {Kind.WEIGHT, Kind.GRADIENT, Kind.SMALL}
    psi = found.size()
    once = found.size(lambda path: not path.startswith("blocks"))
    report.assert_volume(3 - once / psi if stage == 3 else 2, psi)
    wrong = 2 if stage == 3 else 3
    with pytest.raises(AssertionError, match=rf"asked for was {wrong} within"):
        report.assert_volume(wrong, psi)


def test_hybrid_shards():
    axes = (("replica", 2), ("data", 4))
    found = compile_net(NET, stage=3, axes=axes, tx=optax.sgd(0.1))
    report = audited(found)
    assert (report.shard_axes, report.replica_axes) == (("data",), ("replica",))
    report.assert_no_collective_on_activations()
    reduced = {(each.op, each.axes) for each in report.of(Kind.GRADIENT)}
    assert reduced == {("reduce-scatter", ("data",)), ("all-reduce", ("replica",))}
    assert {each.axes for each in report.of(Kind.WEIGHT)} == {("data",)}


def test_an_optimizer_of_products_moves_no_activations():
    """What Muon exchanges depends on the batch, by way of reduced gradients alone."""

    def loss(params, batch, rng):
        return jnp.mean(jnp.square(jnp.tanh(batch["x"] @ jzero.gather(params["w"]))))

    zero = jzero.Zero(stage=1, mesh=build_mesh("cpu:8", data=8))
    zero.setup_for(lambda key: {"w": jax.random.normal(key, (64, 96))}, optax.contrib.muon(1e-3))
    batch = {"x": jax.ShapeDtypeStruct((128, 64), jnp.float32)}
    compiled = zero.train_step(loss).lower(batch).compile()
    report = jzero.audit(compiled, zero.mesh.storage)
    report.assert_no_collective_on_activations()
    assert [each.op for each in report.of(Kind.GRADIENT)] == ["reduce-scatter"]
    products = report.of(Kind.UPDATE)
    assert products and all("zero_update" in each.op_name for each in products)


def test_beside_a_tensor_axis_activations_move_rightly():
    """They move over `tensor`, which is asked about only where it is named."""
    mesh = build_mesh("cpu:8", data=4, tensor=2)
    zero = jzero.Zero(stage=3, mesh=mesh)

    def init(key: jax.Array):
        return {"up": jax.random.normal(key, (2, 64, 128)), "down": jnp.ones((2, 128, 64))}

    def loss(params, batch, rng):
        def layer(x, weights):
            up, down = jzero.gather(weights)
            y = jnp.tanh(x @ up)
            y = jax.lax.with_sharding_constraint(y, jax.sharding.PartitionSpec(None, "tensor"))
            return x + y @ down, None

        x, _ = jax.lax.scan(jax.checkpoint(layer), batch["x"], (params["up"], params["down"]))
        return jnp.mean(jnp.square(x))

    zero.setup_for(init, optax.sgd(0.1))
    batch = {"x": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    report = jzero.audit(zero.train_step(loss).lower(batch).compile(), mesh)
    report.assert_no_collective_on_activations()
    report.assert_no_collective_on_activations("data")
    with pytest.raises(AssertionError, match="activations are moved over tensor"):
        report.assert_no_collective_on_activations("tensor")


def test_an_evaluation_needs_to_be_told_what_is_state():
    """Nothing in a program without gradients says that its arguments are weights."""
    from flax import nnx

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.up = nnx.Linear(64, 64, rngs=rngs)

        def __call__(self, x):
            return self.up(x)

    zero = jzero.Zero(stage=3)
    state = zero.init(Model, optax.sgd(0.1))
    x = jax.device_put(jnp.ones((8, 64)), zero.mesh.batch)
    forward = jax.jit(lambda state, x: jnp.mean(zero.model(state)(x)))
    compiled = forward.lower(state, x).compile()
    report = jzero.audit(compiled, zero.mesh.storage)
    assert set(report.unsure) == {"state", "x"}
    with pytest.raises(AssertionError, match=r'(?s)cannot be told.*weights=\["state"\]') as error:
        report.assert_no_collective_on_activations()
    assert "  all-gather f32[64,64] over data, once" in str(error.value)
    report.assert_no_collective_on_activations(allow_unknown=True)
    told = jzero.audit(compiled, zero.mesh.storage, weights=["state"])
    told.assert_no_collective_on_activations()
    assert told.of(Kind.WEIGHT)
