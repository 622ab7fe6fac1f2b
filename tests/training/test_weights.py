"""Weights going in and out: from arrays that exist, and as the user sees them again."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from models import (
    KINDS,
    OPTIMIZERS,
    LinenNet,
    Net,
    NnxNet,
    assert_close,
    make_batch,
    mesh,
    numpy,
    reference,
    total_and_weight,
)

import jzero
from jzero import JzeroError

STAGES = (0, 1, 2, 3)
ODD = {"vocab": 50, "width": 18, "hidden": 22}


def given(net):
    """Weights that are there already, in the form that each library has them."""
    if net.kind == "nnx":
        return NnxNet(net, nnx.Rngs(0))
    params, _ = net.fresh()
    if net.kind == "plain":
        return jax.tree.map(np.asarray, params)
    return TrainState.create(apply_fn=LinenNet(net).apply, params=params, tx=optax.sgd(1.0))


@pytest.mark.parametrize("kind, stage", [("nnx", 3), ("linen", 2), ("plain", 3)])
def test_training_goes_on_from_weights_that_exist(kind, stage):
    net = Net(kind)
    zero = jzero.Zero(stage=stage, mesh=mesh(5))  # 5 divides nothing: padded
    state = zero.init(given(net), OPTIMIZERS["adamw"]())
    assert_close(zero.params(state), net.fresh()[0], 1e-7)
    step = zero.train_step(net.loss)
    for i in range(2):
        state, _ = step(state, make_batch(i, fill=3))
    assert_close(zero.params(state), reference(net, steps=2)[1])


@pytest.mark.parametrize(
    "kind, precision, stage", [("nnx", "fp32", 3), ("linen", "bf16", 1), ("plain", "bf16", 3)]
)
def test_a_fresh_state_has_the_models_own_weights(kind, precision, stage):
    net = Net(kind, **ODD)
    zero = jzero.Zero(stage=stage, precision=precision)
    state = zero.init(net.init, optax.sgd(0.1), seed=3, sample=net.sample)
    assert_close(zero.params(state), net.fresh(3)[0], 1e-7)


@pytest.mark.parametrize("stage", STAGES)
def test_params_have_true_shapes_and_are_fp32(stage):
    net = Net("plain", **ODD)
    zero = jzero.Zero(stage=stage, precision="bf16")
    state = zero.init(net.init, OPTIMIZERS["adamw"]())
    want, _ = net.fresh()
    params = zero.params(state)
    assert jax.tree.structure(params) == jax.tree.structure(want)
    for found, exact in zip(jax.tree.leaves(params), jax.tree.leaves(want), strict=True):
        assert found.shape == exact.shape and found.dtype == jnp.float32
        assert len(found.sharding.device_set) == 8


def test_what_is_not_a_model_is_refused():
    zero = jzero.Zero(stage=3)
    with pytest.raises(JzeroError, match="init is a dict; give a constructor"):
        zero.init({"w": "text"}, optax.sgd(1.0))
    with pytest.raises(JzeroError, match="sample="):
        zero.init(LinenNet(Net("linen")), optax.sgd(1.0))
    with pytest.raises(JzeroError, match="should return an nnx.Module; it returned "):
        zero.init(lambda rngs: 3, optax.sgd(1.0))
    rngs = r"parameter rngs \(NNX\), as in lambda rngs: Model\(width, rngs=rngs\), or a function"
    with pytest.raises(
        JzeroError, match=rf"init is called as init\(key\), and takes \(\): .*{rngs}"
    ):
        zero.init(lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.sgd(1.0))
    with pytest.raises(
        JzeroError, match=r"as init\(rngs=\), and takes .{,80}\.\.\.\): .* 'in_features'"
    ):
        zero.init(nnx.Linear, optax.sgd(1.0))
    with pytest.raises(JzeroError, match="init returned a Dense at the root; return a pytree"):
        zero.init(nn.Dense, optax.sgd(1.0))
    with pytest.raises(JzeroError, match="init returned a Dense at layers/0; return a pytree"):
        zero.init(lambda key: {"layers": [nn.Dense(2)]}, optax.sgd(1.0))
    with pytest.raises(JzeroError, match="init"):
        jzero.Zero(stage=3).explain()
    with pytest.raises(JzeroError, match="layer_axes names 'v'"):
        zero.init({"w": np.ones(4, np.float32)}, optax.sgd(1.0), layer_axes={"v": 0})


def test_a_partial_of_a_constructor_is_a_constructor():
    zero = jzero.Zero(stage=3)
    params = zero.params(zero.init(functools.partial(nnx.Linear, 4, 8), optax.sgd(1.0), seed=3))
    want = nnx.Linear(4, 8, rngs=nnx.Rngs(jax.random.key(3)))
    assert_close(params, nnx.to_pure_dict(nnx.state(want, nnx.Param)), 1e-7)


def test_a_decorator_may_supply_what_the_function_inside_takes():
    def supplied(fn):
        return functools.wraps(fn)(lambda *args: fn(4, *args))

    @supplied
    def init(width, key):
        return {"w": jnp.ones((width, 2))}

    @supplied
    def loss(scale, params, batch, rng):
        return scale * jnp.mean(batch @ jzero.gather(params["w"]))

    zero = jzero.Zero(stage=3)
    state = zero.init(init, optax.sgd(1.0))
    assert float(zero.train_step(loss)(state, np.ones((8, 4), np.float32))[1]["loss"]) == 16


# Out again.


@pytest.mark.parametrize(
    "kind, stage", [*zip(KINDS, (0, 1, 2), strict=True), *((k, 3) for k in KINDS)]
)
def test_the_model_for_inference(kind, stage):
    net = Net(kind, scanned=kind == "nnx", **ODD)
    zero = jzero.Zero(stage=stage)
    state = zero.init(net.init, optax.sgd(0.1), sample=net.sample)
    params, logits = net.fresh()
    tokens = make_batch(0, net.vocab)["tokens"][:3]  # any number of rows
    want = jax.jit(logits)(params, tokens)
    eager = net.logits(zero.model(state), tokens)
    np.testing.assert_allclose(eager, want, rtol=1e-5, atol=1e-5)
    jitted = jax.jit(lambda state, tokens: net.logits(zero.model(state), tokens))(state, tokens)
    np.testing.assert_allclose(jitted, want, rtol=1e-5, atol=1e-5)


def test_a_plain_stack_needs_its_layer_axes_before_the_first_step():
    net, batch = Net("plain", layers=8), make_batch(0)
    zero = jzero.Zero(stage=3)
    state = zero.init(net.init, optax.sgd(0.1))
    with pytest.raises(JzeroError, match=r"layer axes are not known yet.*layer_axes="):
        zero.eval_step(net.loss)(state, batch)
    axes = {f"blocks/{name}": 0 for name in ("scale", "up", "up_bias", "down")}
    state = zero.init(net.init, optax.sgd(0.1), layer_axes=axes)
    params, logits = net.fresh()
    total, weight = total_and_weight(logits(params, batch["tokens"]), batch)
    loss = zero.eval_step(net.loss)(state, batch)["loss"]
    np.testing.assert_allclose(loss, total / weight, rtol=1e-6)
    found = net.logits(zero.model(state), batch["tokens"])
    np.testing.assert_allclose(found, logits(params, batch["tokens"]), rtol=1e-5, atol=1e-5)


def test_an_evaluation_equals_the_plain_model():
    net = Net("linen", **ODD)
    params, logits = net.fresh()
    batch = make_batch(0, net.vocab)
    total, weight = total_and_weight(logits(params, batch["tokens"]), batch)
    for stage in (0, 3):
        zero = jzero.Zero(stage=stage)
        state = zero.init(net.init, OPTIMIZERS["adamw"](), sample=net.sample)
        evaluate = zero.eval_step(net.loss)
        for _ in range(2):
            np.testing.assert_allclose(evaluate(state, batch)["loss"], total / weight, rtol=1e-6)


def test_an_evaluation_between_steps():
    """The first step moves a plain stack to another layout."""
    net = Net("plain", layers=8)
    zero = jzero.Zero(stage=3)
    state = zero.init(net.init, optax.sgd(0.1))
    evaluate, step = zero.eval_step(net.loss), zero.train_step(net.loss)
    state, _ = step(state, make_batch(0))
    loss = float(evaluate(state, make_batch(1))["loss"])
    _, metrics = step(state, make_batch(1))
    np.testing.assert_allclose(loss, metrics["loss"], rtol=1e-6)


@pytest.mark.parametrize("stage", [3])
def test_an_average_of_weights_is_a_tree_map(stage):
    net = Net("nnx", vocab=50)
    zero = jzero.Zero(stage=stage)
    state = zero.init(net.init, OPTIMIZERS["adamw"]())
    average = jax.tree.map(jnp.copy, zero.params(state))
    want = numpy(average)
    step = zero.train_step(net.loss)
    blend = jax.jit(lambda a, b: jax.tree.map(lambda x, y: 0.9 * x + 0.1 * y, a, b))
    for i in range(3):
        state, _ = step(state, make_batch(i, net.vocab))
        average = blend(average, zero.params(state))
        now = reference(net, steps=i + 1)[1]
        want = {path: 0.9 * x + 0.1 * now[path] for path, x in want.items()}
    assert_close(average, want)


# Several models in one step.


def test_a_teacher_has_no_gradient():
    init = {
        "student": {"w": np.ones((16, 4), np.float32)},
        "teacher": {"w": np.full((16, 4), 2, np.float32)},
    }

    def loss_fn(params, batch, rng):
        student = batch["x"] @ jzero.gather(params["student"]["w"])
        teacher = batch["x"] @ jzero.gather(jzero.stop_gradient(params["teacher"])["w"])
        return jnp.mean(jnp.square(student - teacher))

    batch = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)}
    for stage in (1, 3):
        zero = jzero.Zero(stage=stage)
        state = zero.init(init, optax.sgd(0.1))
        state, metrics = zero.train_step(loss_fn)(state, batch)
        params = numpy(zero.params(state))
        assert np.array_equal(params["teacher/w"], init["teacher"]["w"])
        off = batch["x"] @ (init["student"]["w"] - init["teacher"]["w"])
        grad = 2 * batch["x"].T @ off / off.size
        assert_close({"w": params["student/w"]}, {"w": init["student"]["w"] - 0.1 * grad})
        np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grad), rtol=1e-5)


class Gan(nnx.Module):
    def __init__(self, rngs):
        self.generator = nnx.Linear(4, 8, rngs=rngs)
        self.critic = nnx.Linear(8, 1, rngs=rngs)


def gan_loss(model, batch, stop):
    """Both games in one number: each half only gets the gradient of its own."""
    fake = model.generator(batch["z"])
    fool = -stop(model.critic)(fake).mean()
    judge = jnp.square(model.critic(jax.lax.stop_gradient(fake)) + 1).mean()
    return fool + judge + jnp.square(model.critic(batch["x"]) - 1).mean()


def gan_optimizer():
    def label(params):
        return jax.tree_util.tree_map_with_path(lambda path, _: path[0].key, params)

    return optax.partition({"generator": optax.adam(1e-2), "critic": optax.sgd(1e-1)}, label)


def test_two_models_with_two_optimizers_in_one_step():
    rng = np.random.default_rng(0)
    batch = {
        "z": rng.normal(size=(16, 4)).astype(np.float32),
        "x": rng.normal(size=(16, 8)).astype(np.float32),
    }
    graph, params = nnx.split(Gan(nnx.Rngs(0)), nnx.Param)
    weights, tx = nnx.to_pure_dict(params), gan_optimizer()
    opt_state = tx.init(weights)

    def plain(weights):
        nnx.replace_by_pure_dict(params, weights)
        model = nnx.merge(graph, params)
        halted = nnx.clone(model.critic)
        nnx.update(halted, jax.tree.map(jax.lax.stop_gradient, nnx.state(halted)))
        return gan_loss(model, batch, lambda _: halted)

    for _ in range(2):
        updates, opt_state = tx.update(jax.grad(plain)(weights), opt_state, weights)
        weights = optax.apply_updates(weights, updates)
    for stage in (1, 3):
        zero = jzero.Zero(stage=stage)
        state = zero.init(lambda rngs: Gan(rngs), gan_optimizer())
        step = zero.train_step(
            lambda model, batch, rng: gan_loss(model, batch, jzero.stop_gradient)
        )
        for _ in range(2):
            state, _ = step(state, batch)
        assert_close(zero.params(state), weights)


def test_stop_gradient_of_a_bound_linen_module():
    zero = jzero.Zero(stage=3)
    state = zero.init(nn.Dense(4), optax.sgd(0.1), sample=jnp.ones((1, 8)))

    def loss_fn(model, batch, rng):
        return jnp.mean(jzero.stop_gradient(model)(batch["x"]))

    state, metrics = zero.train_step(loss_fn)(state, {"x": np.ones((8, 8), np.float32)})
    assert metrics["grad_norm"] == 0
