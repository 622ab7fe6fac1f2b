"""Parameters out of the ordinary: tied, frozen, unused, tiny, empty, and of other dtypes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import (
    KINDS,
    Net,
    assert_close,
    make_batch,
    numpy,
    reference,
    run,
    total_and_weight,
)

import jzero
from jzero import JzeroError
from jzero.hlo import collectives, elements_by

STAGES = (0, 1, 2, 3)


def step_once(zero, init, tx, loss_fn, batch, steps=1, **options):
    state = zero.init(init, tx, **options)
    step = zero.train_step(loss_fn)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return numpy(zero.params(state)), metrics, state


@pytest.mark.parametrize("kind, stage", list(zip(KINDS, (3, 2, 1), strict=True)))
def test_tied_weights_get_both_gradients(kind, stage):
    net = Net(kind, tied=True)
    found, history, _ = run(net, jzero.Zero(stage=stage), steps=2)
    _, want, _, norms = reference(net, steps=2)
    assert_close(found, want)
    np.testing.assert_allclose([m["grad_norm"] for m in history], norms, rtol=1e-5)
    assert not any("head" in path for path in found)  # stored once


@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_a_leaf_read_often_add_up_in_the_dtype_of_the_reduction(stage):
    """Two that fit fp16 alone, and not together; and 600 of which bf16 would lose half."""

    def tied(params, batch, rng):
        reads = [jzero.gather(params["w"]).astype(jnp.float32) for _ in range(2)]
        return sum(jnp.sum(read * 300_000) for read in reads) + 0 * jnp.sum(batch["x"])

    def looped(params, batch, rng):
        def body(total, _):
            return total + jnp.sum(jzero.gather(params["w"]).astype(jnp.float32)), None

        total, _ = jax.lax.scan(body, jnp.float32(0), length=600)
        return total + 0 * jnp.sum(batch["x"])

    def init(key):
        return {"w": jnp.zeros(64)}

    batch = {"x": np.ones((32, 1), np.float32)}
    wide = {"stage": stage, "communication_dtype": "fp32"}
    zero = jzero.Zero(precision="fp16", loss_scale=1.0, **wide)
    _, metrics, _ = step_once(zero, init, optax.sgd(1e-9), tied, batch)
    assert float(metrics["grad_norm"]) == pytest.approx(600_000 * 8, rel=1e-3)
    for threshold in (0, 100):
        options = {"accumulation": 4, "persistence_threshold": threshold} | wide
        zero = jzero.Zero(precision="bf16", **options)
        found, _, _ = step_once(zero, init, optax.sgd(1.0), looped, batch)
        np.testing.assert_allclose(found["w"], -600, rtol=1e-2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_gathers_of_the_users_own_are_not_merged(stage):
    zero = jzero.Zero(stage=stage)

    def loss_fn(params, batch, rng):
        x = batch["x"] @ jzero.gather(params["w"])  # [8, 8] on each of 8 devices
        name = zero.axis_name
        stacked = [jax.lax.all_gather(x, name, axis=axis) for axis in (0, 1)]
        three = jax.lax.all_gather(jnp.float32(3), name)[0]
        return jnp.mean(stacked[0][0] ** 2) + jnp.mean(stacked[1][0] ** 3) + three

    w = np.asarray(jax.random.normal(jax.random.key(0), (4, 8)))
    x = np.asarray(jax.random.normal(jax.random.key(1), (64, 4)))
    _, metrics, _ = step_once(zero, lambda key: {"w": w}, optax.sgd(0.1), loss_fn, {"x": x})
    rows = (x @ w).reshape(8, 8, 8)  # device, row, column
    want = np.mean(rows[0] ** 2) + np.mean(rows[:, 0] ** 3) + 3
    assert float(metrics["loss"]) == pytest.approx(want, rel=1e-5)


# Frozen.


def frozen_reference(net, frozen, steps):
    params, logits = net.fresh()
    labels = jax.tree_util.tree_map_with_path(
        lambda path, _: "off" if frozen in jax.tree_util.keystr(path) else "on", params
    )
    tx = optax.partition({"on": optax.adamw(1e-2), "off": optax.set_to_zero()}, labels)

    def loss_fn(params, batch):
        total, weight = total_and_weight(logits(params, batch["tokens"]), batch)
        return total / weight

    @jax.jit
    def step(params, opt_state, batch):
        updates, opt_state = tx.update(jax.grad(loss_fn)(params, batch), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    opt_state = tx.init(params)
    for i in range(steps):
        params, opt_state = step(params, opt_state, make_batch(i))
    return numpy(params)


@pytest.mark.parametrize("kind, stage", list(zip(KINDS, (3, 2, 1), strict=True)))
def test_frozen_parameters_stay(kind, stage):
    net = Net(kind)
    zero = jzero.Zero(stage=stage, accumulation=2)
    state = zero.init(
        net.init, optax.adamw(1e-2), sample=net.sample, trainable=lambda path: "blocks" not in path
    )
    first = numpy(zero.params(state))
    step = zero.train_step(net.loss)
    for i in range(2):
        state, _ = step(state, make_batch(i))
    found = numpy(zero.params(state))
    assert_close(found, frozen_reference(net, "blocks", 2))
    frozen = [path for path in found if "blocks" in path]
    assert frozen and all(np.array_equal(found[path], first[path]) for path in frozen)
    # No moments: neither arrays of their shapes nor of their names.
    moments = numpy(state.opt_state)
    assert not any("blocks" in path for path in moments)
    trained = sum(x.size for path, x in found.items() if path not in frozen)
    assert sum(x.size for x in moments.values()) == 2 * trained + 1


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_frozen_parameters_shard_at_stage_3_and_have_no_master(precision):
    zero = jzero.Zero(stage=3, precision=precision)
    state = zero.init(
        {"a": np.ones((16, 8), np.float32), "b": np.ones((16, 8), np.float32)},
        optax.adam(1e-3),
        trainable={"a": True, "b": False},
    )
    assert state.params["b"].addressable_shards[0].data.shape == (2, 8)
    assert "b" not in state.master
    assert state.params["b"].dtype == (jnp.bfloat16 if precision == "bf16" else jnp.float32)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_gradient_is_not_reduced(stage):
    """Its elements appear in no reduction of the compiled step."""
    sizes = {"a": (16, 8), "b": (24, 32)}
    init = {k: np.ones(v, np.float32) for k, v in sizes.items()}

    def loss_fn(params, batch, rng):
        w = jzero.gather(params)
        return jnp.sum((batch["x"] @ w["a"]) ** 2) + jnp.sum(w["b"] ** 2)

    zero = jzero.Zero(stage=stage)
    zero.init(init, optax.adam(1e-3), trainable={"a": True, "b": False})
    batch = {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)}
    compiled = zero.train_step(loss_fn).lower(batch).compile()
    found = collectives(compiled, zero.mesh.storage)
    reduced = elements_by(found, "all-reduce") + elements_by(found, "reduce-scatter")
    assert 16 * 8 <= reduced < 24 * 32


def test_what_trainable_cannot_be():
    zero = jzero.Zero(stage=3)
    init = {"a": np.ones((16, 8), np.float32), "b": np.ones((16, 8), np.float32)}
    with pytest.raises(JzeroError, match="trainable"):
        zero.init(init, optax.adam(1e-3), trainable={"a": True})


# Unused.


@pytest.mark.parametrize("stage", STAGES)
def test_an_unused_parameter_has_zero_gradient_and_still_decays(stage):
    init = {"used": np.ones((16, 4), np.float32), "unused": np.full((5, 3), 2, np.float32)}

    def loss_fn(params, batch, rng):
        return jnp.mean(batch["x"] @ jzero.gather(params["used"]))

    zero = jzero.Zero(stage=stage, accumulation=2)
    batch = {"x": np.ones((16, 16), np.float32)}
    found, metrics, state = step_once(
        zero, init, optax.adamw(0.1, weight_decay=0.5), loss_fn, batch, steps=3
    )
    np.testing.assert_allclose(found["unused"], 2 * (1 - 0.1 * 0.5) ** 3, rtol=1e-6)
    assert not metrics["skipped"]
    mu = [x for path, x in numpy(state.opt_state).items() if path.endswith("mu/unused")]
    assert len(mu) == 1 and not mu[0].any()


def test_a_parameter_that_only_some_micro_batches_use():
    init = {"a": np.ones((8, 4), np.float32), "b": np.ones((8, 4), np.float32)}

    def choosing(zero):
        def loss_fn(params, batch, rng):
            def use(name):
                return lambda x: jnp.sum(x @ jzero.gather(params[name]))

            # One choice for all devices, so that their collectives stay in step.
            flag = jax.lax.pmax(batch["flag"][0], zero.axis_name)
            return jax.lax.cond(flag > 0, use("a"), use("b"), batch["x"])

        return loss_fn

    flag = np.tile(np.array([1.0, 0.0], np.float32), 8)
    batch = {"x": np.ones((16, 8), np.float32), "flag": flag}
    for stage in (1, 3):
        zero = jzero.Zero(stage=stage, accumulation=2)
        found, _, _ = step_once(zero, init, optax.sgd(1.0), choosing(zero), batch)
        assert_close(found, {k: np.full((8, 4), 0.5) for k in init})


# Other dtypes and sizes.


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_leaves_of_every_sort_in_a_pytree(stage, precision):
    def init(key):
        return {
            "w": jnp.ones((16, 4)),
            "tiny": jnp.ones((3,)),
            "one": jnp.ones((1, 1)),
            "scalar": jnp.float32(2.0),
            "empty": jnp.zeros((0, 4)),
            "table": jnp.arange(16, dtype=jnp.int32) % 4,
            "mask": jnp.arange(4) % 2 == 0,
            "key": jax.random.key(7),
            "nothing": None,
        }

    def loss_fn(params, batch, rng):
        p = jzero.gather(params)
        assert p["w"].shape == (16, 4) and p["empty"].shape == (0, 4) and p["nothing"] is None
        assert p["table"].dtype == jnp.int32 and p["mask"].dtype == bool
        noise = jax.random.uniform(p["key"], (4,))  # the same on all devices
        y = (batch["x"] @ p["w"])[:, p["table"]] @ jnp.ones((16,)) * p["scalar"]
        extra = jnp.where(p["mask"], noise, 0).sum() + p["tiny"].sum() + p["one"].sum()
        return jnp.mean(y) + extra + p["empty"].sum()

    zero = jzero.Zero(stage=stage, precision=precision)
    batch = {"x": np.ones((8, 16), np.float32)}
    found, metrics, state = step_once(zero, init, optax.adam(0.1), loss_fn, batch)
    start = init(None)
    assert np.isfinite(metrics["loss"])
    for path in ("w", "tiny", "one", "scalar"):
        np.testing.assert_allclose(found[path], np.asarray(start[path]) - 0.1, rtol=1e-4)
    for path in ("table", "mask", "empty"):
        assert np.array_equal(found[path], start[path]) and found[path].dtype == start[path].dtype
    assert np.array_equal(found["key"], jax.random.key_data(start["key"]))


@pytest.mark.parametrize("stage", [1, 3])
def test_masked_and_partitioned_optimizers(stage):
    init = {"a": np.ones((16, 8), np.float32), "b": np.ones((7, 3), np.float32)}

    def loss_fn(params, batch, rng):
        p = jzero.gather(params)
        return jnp.mean(batch["x"] @ p["a"]) + p["b"].sum()

    batch = {"x": np.ones((8, 16), np.float32)}
    labels = {"a": "on", "b": "off"}
    for tx in (
        optax.partition({"on": optax.adamw(0.1), "off": optax.set_to_zero()}, labels),
        optax.chain(
            optax.masked(optax.adamw(0.1), {"a": True, "b": False}),
            optax.masked(optax.set_to_zero(), {"a": False, "b": True}),
        ),
    ):
        zero = jzero.Zero(stage=stage)
        found, _, _ = step_once(zero, init, tx, loss_fn, batch, steps=2)
        assert np.array_equal(found["b"], init["b"])
        grads = {"a": np.full((16, 8), 1 / 8, np.float32), "b": np.ones((7, 3), np.float32)}
        params, opt_state = init, tx.init(init)
        for _ in range(2):
            updates, opt_state = tx.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
        assert_close(found, params)


# LoRA.


class Lora(nnx.Module):
    def __init__(self, rngs):
        self.layer = nnx.LoRA(16, 2, 24, base_module=nnx.Linear(16, 24, rngs=rngs), rngs=rngs)

    def __call__(self, x):
        return self.layer(x)


@pytest.mark.parametrize("stage", [1, 3])
def test_lora_trains_only_its_two_matrices(stage):
    def loss_fn(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"]) - 1))

    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(16, 16)).astype(np.float32)}
    zero = jzero.Zero(stage=stage, precision="bf16")
    state = zero.init(lambda rngs: Lora(rngs), optax.adam(1e-2), trainable=lambda p: "lora" in p)
    first = numpy(zero.params(state))
    step = zero.train_step(loss_fn)
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    last = numpy(zero.params(state))
    lora = [path for path in first if "lora" in path]
    assert len(lora) == 2
    assert losses[-1] < losses[0] * 0.9
    for path in first:
        assert np.array_equal(first[path], last[path]) == (path not in lora), path
    assert set(state.master) == set(lora)
    trained = sum(first[path].size for path in lora)
    assert sum(x.size for x in numpy(state.opt_state).values()) <= 2 * trained + 1 + 4 * 16


def test_linen_lora_like_adapters():
    class Adapter(nn.Module):
        @nn.compact
        def __call__(self, x):
            a = self.param("lora_a", nn.initializers.normal(), (16, 2))
            return nn.Dense(8)(x) + x @ a @ self.param("lora_b", nn.initializers.zeros, (2, 8))

    zero = jzero.Zero(stage=3)
    state = zero.init(
        Adapter(), optax.adam(1e-2), sample=jnp.ones((1, 16)), trainable=lambda p: "lora" in p
    )
    first = numpy(zero.params(state))
    step = zero.train_step(lambda m, b, rng: jnp.mean(jnp.square(m(b["x"]) - 1)))
    state, _ = step(state, {"x": np.ones((8, 16), np.float32)})
    last = numpy(zero.params(state))
    changed = {path for path in first if not np.array_equal(first[path], last[path])}
    assert changed == {"lora_b"}  # lora_a has no gradient while lora_b is zero
