"""What a user does around the steps: begins again, alternates, and asks for things back."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jzero
from jzero import JzeroError
from jzero.monitor import Monitor

X = np.linspace(-1, 1, 16 * 6, dtype=np.float32).reshape(16, 6)
BATCH = {"x": X}


def weights(key):
    return {"w": jax.random.normal(key, (6, 5)), "b": jnp.zeros(5)}


def loss_fn(params, batch, rng):
    whole = jzero.gather(params)
    return jnp.mean((batch["x"] @ whole["w"] + whole["b"]) ** 2)


def test_a_step_follows_the_last_init():
    zero = jzero.Zero(stage=3)
    state = zero.init(weights, optax.sgd(0.0))
    step = zero.train_step(loss_fn)
    state, first = step(state, BATCH)
    state = zero.init(weights, optax.sgd(0.1))
    state, _ = step(state, BATCH)
    _, moved = step(state, BATCH)
    assert float(moved["loss"]) < float(first["loss"])


def test_a_state_of_another_model_is_refused():
    zero = jzero.Zero(stage=3)
    other = zero.init(lambda key: {"a": jnp.ones((8, 3))}, optax.sgd(0.1))
    zero.init(weights, optax.sgd(0.1))
    with pytest.raises(JzeroError, match="not one of the model that zero.init laid out last"):
        zero.train_step(loss_fn)(other, BATCH)


def test_a_donated_state_is_refused():
    zero = jzero.Zero(stage=2)
    before = zero.init(weights, optax.sgd(0.1))
    step = zero.train_step(loss_fn)
    step(before, BATCH)
    for use in (lambda: step(before, BATCH), lambda: zero.params(before)):
        with pytest.raises(JzeroError, match="given to an earlier step"):
            use()
    with pytest.raises(JzeroError, match=r"not a jzero.State: call step\(state, batch\)"):
        step(BATCH, before)


def test_two_steps_that_scan_different_stacks():
    stacks = {name: jnp.stack([jnp.eye(3) * 0.9] * 8) for name in ("a", "b")}

    def scans(name):
        def loss(params, batch, rng):
            def layer(x, w):
                return jnp.tanh(x @ jzero.gather(w)), None

            return jnp.mean(jax.lax.scan(layer, batch["x"][:, :3], params[name])[0] ** 2)

        return loss

    zero = jzero.Zero(stage=3)
    state = zero.init(stacks, optax.sgd(0.1))
    one, two = zero.train_step(scans("a")), zero.train_step(scans("b"))
    losses = []
    for step in (one, two, one, two):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[0] and losses[3] < losses[1]


def test_skipped_steps_are_said_with_the_leaf(caplog):
    class Deep(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(11)])

        def __call__(self, x):
            for i, layer in enumerate(self.layers):
                x = layer(x)
                if i == 2:  # layers/10 comes before layers/2 in a sorted dict
                    x = x + jnp.sum(layer.bias[...] * 0) * jnp.sqrt(jnp.float32(-1))
            return x

    zero = jzero.Zero(stage=2)
    state = zero.init(Deep, optax.adam(0.1))
    step = zero.train_step(lambda model, batch, rng: jnp.nan_to_num(model(batch["x"])).mean())
    with caplog.at_level(logging.WARNING, "jzero"):
        for _ in range(3):
            state, _ = step(state, BATCH)
        step.finish()
    said = [r.getMessage() for r in caplog.records]
    assert said == [
        f"step {n} skipped, {n} in a row: the first gradient that is not finite is that of "
        f"layers/2/bias"
        for n in (1, 2)
    ]


def test_a_skipped_step_of_another_model_names_a_leaf_of_that_one(caplog):
    def loss(params, batch, rng):
        bad = list(params)[-1]
        return sum(
            jnp.sum(jzero.gather(w)) * (jnp.nan if k == bad else 1) for k, w in params.items()
        )

    zero = jzero.Zero(stage=2)
    step = zero.train_step(loss)
    with caplog.at_level(logging.WARNING, "jzero"):
        for names in ("a", "bc"):
            params = {name: jnp.ones((8, 2)) for name in names}
            state, _ = step(zero.init(params, optax.sgd(0.1)), BATCH)
        step.finish()
    assert [r.getMessage().split(" of ")[-1] for r in caplog.records] == ["a", "c"]


def test_the_optimizer_state_has_true_shapes():
    zero = jzero.Zero(stage=1)
    state = zero.init(lambda key: {"w": jnp.ones((3, 5))}, optax.adam(0.1))
    assert state.opt_state[0].mu["w"].shape != (3, 5), "stored padded"
    assert zero.opt_state(state)[0].mu["w"].shape == (3, 5)


def test_monitors_write_what_the_steps_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "csv_monitor": {"enabled": True, "job_name": "job"},
    }
    zero = jzero.Zero(config)
    state = zero.init(weights, optax.sgd(0.1))
    step = zero.train_step(loss_fn)
    for _ in range(2):
        state, metrics = step(state, BATCH)
    step.finish()
    lines = (tmp_path / "runs/job/Train_Samples_train_loss.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["16", "32"]
    assert float(lines[1].split(",")[1]) == pytest.approx(float(metrics["loss"]))


def test_a_monitor_that_fails_costs_no_state(tmp_path):
    class Full(Monitor):
        def write(self, samples, metrics):
            raise OSError("the disk is full")

    zero = jzero.Zero(stage=3)
    state = zero.init(weights, optax.sgd(0.1))
    step = zero.train_step(loss_fn, monitor=Full(zero.config, tmp_path))
    state, _ = step(state, BATCH)
    jax.block_until_ready(state)
    state, _ = step(state, BATCH)  # looks at the first one behind it
    with pytest.raises(OSError, match="disk is full"):
        step(state, BATCH)
    state, _ = step(state, BATCH)
    with pytest.raises(OSError, match="disk is full"):
        step.finish()
    assert int(state.step) == 3


def test_a_module_may_hold_plain_arrays():
    class Masked(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(6, 6, rngs=rngs)
            self.mask = jnp.array([1.0, 0, 1, 0, 1, 0])
            self.table = np.arange(6, dtype=np.float32)

        def __call__(self, x):
            return self.layer(x) * self.mask + self.table

    def loss(model, batch, rng):
        return jnp.mean(model(batch["x"]) ** 2)

    zero = jzero.Zero(stage=3)
    state = zero.init(Masked, optax.sgd(0.1))
    step = zero.train_step(loss)
    model = Masked(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    for _ in range(2):
        state, _ = step(state, BATCH)
        optimizer.update(model, nnx.grad(loss)(model, BATCH, None))
    np.testing.assert_allclose(
        zero.params(state)["layer"]["kernel"], model.layer.kernel[...], rtol=1e-5, atol=1e-6
    )


def test_a_train_state_brings_its_optimizer():
    module = nn.Dense(5)
    variables = module.init(jax.random.key(0), X)
    theirs = TrainState.create(apply_fn=module.apply, params=variables["params"], tx=optax.sgd(0.5))

    def loss(model, batch, rng):
        return jnp.mean(model(batch["x"]) ** 2)

    zero = jzero.Zero(stage=3)
    state, _ = zero.train_step(loss)(zero.init(theirs), BATCH)
    grads = jax.grad(lambda p: jnp.mean(module.apply({"params": p}, X) ** 2))(theirs.params)
    want = theirs.apply_gradients(grads=grads).params["kernel"]
    np.testing.assert_allclose(zero.params(state)["kernel"], want, rtol=1e-5, atol=1e-6)
