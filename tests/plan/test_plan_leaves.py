"""Plans of models: the specs of a real run, to the byte, on devices that need not be there."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh

import jzero
from jzero import JzeroError
from jzero.explain import stage_table
from jzero.factory import load
from jzero.plan import lay_out, of_model
from jzero.plan.leaves import by_leaf, largest_layer, largest_module

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples" / "lm" / "model.py"


def batch(rows):
    return {
        "x": jax.ShapeDtypeStruct((rows, 6), jnp.float32),
        "y": jax.ShapeDtypeStruct((rows, 5), jnp.float32),
    }


class Net(nnx.Module):
    def __init__(self, *, rngs):
        self.a = nnx.Linear(6, 7, rngs=rngs)
        self.b = nnx.Linear(7, 5, rngs=rngs)

    def __call__(self, x):
        return self.b(nnx.relu(self.a(x)))


def square(model, batch, rng):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def net(threshold=0, **config):
    config["zero_optimization"] = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    return jzero.Workload(lambda rngs: Net(rngs=rngs), square, batch, optax.adam(1e-3), config)


CONFIGS = [
    {},
    {"bf16": {"enabled": True}},
    {"fp16": {"enabled": True}},
    {"bf16": {"enabled": True}, "threshold": 40},
]


@pytest.mark.parametrize("config", CONFIGS, ids=["fp32", "bf16", "fp16", "persistent"])
@pytest.mark.parametrize("devices, accumulate", [(8, 1), (3, 4), (1, 1)])
def test_rows_equal_the_real_states_table(config, devices, accumulate):
    given = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulate}
    workload = net(**given, **config)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    zero = jzero.Zero(workload.config, mesh=mesh)
    zero.setup_for(workload.init, workload.tx)
    rows = by_leaf(lay_out(workload, devices))
    for row, real in zip(rows, stage_table(zero.setup, accumulate), strict=True):
        assert row.params_bytes == real["params"]
        assert row.gradients_bytes == real["gradients"]
        assert row.optimizer_bytes == real["master"] + real["optimizer"] + real["other"]
        assert row.total_bytes == real["total"]


def test_the_own_stage_equals_explain():
    zero = jzero.Zero(stage=2, precision="bf16", mesh=Mesh(np.array(jax.devices()), ("data",)))
    state = zero.init(lambda rngs: Net(rngs=rngs), optax.adam(1e-3))
    explained = zero.explain()
    row = by_leaf(lay_out(net(bf16={"enabled": True}, train_micro_batch_size_per_gpu=1), 8))[2]
    assert row.total_bytes == explained.total_bytes_per_device + explained.gradient_bytes
    real = sum(
        x.addressable_shards[0].data.nbytes for x in jax.tree.leaves((state.params, state.master))
    )
    assert row.params_bytes + explained.bytes_per_device["master"] == real


def test_llama_13b_is_the_papers_formula():
    job = lay_out(load(f"{MODEL}:llama_13b"), 8)
    params, rows = job.params, by_leaf(job)
    assert params == 13_015_864_320
    state = [row.params_bytes + row.optimizer_bytes for row in rows]
    exact = [14 * params, 2 * params + 12 * params // 8, 2 * params + 12 * params // 8]
    exact.append(12 * params // 8)
    # Counters and keys are the rest of the state.
    assert [0 <= n - m < 100 for n, m in zip(state, exact, strict=True)] == [True] * 4
    assert [row.comm_elements / params for row in rows] == [2, 2, 2, 3]
    many = by_leaf(lay_out(job.workload, 8, accumulate=4))
    assert [row.comm_elements / params for row in many] == [2, 2, 5, 12]
    assert largest_layer(job) == 4 * 5120**2 + 3 * 5120 * 13824 + 2 * 5120
    assert largest_module(job) == 32000 * 5120


def test_a_list_of_layers_is_known_like_a_stack():
    lm = importlib.import_module("model")
    config = replace(lm.PRESETS["tiny"], vocabulary=64)  # so that a layer is the largest
    sizes = [
        largest_layer(lay_out(lm.workload(replace(config, scan=scan)), 8)) for scan in (True, False)
    ]
    assert sizes == [2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 384 + 2 * 128] * 2


def test_groups_of_devices_reduce_their_shards_over_the_groups():
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "mics_shard_size": 2},
    }
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    workload = jzero.Workload(lambda rngs: Net(rngs=rngs), square, batch, optax.adam(1e-3), config)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))
    zero = jzero.Zero(config, mesh=mesh)
    zero.setup_for(workload.init, workload.tx)
    job = lay_out(workload, 4)
    rows = by_leaf(job)
    assert [row.total_bytes for row in rows] == [row["total"] for row in stage_table(zero.setup)]
    stored = 6 * 7 + 7 * 6 + 8 + 6  # 7x5 as 7x6 or 8x5, biases of 7 and 5 as 8 and 6
    stored -= 7 * 6 - min(8 * 5, 7 * 6)
    assert rows[3].comm_elements == 3 * stored + stored
    assert rows[0].comm_elements == 4 * job.params


def test_padding_is_sent_too():
    job = lay_out(net(bf16={"enabled": True}, train_micro_batch_size_per_gpu=1), 4)
    # 6x7 and 7x5 are stored as 8x7 or 6x8, and 8x5; biases of 7 and 5 as 8.
    stored = min(8 * 7, 6 * 8) + min(8 * 5, 7 * 8) + 8 + 8
    sent = [row.comm_elements for row in by_leaf(job)]
    assert sent == [2 * job.params, 2 * stored, 2 * stored, 3 * stored]


def test_leaves_that_stay_whole_are_reduced_and_gathered_once_a_step():
    config = {
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "threshold": 10**6,
    }
    rows = by_leaf(lay_out(net(**config), 2))
    assert rows[3].comm_elements == rows[1].comm_elements


def test_what_the_optimizer_does_not_look_at_is_gathered_all_the_same():
    def loss_fn(params, batch, rng):
        p = jzero.gather(params)
        return jnp.mean((batch["x"] @ p["used"]) * (batch["x"] @ p["unused"]))

    def init(key):
        return {"used": jnp.ones((6, 8)), "unused": jnp.ones((6, 8))}

    tx = optax.partition(
        {"on": optax.sgd(0.1), "off": optax.set_to_zero()}, {"used": "on", "unused": "off"}
    )
    config = {"train_micro_batch_size_per_gpu": 1}
    job = lay_out(jzero.Workload(init, loss_fn, batch, tx, config), 4)
    rows = by_leaf(job)
    assert [row.comm_elements for row in rows[:3]] == [2 * 48, 48 + 96, 48 + 96]


def test_dtype_and_batch_may_be_given():
    workload = load(f"{MODEL}:tiny")
    job = lay_out(workload, 4, accumulate=2, micro_batch=3, dtype="fp32")
    config = job.setup.config
    assert (config.compute_dtype, config.train_batch_size) == ("float32", 24)
    first = by_leaf(job)[0]
    assert first.params_bytes == 4 * job.params
    half = lay_out(workload, 4, accumulate=2, grad_accum_dtype="bf16")
    assert by_leaf(half)[0].gradients_bytes == 2 * half.params


def test_a_plain_function_tells_its_layer_axis_by_its_loss():
    def init(key):
        return {"w": jax.random.normal(key, (8, 6, 6))}

    def loss(params, batch, rng):
        x, _ = jax.lax.scan(
            lambda x, w: (jnp.tanh(x @ jzero.gather(w)), None), batch["x"], params["w"]
        )
        return jnp.mean(x)

    job = lay_out(jzero.Workload(init, loss, batch), 2)
    leaf = job.setup.layout.leaves["w"]
    assert (leaf.array.layer_axes, largest_layer(job)) == ((0,), 36)


def test_a_linen_module_with_a_sample():
    class Module(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(8)(x)

    def loss(model, batch, rng):
        return jnp.mean(model(batch["x"]) ** 2)

    sample = jax.ShapeDtypeStruct((1, 6), jnp.float32)
    job = lay_out(jzero.Workload(Module(), loss, batch, sample=sample), 8)
    assert job.params == 6 * 8 + 8
    assert by_leaf(job)[3].params_bytes == 0


def test_what_the_models_code_raises_is_told_in_one_line():
    def init(rngs):
        raise KeyError("no such\nthing")

    with pytest.raises(JzeroError, match="cannot be traced: KeyError") as caught:
        lay_out(jzero.Workload(init, square, batch), 2)
    assert "\n" not in str(caught.value)


def test_no_device_is_touched():
    code = (
        "from jzero import targets; from jzero.factory import load; "
        "from jzero.plan import lay_out, of_model; "
        f"job = lay_out(load({str(MODEL)!r} + ':tiny'), 16); "
        "print(of_model(job, targets.parse('h100:16')).rows[3].total_bytes)"
    )
    env = {**os.environ, "JAX_PLATFORMS": "there_is_none", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == of_model(lay_out(load(f"{MODEL}:tiny"), 16)).rows[3].total_bytes
