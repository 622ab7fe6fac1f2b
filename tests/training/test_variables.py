"""What a model holds beside its parameters: batch statistics, dropout keys and counts."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import assert_close, numpy

import jzero
from jzero.paths import flatten

X = np.random.default_rng(0).normal(size=(32, 6)).astype(np.float32) * np.arange(1, 7) + 3
BATCH = {"x": X, "y": np.sign(X[:, :1])}


class NnxNorm(nnx.Module):
    def __init__(self, rngs, axis_name=None):
        self.dense = nnx.Linear(6, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(8, momentum=0.9, axis_name=axis_name, rngs=rngs)
        self.out = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.norm(self.dense(x))))


class LinenNorm(nn.Module):
    axis_name: tuple[str, ...] | None = None

    @nn.compact
    def __call__(self, x, train=False):
        # Initialising runs outside of any device axis.
        name = None if self.is_initializing() else self.axis_name
        x = nn.Dense(8, use_bias=False, name="dense")(x)
        x = nn.BatchNorm(not train, momentum=0.9, axis_name=name, name="norm")(x)
        return nn.Dense(1, name="out")(nn.relu(x))


def loss_of(kind):
    def loss_fn(model, batch, rng):
        if kind == "nnx":
            out = model(batch["x"])
        else:
            out, _ = model(batch["x"], train=True, mutable=["batch_stats"])
        return jnp.square(out - batch["y"]).mean()

    return loss_fn


def make(kind, axis_name=None):
    if kind == "nnx":
        return (lambda rngs: NnxNorm(rngs, axis_name)), None
    return LinenNorm(axis_name), jnp.ones((1, 6))


def run(kind, zero, steps, axis_name=None):
    model, sample = make(kind, axis_name)
    state = zero.init(model, optax.sgd(0.1), sample=sample)
    first = numpy(zero.params(state))
    step = zero.train_step(loss_of(kind))
    for _ in range(steps):
        state, _ = step(state, BATCH)
    return first, numpy(zero.params(state)), numpy(state.variables), state


def stats(variables, name):
    (found,) = [x for path, x in variables.items() if path.split("/")[-1] == name]
    return found


@pytest.mark.parametrize("kind, stage", [("nnx", 3), ("linen", 2)])
def test_batch_statistics_are_averaged_over_the_group(kind, stage):
    first, _, variables, state = run(kind, jzero.Zero(stage=stage), 1)
    hidden = X @ first["dense/kernel"]
    devices = hidden.reshape(8, 4, 8)
    mean, var = devices.mean(1).mean(0), devices.var(1).mean(0)
    np.testing.assert_allclose(stats(variables, "mean"), 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(stats(variables, "var"), 0.9 + 0.1 * var, rtol=1e-5)
    for x in jax.tree.leaves(state.variables):
        assert x.sharding.is_fully_replicated
        pieces = [np.asarray(s.data) for s in x.addressable_shards if s.data.dtype == np.float32]
        assert all(np.array_equal(pieces[0], piece) for piece in pieces)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_micro_batches_follow_each_other_in_the_statistics(kind):
    first, _, variables, _ = run(kind, jzero.Zero(stage=3, accumulation=2), 1)
    hidden = (X @ first["dense/kernel"]).reshape(8, 2, 2, 8)
    want = np.zeros(8)
    for i in range(2):
        want = 0.9 * want + 0.1 * hidden[:, i].mean(1).mean(0)
    np.testing.assert_allclose(stats(variables, "mean"), want, rtol=1e-5)


@functools.lru_cache
def whole_batch(kind, steps):
    """One device, the whole batch, no jzero."""
    if kind == "nnx":
        model = NnxNorm(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            grads = nnx.grad(lambda model: loss_of(kind)(model, BATCH, None))(model)
            optimizer.update(model, grads)

        for _ in range(steps):
            step(model, optimizer)
        _, params, rest = nnx.split(model, nnx.Param, ...)
        return numpy(nnx.to_pure_dict(params)), numpy(nnx.to_pure_dict(rest))
    module = LinenNorm()
    variables = module.init(jax.random.key(0), X[:1])
    params, rest = variables["params"], {"batch_stats": variables["batch_stats"]}

    @jax.jit
    def step(params, rest):
        def loss(params):
            out, new = module.apply({"params": params, **rest}, X, True, mutable=["batch_stats"])
            return jnp.square(out - BATCH["y"]).mean(), new

        grads, new = jax.grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), new

    for _ in range(steps):
        params, rest = step(params, rest)
    return numpy(params), numpy(rest)


@pytest.mark.parametrize("kind, stage", [("nnx", 3), ("linen", 1)])
def test_synchronised_batch_norm_equals_the_whole_batch(kind, stage):
    zero = jzero.Zero(stage=stage)
    _, params, variables, _ = run(kind, zero, 3, axis_name=zero.axis_name)
    want, want_variables = whole_batch(kind, 3)
    assert_close(params, want)
    assert_close(variables, want_variables)


def test_an_evaluation_leaves_the_statistics_alone():
    zero = jzero.Zero(stage=3)
    state = zero.init(lambda rngs: NnxNorm(rngs), optax.sgd(0.1))
    before = numpy(state.variables)
    loss = zero.eval_step(loss_of("nnx"))(state, BATCH)["loss"]
    assert np.isfinite(loss)
    for path, x in numpy(state.variables).items():
        assert np.array_equal(x, before[path])


# Dropout.


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(8))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(x) * self.scale


class LinenDropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(0.5, deterministic=self.is_initializing())(x)
        return x * self.param("scale", nn.initializers.ones, (8,))


def masks(kind, accumulation=2, steps=3, stage=3, seed=0):
    """Which of 8 x 64 units each device dropped in each micro-batch and step, as numbers."""

    def loss_fn(model, batch, rng):
        x = jnp.ones((64, 8))
        if kind == "nnx":
            out = model(x)
        elif kind == "linen":
            out = model(x, rngs={"dropout": rng})
        else:
            scale = jzero.gather(model["scale"])
            out = jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x * scale, 0)
        seen = (out != 0).reshape(-1)
        # A number that tells masks apart, and puts this device's in a place of its own.
        code = (seen * jax.random.normal(jax.random.key(1), seen.shape)).sum()
        place = batch["place"][0]
        return out.mean(), {"codes": jnp.zeros(8 * accumulation).at[place].set(code)}

    init = {
        "nnx": lambda rngs: Dropped(rngs),
        "linen": LinenDropped(),
        "argument": lambda key: {"scale": jnp.ones(8)},
    }[kind]
    zero = jzero.Zero(stage=stage, accumulation=accumulation)
    sample = jnp.ones((1, 8)) if kind == "linen" else None
    state = zero.init(init, optax.sgd(0.0), seed=seed, sample=sample)
    step = zero.train_step(loss_fn)
    batch = {"place": np.arange(8 * accumulation, dtype=np.int32)}
    found = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        found.append(np.asarray(metrics["codes"]))
    return np.concatenate(found)


@pytest.mark.parametrize("kind", ["nnx", "argument", "linen"])
def test_dropout_differs_everywhere_and_repeats_with_the_seed(kind):
    found = masks(kind)
    assert len(set(found.tolist())) == 8 * 2 * 3 == len(found)
    assert np.array_equal(found, masks(kind))
    assert not np.array_equal(found, masks(kind, seed=1))


@pytest.mark.parametrize("kind", ["nnx", "argument", "linen"])
def test_the_stage_does_not_change_the_draws(kind):
    assert np.array_equal(masks(kind, steps=1, stage=1), masks(kind, steps=1))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dropout(0.5, deterministic=self.is_initializing())(nn.Dense(8)(x)), None


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        rngs = {"params": True, "dropout": True}
        scan = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs=rngs, length=3)
        return scan()(x, None)[0]


def test_the_stage_does_not_change_the_draws_of_scanned_layers():
    def train(stage):
        zero = jzero.Zero(stage=stage)
        state = zero.init(LinenScanned(), optax.sgd(0.1), sample=jnp.ones((1, 8)))
        step = zero.train_step(lambda model, x, rng: jnp.mean(model(x, rngs={"dropout": rng}) ** 2))
        state, metrics = step(state, np.ones((8, 8), np.float32))
        return {"loss": metrics["loss"], **flatten(zero.params(state))}

    want, found = train(2), train(3)
    for path, x in want.items():
        np.testing.assert_allclose(found[path], x, rtol=1e-5, atol=1e-6, err_msg=path)


def test_counts_advance_and_keys_stay():
    zero = jzero.Zero(stage=3, accumulation=2)
    state = zero.init(lambda rngs: Dropped(rngs), optax.sgd(0.0))
    before = numpy(state.variables)
    step = zero.train_step(lambda model, batch, rng: model(batch["x"]).mean())
    for _ in range(3):
        state, _ = step(state, {"x": np.ones((16, 8), np.float32)})
    for path, x in numpy(state.variables).items():
        assert np.array_equal(x, before[path] + 3 * 2 if "count" in path else before[path])
    assert sum("count" in path for path in before) == 1
