"""Optimizers against their update rules written in NumPy, five steps each, with a schedule."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jzero.config import build_optimizer, load
from jzero.config.muon import is_matrix, orthogonalise
from jzero.errors import ConfigError

SHAPES = {"dense": {"kernel": (4, 6), "bias": (6,)}, "embed": {"table": (5, 3)}}
STEPS = 5


def leaves(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: rng.normal(size=shape), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )


def jzero_result(kind, scheduler=None, **params):
    config = {"optimizer": {"type": kind, "params": params}}
    if scheduler:
        config["scheduler"] = scheduler
    tx, schedule = build_optimizer(load(config))
    weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), leaves(0))
    state = tx.init(weights)

    @jax.jit
    def update(grads, state, weights):
        updates, state = tx.update(grads, state, weights)
        return optax.apply_updates(weights, updates), state

    for i in range(STEPS):
        grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), leaves(i + 1))
        weights, state = update(grads, state, weights)
    return weights, schedule


def first_update(tx: optax.GradientTransformation, weights: Any, grads: Any) -> Any:
    return tx.update(grads, tx.init(weights), weights)[0]


def reference(rule, rate):
    """Run `rule(name, w, g, memory, t, lr) -> w` in float64, leaf by leaf."""
    weights, memory = leaves(0), {}

    def one(path, w, g, t):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return rule(name, w, g, memory.setdefault(name, {}), t, rate(t - 1))

    for t in range(1, STEPS + 1):
        weights = jax.tree_util.tree_map_with_path(
            lambda path, w, g, t=t: one(path, w, g, t), weights, leaves(t)
        )
    return weights


def same(actual, expected, rtol=2e-5):
    jax.tree.map(
        lambda a, e: np.testing.assert_allclose(a, e, rtol=rtol, atol=1e-5), actual, expected
    )


def adam_direction(g, m, t, b1, b2, eps):
    m["m"] = b1 * m.get("m", 0) + (1 - b1) * g
    m["v"] = b2 * m.get("v", 0) + (1 - b2) * g * g
    return (m["m"] / (1 - b1**t)) / (np.sqrt(m["v"] / (1 - b2**t)) + eps)


LINEAR = {
    "type": "WarmupLR",
    "params": {"warmup_num_steps": 3, "warmup_type": "linear", "warmup_min_lr": 0.01},
}


@pytest.mark.parametrize(("kind", "mode"), [("Adam", None), ("AdamW", None), ("adamw", False)])
@pytest.mark.parametrize("scheduler", [None, LINEAR])
def test_adam_decays_decoupled(kind, mode, scheduler):
    extra = {} if mode is None else {"adam_w_mode": mode}
    got, rate = jzero_result(
        kind, scheduler, lr=0.1, betas=[0.8, 0.95], eps=1e-3, weight_decay=0.1, **extra
    )

    def rule(name, w, g, m, t, lr):
        return w - lr * (adam_direction(g, m, t, 0.8, 0.95, 1e-3) + 0.1 * w)

    same(got, reference(rule, rate))


def test_adam_with_l2():
    got, rate = jzero_result("Adam", lr=0.1, weight_decay=0.1, adam_w_mode=False)

    def rule(name, w, g, m, t, lr):
        return w - lr * adam_direction(g + 0.1 * w, m, t, 0.9, 0.999, 1e-8)

    same(got, reference(rule, rate))


def test_adamw_defaults_decay_nothing():
    got, rate = jzero_result("AdamW")
    assert rate(0) == 1e-3

    def rule(name, w, g, m, t, lr):
        return w - lr * adam_direction(g, m, t, 0.9, 0.999, 1e-8)

    same(got, reference(rule, rate))


@pytest.mark.parametrize(("low", "high"), [(0.01, 10.0), (1.4, 1.5)])
def test_lamb_clamps_the_trust_ratio(low, high):
    got, rate = jzero_result("Lamb", lr=0.05, weight_decay=0.1, min_coeff=low, max_coeff=high)

    def rule(name, w, g, m, t, lr):
        update = adam_direction(g, m, t, 0.9, 0.999, 1e-8) + 0.1 * w
        ratio = np.clip(np.linalg.norm(w) / np.linalg.norm(update), low, high)
        return w - lr * ratio * update

    same(got, reference(rule, rate))


def test_lamb_leaves_zero_parameters_unscaled():
    tx, _ = build_optimizer(load({"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}))
    weights = {"w": jnp.zeros(3), "none": jnp.zeros((0, 2))}
    grads = {"w": jnp.ones(3), "none": jnp.zeros((0, 2))}
    updates = first_update(tx, weights, grads)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-5)
    assert updates["none"].shape == (0, 2)


def test_lion():
    got, rate = jzero_result("Lion", lr=0.01, betas=[0.9, 0.8], weight_decay=0.2)

    def rule(name, w, g, m, t, lr):
        momentum = m.get("m", 0)
        m["m"] = 0.8 * momentum + 0.2 * g
        return w - lr * (np.sign(0.9 * momentum + 0.1 * g) + 0.2 * w)

    same(got, reference(rule, rate))


def test_lion_defaults_are_deepspeeds():
    got, _ = jzero_result("Lion")
    tx = optax.lion(1e-3, 0.9, 0.999, weight_decay=0.0)
    weights = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), leaves(0))
    state = tx.init(weights)
    for i in range(STEPS):
        grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), leaves(i + 1))
        updates, state = tx.update(grads, state, weights)
        weights = optax.apply_updates(weights, updates)
    same(got, weights)


def test_adagrad_as_torch_has_it():
    got, rate = jzero_result("Adagrad", lr=0.1, eps=0.5, weight_decay=0.1)

    def rule(name, w, g, m, t, lr):
        g = g + 0.1 * w
        m["s"] = m.get("s", 0) + g * g
        return w - lr * g / (np.sqrt(m["s"]) + 0.5)

    same(got, reference(rule, rate))


def test_adagrad_never_divides_by_zero():
    tx, rate = build_optimizer(load({"optimizer": {"type": "Adagrad"}}))
    assert rate(0) == 1e-2
    weights = {"w": jnp.ones(3)}
    updates = first_update(tx, weights, {"w": jnp.zeros(3)})
    np.testing.assert_array_equal(updates["w"], 0.0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd(nesterov):
    got, rate = jzero_result("SGD", lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=nesterov)

    def rule(name, w, g, m, t, lr):
        g = g + 0.1 * w
        m["b"] = 0.9 * m.get("b", 0) + g
        return w - lr * (g + 0.9 * m["b"] if nesterov else m["b"])

    same(got, reference(rule, rate))


def test_plain_sgd_has_no_state():
    tx, _ = build_optimizer(load({"optimizer": {"type": "SGD"}}))
    assert [x.shape for x in jax.tree.leaves(tx.init({"w": jnp.ones(3)}))] == [()]  # the count


def newton_schulz(x):
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


@pytest.mark.parametrize(
    ("rates", "expected"),
    [({}, (0.02, 3e-4)), ({"lr": 0.1}, (0.1, 0.1)), ({"lr": 0.1, "adam_lr": 0.05}, (0.1, 0.05))],
)
def test_muon(rates, expected):
    got, rate = jzero_result("Muon", weight_decay=0.1, **rates)
    assert rate(0) == expected[0]

    def rule(name, w, g, m, t, lr):
        if name != "dense/kernel":
            return w - expected[1] * (adam_direction(g, m, t, 0.9, 0.95, 1e-10) + 0.1 * w)
        m["m"] = 0.95 * m.get("m", 0) + 0.05 * g
        update = newton_schulz(0.95 * m["m"] + 0.05 * g) * (6 / 4) ** 0.5
        return w - lr * (update + 0.1 * w)

    same(got, reference(rule, rate), rtol=2e-4)


def test_muon_takes_stacked_layers_one_by_one():
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)
    whole = orthogonalise(jnp.asarray(x))
    for layer in range(3):
        np.testing.assert_allclose(whole[layer], orthogonalise(jnp.asarray(x[layer])), atol=1e-5)
    values = np.linalg.svd(np.asarray(whole), compute_uv=False)
    assert 0.5 < values.min() and values.max() < 1.5


@pytest.mark.parametrize(
    ("name", "ndim", "stacked", "expected"),
    [
        ("layers/mlp/kernel", 2, None, True),
        ("layers/mlp/kernel", 3, None, True),
        ("layers/mlp/bias", 1, None, False),
        ("layers/norm/scale", 2, None, False),
        ("layers/norm/scale/value", 2, None, False),
        ("token_embedding/table", 2, None, False),
        ("lm_head/kernel", 2, None, False),
        ("layers/gain", 2, lambda name: True, False),
        ("layers/kernel", 3, lambda name: True, True),
        ("kernel", 2, lambda name: False, True),
    ],
)
def test_what_muon_takes_for_a_matrix(name, ndim, stacked, expected):
    assert is_matrix(name, ndim, stacked) is expected


def test_the_schedule_follows_the_optimizers_own_count():
    tx, schedule = build_optimizer(
        load({"optimizer": {"type": "SGD", "params": {"lr": 1.0}}, "scheduler": LINEAR})
    )
    weights = {"w": jnp.ones(3)}
    state: Any = tx.init(weights)
    updates: Any
    for i in range(4):
        # A skipped step: the new state is thrown away, and with it the count.
        tx.update({"w": jnp.full(3, jnp.nan)}, state, weights)
        updates, state = tx.update({"w": jnp.ones(3)}, state, weights)
        np.testing.assert_allclose(updates["w"], -schedule(i), rtol=1e-6)


def test_no_optimizer():
    with pytest.raises(ConfigError, match="^optimizer: absent from the configuration; add one"):
        build_optimizer(load(stage=1))
