"""Loss scaling, steps that are skipped, clipping, and the dtypes of reductions."""

import re
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import assert_close, numpy

import jzero
from jzero import JzeroError
from jzero.precision import Scaling

STAGES = (0, 1, 2, 3)
# 5 and 3 pad over 8 devices.
INIT = {"a": np.full((16, 4), 0.5, np.float32), "b": np.full((5, 3), 0.25, np.float32)}


def make_batch(bad=False, rows=16, seed=0):
    x = np.random.default_rng(seed).normal(size=(rows, 16)).astype(np.float32)
    return {"x": x, "bad": np.full(rows, np.inf if bad else 1.0, np.float32)}


def loss_fn(params, batch, rng):
    p = jzero.gather(params)
    y = (batch["x"].astype(p["a"].dtype) @ p["a"]).astype(jnp.float32)
    return jnp.mean(jnp.square(y)) * batch["bad"].mean() + jnp.square(p["b"]).sum() / 8


def fp16(**section):
    return {
        "train_micro_batch_size_per_gpu": 2,
        "fp16": {"enabled": True, **section},
        "gradient_clipping": 0.0,
    }


class DeepSpeedScaler:
    """DeepSpeed's DynamicLossScaler (runtime/fp16/loss_scaler.py), line by line in Python."""

    def __init__(self, scale, window, hysteresis, consecutive, minimum):
        self.scale, self.window, self.minimum = scale, window, minimum
        self.delay_shift = self.hysteresis = hysteresis
        self.consecutive = consecutive
        self.iteration, self.last_overflow = 0, -1

    def update(self, overflow):
        if overflow:
            if self.delay_shift == 1 or self.hysteresis == 1:
                self.scale = max(self.scale / 2, self.minimum)
            else:
                self.hysteresis -= 1
            self.last_overflow = self.iteration
        else:
            if self.consecutive:
                self.hysteresis = self.delay_shift
            stable = self.iteration - self.last_overflow - 1
            if stable > 0 and stable % self.window == 0:
                if not self.consecutive:
                    self.hysteresis = self.delay_shift
                self.scale *= 2
        self.iteration += 1


SCRIPT = "..x..x.x....xx.....x.xx......xxxx.........x..xx.xxx....."


@pytest.mark.parametrize("window, hysteresis", [(2, 1), (3, 2), (4, 3)])
@pytest.mark.parametrize("consecutive", [False, True])
def test_the_scale_follows_deepspeed(window, hysteresis, consecutive):
    scaling = Scaling(2.0**6, True, window, hysteresis, consecutive, 4.0)
    model = DeepSpeedScaler(2.0**6, window, hysteresis, consecutive, 4.0)
    state = scaling.init()
    for i, event in enumerate(SCRIPT):
        assert float(state.scale) == model.scale, i
        assert int(state.hysteresis) == model.hysteresis, i
        at_minimum = model.scale <= 4.0 and model.hysteresis == 1
        assert bool(scaling.at_minimum(state)) == at_minimum, i
        state = scaling.next(state, jnp.bool_(event == "."))
        model.update(event == "x")
    assert state.scale.dtype == jnp.float32


def test_the_scale_in_a_run():
    """The same in whole training steps, and no step but the bad ones is skipped."""
    section = {"loss_scale_window": 3, "hysteresis": 2, "initial_scale_power": 10}
    zero = jzero.Zero(fp16(**section, min_loss_scale=1), stage=2)
    model = DeepSpeedScaler(2.0**10, 3, 2, False, 1.0)
    state = zero.init(INIT, optax.sgd(1e-3))
    step = zero.train_step(loss_fn)
    for i, event in enumerate(SCRIPT[:24]):
        state, metrics = step(state, make_batch(event == "x"))
        assert float(metrics["loss_scale"]) == model.scale, i
        assert bool(metrics["skipped"]) == (event == "x"), i
        assert np.isfinite(metrics["loss"]) == (event == "."), i
        model.update(event == "x")
    assert int(state.skipped) == SCRIPT[:24].count("x") and int(state.step) == 24


def test_the_default_scale_does_not_overflow_by_itself():
    """2**16 is already infinite in fp16."""
    zero = jzero.Zero(fp16(), stage=3)
    state = zero.init(INIT, optax.sgd(1e-3))
    step = zero.train_step(lambda *args: loss_fn(*args) / 100)
    _, metrics = step(state, make_batch())
    assert float(metrics["loss_scale"]) == 2.0**16 and not metrics["skipped"]


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_numbers_do_not_depend_on_the_scale(stage):
    found = []
    for power in (0, 8):
        zero = jzero.Zero(fp16(initial_scale_power=power), stage=stage)
        state = zero.init(INIT, optax.adam(1e-2))
        step = zero.train_step(loss_fn)
        for i in range(3):
            state, metrics = step(state, make_batch(seed=i))
        found.append((numpy(zero.params(state)), float(metrics["grad_norm"])))
    assert_close(found[0][0], found[1][0], 1e-3)
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-2)


@pytest.mark.parametrize("stage", STAGES)
def test_the_weight_of_many_tokens_does_not_overflow_fp16(stage):
    """Gradients are reduced in fp16 at the size of a mean's, not of a sum over 10,000 tokens."""

    def mean(params, batch, rng):
        w = jzero.gather(params["a"]).astype(jnp.float32)
        return jzero.Mean((w * batch["x"][0]).mean() * 1e4, 1e4)

    zero = jzero.Zero(fp16(initial_scale_power=10), stage=stage, accumulation=2)
    state = zero.init({"a": INIT["a"]}, optax.sgd(1.0))
    batch = {"x": np.ones((32, 1), np.float32)}
    _, metrics = zero.train_step(mean)(state, batch)
    assert not metrics["skipped"]
    np.testing.assert_allclose(metrics["grad_norm"], 1 / 8, rtol=1e-3)


def test_a_static_scale_stays():
    zero = jzero.Zero(fp16(loss_scale=128.0), stage=1)
    state = zero.init(INIT, optax.sgd(1e-3))
    step = zero.train_step(loss_fn)
    for bad in (False, True, True, True, False):
        state, metrics = step(state, make_batch(bad))
        assert float(metrics["loss_scale"]) == 128.0 and bool(metrics["skipped"]) == bad
    assert int(state.skipped) == 3


# Skipped steps.


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(not train, name="norm")(nn.Dense(5)(x))
        return nn.Dense(3)(x)


def normed_loss(model, batch, rng):
    out, _ = model(batch["x"], train=True, mutable=["batch_stats"])
    return jnp.mean(jnp.square(out.astype(jnp.float32))) * batch["bad"].mean()


def copy(tree):
    def one(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x)

    return [(jax.tree_util.keystr(p), one(x)) for p, x in jax.tree_util.tree_leaves_with_path(tree)]


@pytest.mark.parametrize(
    "precision, stage", [("fp32", 0), ("fp32", 3), ("bf16", 1), ("bf16", 3), ("fp16", 2)]
)
def test_a_skipped_step_leaves_everything_alone(precision, stage):
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)
    tx = optax.chain(
        optax.adamw(rate, weight_decay=0.5),
        optax.ema(0.9),
        optax.add_noise(0.01, 0.55, key=0),
    )
    zero = jzero.Zero(stage=stage, precision=precision, accumulation=2)
    state = zero.init(Normed(), tx, sample=jnp.ones((1, 16)))
    step = zero.train_step(normed_loss)
    for i in range(2):
        state, metrics = step(state, make_batch(seed=i))
    assert not metrics["skipped"]
    kept = (state.params, state.master, state.opt_state, state.variables)
    before = copy(kept)
    state, metrics = step(state, make_batch(bad=True))
    assert metrics["skipped"] and int(state.step) == 3 and int(state.skipped) == 1
    after = copy((state.params, state.master, state.opt_state, state.variables))
    for (path, old), (_, new) in zip(before, after, strict=True):
        assert np.array_equal(old, new), path
    state, metrics = step(state, make_batch(seed=2))
    assert not metrics["skipped"] and np.isfinite(metrics["loss"])
    changed = copy((state.params, state.master, state.opt_state, state.variables))
    assert sum(not np.array_equal(a, b) for (_, a), (_, b) in zip(after, changed, strict=True)) > 8


def test_one_bad_micro_batch_of_one_device_skips_the_step():
    zero = jzero.Zero(stage=3, accumulation=2)
    state = zero.init(INIT, optax.sgd(1e-3))
    batch = make_batch()
    batch["x"][7] = np.nan
    state, metrics = zero.train_step(loss_fn)(state, batch)
    assert metrics["skipped"]
    for path, x in numpy(zero.params(state)).items():
        assert np.array_equal(x, INIT[path])


def test_an_overflow_at_the_minimum_scale_is_an_error():
    section = {"initial_scale_power": 1, "min_loss_scale": 1, "hysteresis": 1}

    def broken(params, batch, rng):
        p = jzero.gather(params)
        return jnp.mean(batch["x"] @ p["a"].astype(jnp.float32)) + jnp.sum(
            p["b"].astype(jnp.float32) * batch["bad"].mean()
        )

    zero = jzero.Zero(fp16(**section), stage=3)
    state = zero.init(INIT, optax.sgd(1e-3))
    step = zero.train_step(broken)
    state, _ = step(state, make_batch())  # fine
    state, _ = step(state, make_batch(bad=True))  # 2 becomes 1
    state, metrics = step(state, make_batch(bad=True))  # nothing below 1
    assert metrics["skipped"]
    jax.block_until_ready(state)
    with pytest.raises(JzeroError) as caught:
        for _ in range(50):
            time.sleep(0.02)
            state, _ = step(state, make_batch())
    text = str(caught.value)
    assert "step 3" in text and "minimum loss scale 1" in text
    assert "that of b" in text and "bf16" in text and "\n" not in text


# Clipping.


def exact_gradients(batch):
    x, a, b = batch["x"].astype(np.float64), INIT["a"], INIT["b"]
    y = x @ a
    return {"a": 2 * x.T @ y / y.size, "b": 2 * b.astype(np.float64) / 8}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_clipping_is_by_the_norm_of_the_whole_gradient(stage, accumulation):
    batch, clip = make_batch(), 0.3
    grads = exact_gradients(batch)
    norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
    assert norm > 2 * clip
    zero = jzero.Zero(stage=stage, gradient_clipping=clip, accumulation=accumulation)
    state = zero.init(INIT, optax.sgd(1.0))
    state, metrics = zero.train_step(loss_fn)(state, batch)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm_clipped"], clip, rtol=1e-4)
    want = {path: INIT[path] - g * clip / (norm + 1e-6) for path, g in grads.items()}
    assert_close(zero.params(state), want)


def test_a_small_gradient_is_not_clipped():
    zero = jzero.Zero(stage=3, gradient_clipping=100.0)
    state = zero.init(INIT, optax.sgd(1.0))
    state, metrics = zero.train_step(loss_fn)(state, make_batch())
    assert float(metrics["grad_norm"]) == float(metrics["grad_norm_clipped"])


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (2, 2), (3, 1)])
def test_gradients_may_be_summed_over_devices(stage, accumulation):
    config = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "gradient_allreduce_op": "sum",
        "gradient_clipping": 0.0,
    }
    zero = jzero.Zero(config)
    state = zero.init(INIT, optax.sgd(0.01))
    state, metrics = zero.train_step(loss_fn)(state, make_batch())
    grads = exact_gradients(make_batch())
    assert_close(zero.params(state), {p: INIT[p] - 0.01 * 8 * g for p, g in grads.items()})
    norm = np.sqrt(sum(np.square(g).sum() for g in grads.values()))
    np.testing.assert_allclose(metrics["grad_norm"], 8 * norm, rtol=1e-5)


# Dtypes.


def lowered(stage, accumulation=1, **config):
    zero = jzero.Zero(stage=stage, accumulation=accumulation, **config)
    zero.init(INIT, optax.adam(1e-3))
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch())
    return zero.train_step(loss_fn).lower(batch)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", [None, "fp32", "bf16"])
def test_gradients_are_reduced_in_the_communication_dtype(stage, dtype):
    """In the program as traced: XLA:CPU itself widens bf16 reductions."""
    text = lowered(stage, precision="bf16", communication_dtype=dtype).as_text()
    op = "reduce_scatter" if stage else "all_reduce"
    kinds = reductions(text, op)
    want = "f32" if dtype == "fp32" else "bf16"
    shapes = ("16x4", "5x3") if stage == 0 else ("16x4",)
    for shape in shapes:
        assert (shape, want) in kinds, (shape, kinds)
        assert (shape, "f32" if want == "bf16" else "bf16") not in kinds


def reductions(text, op):
    """(shape, dtype) of the operands of each reduction in StableHLO."""
    found = set()
    for block in re.split(rf'"stablehlo\.{op}"', text)[1:]:
        signature = re.search(r"\}\) : \(tensor<((?:\d+x)*)(\w+)>", block)
        found.add((signature[1].rstrip("x"), signature[2]))
    return found


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_the_accumulator_has_its_dtype(stage, dtype):
    """The loop over micro-batches carries the sum in fp32 unless told otherwise."""
    text = lowered(stage, 2, precision="bf16", accumulation_dtype=dtype).as_text()
    shape = "16x4" if stage == 1 else "2x4"
    (loop,) = [line for line in text.splitlines() if "stablehlo.while" in line and shape in line]
    want = "bf16" if dtype == "bf16" else "f32"
    carried = loop.rsplit(" : ", 1)[1]
    assert f"tensor<{shape}x{want}>" in carried


def test_a_bf16_accumulator_is_less_exact():
    """What the dtypes are for: many micro-batches of equal gradients."""
    norms = {}
    for dtype in ("fp32", "bf16"):
        zero = jzero.Zero(stage=2, precision="bf16", accumulation=16, accumulation_dtype=dtype)
        state = zero.init({"w": np.ones((16, 4), np.float32)}, optax.sgd(1.0))

        def mean(params, batch, rng):
            return (jzero.gather(params["w"]).astype(jnp.float32) * batch["x"].mean()).sum()

        rows = 1 + np.arange(128, dtype=np.float32) / 1000
        state, metrics = zero.train_step(mean)(state, {"x": rows})
        norms[dtype] = float(metrics["grad_norm"])
    exact = 8 * (1 + np.arange(128) / 1000).mean()
    assert abs(norms["fp32"] - exact) < 0.01 * exact
    assert abs(norms["fp32"] - exact) < abs(norms["bf16"] - exact)


def test_masters_and_moments_are_fp32():
    for precision in ("bf16", "fp16"):
        zero = jzero.Zero(stage=2, precision=precision)
        state = zero.init(INIT, optax.adam(1e-3))
        assert {x.dtype for x in jax.tree.leaves(state.master)} == {jnp.dtype("float32")}
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
        assert {x.dtype for x in moments} == {jnp.dtype("float32")}
        assert all(x.dtype.itemsize == 2 for x in state.params.values())
        assert state.scale.scale.dtype == jnp.float32
