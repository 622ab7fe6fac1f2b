"""The table of leaves says what the arrays are, to the byte, and hides nothing that is whole."""

import io
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

import jzero
from jzero.explain import explain, stage_table
from jzero.measure import real_bytes

SHAPES = {"embed": (50, 16), "layers": (4, 16, 24), "head": (13, 11), "bias": (3,), "scale": ()}


def make(key):
    params = {name: jax.random.normal(key, shape) for name, shape in SHAPES.items()}
    return {**params, "table": jnp.arange(40)}


def zero_of(devices, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return jzero.Zero(mesh=mesh, **options)


def start(zero, tx=None, **options):
    options = {"layer_axes": {"layers": 0}, **options}
    return zero.init(make, tx or optax.adamw(1e-3), **options)


class Norm(nn.Module):
    """Has variables that are not parameters."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(5)(nn.BatchNorm(use_running_average=False)(x))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("devices", [8, 7, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_predicted_bytes_are_the_real_ones(stage, devices, precision):
    zero = zero_of(devices, stage=stage, precision=precision)
    state = start(zero)
    found = zero.explain()
    assert found.bytes_per_device == real_bytes(state)
    assert explain(zero.setup.layout, state).rows == found.rows
    assert found.total_bytes_per_device == sum(real_bytes(state).values())


def test_predicted_bytes_are_the_real_ones_on_one_device():
    zero = zero_of(1, stage=3, precision="bf16")
    assert real_bytes(start(zero)) == zero.explain().bytes_per_device
    assert zero.explain().sharded_share == 0
    assert all(row.by_design for row in zero.explain().whole())


def test_real_bytes_also_with_thresholds_factors_frozen_leaves_and_replicas():
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("replica", "data"))
    for options in ({"persistence_threshold": 200}, {"precision": "fp16"}):
        zero = jzero.Zero(stage=3, mesh=mesh, **options)
        state = start(zero, optax.adafactor(1e-3, min_dim_size_to_factor=8), trainable=_not_head)
        assert zero.explain().bytes_per_device == real_bytes(state)


def _not_head(path):
    return path != "head"


def test_variables_are_counted_as_other():
    zero = zero_of(8, stage=3)
    state = zero.init(Norm(), optax.adam(1e-3), sample=jnp.zeros((2, 8)))
    found = zero.explain()
    assert found.bytes_per_device == real_bytes(state)
    # mean and variance of 8 features; step, skipped, scale, clean, hysteresis; a key of 8 bytes.
    assert found.bytes_per_device["other"] == 2 * 8 * 4 + 5 * 4 + 8
    [row] = [row for row in found.rows if row.path.endswith("mean")]
    assert (row.kind, row.sharded, row.by_design) == ("other", False, True)


def test_bytes_by_hand():
    zero = zero_of(8, stage=2, precision="bf16")
    zero.setup_for(lambda key: {"w": jnp.zeros((16, 4))}, optax.adam(1e-3))
    found = zero.explain()
    # bf16 whole; fp32 master, two moments and a count.
    assert found.bytes_per_device["params"] == 64 * 2
    assert found.bytes_per_device["master"] == 64 * 4 // 8
    assert found.bytes_per_device["optimizer"] == 2 * 64 * 4 // 8 + 4
    assert found.gradient_bytes == 64 * 2 // 8
    others = found.bytes_per_device["other"]
    sharded = 3 * 64 * 4
    assert found.sharded_share == pytest.approx(sharded / (sharded + 64 * 2 + 4 + others))


def test_gradients_are_as_each_stage_accumulates_them():
    for stage, size, dtype in [(0, 64, 2), (1, 64, 2), (2, 8, 2), (3, 8, 2)]:
        zero = zero_of(8, stage=stage, precision="bf16")
        setup = zero.setup_for(lambda key: {"w": jnp.zeros((16, 4))}, optax.adam(1e-3))
        assert zero.explain().gradient_bytes == size * dtype
        four = explain(setup.layout, setup.abstract_state(), accumulation=4)
        assert four.gradient_bytes == size * 4


def test_padding_is_shown():
    zero = zero_of(7, stage=3)
    start(zero)
    row = next(r for r in zero.explain().rows if (r.kind, r.path) == ("params", "head"))
    assert (row.shape, row.stored, row.spec) == ((13, 11), (14, 11), "P('data')")
    assert "stored as 14" in row.reason
    assert row.bytes_per_device == 2 * 11 * 4
    assert "stored (14, 11)" in str(zero.explain())


def test_whole_leaves_are_listed_with_reasons():
    zero = zero_of(8, stage=3, precision="bf16", persistence_threshold=200)
    start(zero)
    found = zero.explain()
    whole = {(row.kind, row.path): row for row in found.whole()}
    assert not whole.keys() & {("params", "embed"), ("master", "embed"), ("gradients", "embed")}
    head = whole["params", "head"]
    kept = "whole: 143 elements are at most the persistence threshold 200"
    assert not head.by_design and head.reason == kept
    once = "whole in backward, then reduce-scattered once per step; the parameter stays "
    assert whole["gradients", "head"].reason == once + kept
    master = next(row for row in found.rows if (row.kind, row.path) == ("master", "head"))
    assert master.sharded and master.reason == (
        "dim 0 of 13 stored as 16: no dimension divides by 8"
    )
    assert whole["params", "scale"].by_design and "scalar" in whole["params", "scale"].reason
    assert not any("against its plan" in row.reason for row in whole.values())
    odd = [row.by_design for row in found.whole()]
    assert odd == sorted(odd)  # those not by design first


def test_each_row_has_a_reason_that_fits_its_kind():
    zero = zero_of(8, stage=1, precision="bf16")
    start(zero, trainable=_not_head)
    rows = {(row.kind, row.path): row for row in zero.explain().rows}
    assert rows["params", "embed"].reason == "whole: parameters are sharded from stage 3 on"
    assert rows["master", "embed"].reason == "dim 1 of 16 divides by 8"
    assert "once per step" in rows["gradients", "embed"].reason
    assert "parameter embed" in rows["optimizer", "0/mu/embed"].reason
    assert "not trained" in rows["params", "head"].reason
    assert not {("master", "head"), ("gradients", "head")} & rows.keys()


def test_an_array_that_is_whole_against_its_plan_is_shown():
    zero = zero_of(8, stage=3)
    state = start(zero)
    spoiled = jax.device_put(state.params["embed"], zero.mesh.whole)
    state.params["embed"] = spoiled
    found = explain(zero.setup.layout, state)
    first = found.whole()[0]
    assert (first.kind, first.path, first.by_design) == ("params", "embed", False)
    assert first.reason == "whole, against its plan: dim 1 of 16 divides by 8"
    assert found.bytes_per_device == real_bytes(state)
    assert "WHOLE on every device though stage 3 shards their kind" in str(found)
    words = " ".join(str(found).split())
    assert "The first is whole, against its plan: dim 1 of 16 divides by 8." in words
    noted = explain(zero.setup.layout, state, {"embed": "qr"}).whole()[0].reason
    assert noted.startswith("whole, against its plan: dim 1 of 16") and noted.endswith("uses qr")


def test_the_table_in_text():
    zero = zero_of(8, stage=3, persistence_threshold=200)
    start(zero)
    text = str(zero.explain())
    assert "Stage 3, 8 devices in the ZeRO group" in text
    assert "P(None, 'data')" in text and "WHOLE" in text
    assert "gradients (while a step runs)" in text
    assert f"{zero.explain().total_bytes_per_device:,} bytes of state" in text
    lines = text.splitlines()
    order = [next(i for i, x in enumerate(lines) if f" {n} " in x) for n in ("head", "embed")]
    assert order == sorted(order)  # more bytes first: the head is whole


def test_long_paths_are_folded_not_cut():
    name = "a_very_long_name_" * 8
    zero = zero_of(8, stage=3)
    zero.setup_for(lambda key: {name: jnp.zeros((16, 4))}, optax.sgd(1e-3))
    console = Console(width=80, record=True, file=io.StringIO())
    zero.explain().print(console)
    text = console.export_text()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    assert "dim 0 of 16 divides" in text  # the reason, below the name
    assert text.count("a_") >= 8


def test_a_made_whole_note():
    zero = zero_of(8, stage=3, precision="bf16")
    setup = zero.setup_for(make, optax.sgd(1e-3))
    rows = explain(setup.layout, setup.abstract_state(), {"embed": "qr"}).rows
    row = next(r for r in rows if (r.kind, r.path) == ("master", "embed"))
    assert row.reason.endswith("made whole on each device at init: its initialiser uses qr")


def test_as_dict_is_json():
    zero = zero_of(8, stage=2, precision="bf16")
    start(zero)
    found = zero.explain()
    data = json.loads(json.dumps(found.as_dict()))
    assert data["bytes_per_device"] == found.bytes_per_device
    assert len(data["leaves"]) == len(found.rows)
    assert data["leaves"][0]["shape"] == list(found.rows[0].shape)


def test_tensor_axes_count_as_pieces_but_not_as_sharded():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))
    zero = jzero.Zero(stage=1, precision="bf16", mesh=mesh)
    module = nn.Dense(8, kernel_init=nn.with_partitioning(nn.initializers.ones, (None, "tensor")))
    state = zero.init(module, optax.sgd(1e-3), sample=jnp.zeros((2, 12)))
    found = zero.explain()
    assert found.bytes_per_device == real_bytes(state)
    row = next(r for r in found.rows if (r.kind, r.path) == ("params", "kernel"))
    assert (row.spec, row.sharded, row.bytes_per_device) == (
        "P(None, 'tensor')",
        False,
        96 * 2 // 2,
    )
    assert zero.mesh.sharding(P(None, "tensor")) == state.params["kernel"].sharding


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.full), "bf16"])
def test_the_table_of_stages(precision):
    zero = zero_of(7, stage=2, precision=precision)
    setup = zero.setup_for(make, optax.adamw(1e-3), layer_axes={"layers": 0})
    table = stage_table(setup)
    assert [row["stage"] for row in table] == [0, 1, 2, 3]
    for row in table:
        state = start(zero_of(7, stage=row["stage"], precision=precision))
        assert {kind: row[kind] for kind in real_bytes(state)} == real_bytes(state)
        assert row["total"] == row["state"] + row["gradients"]
    assert [row["total"] for row in table] == sorted((r["total"] for r in table), reverse=True)
    assert setup.at_stage(2).layout.leaves == setup.layout.leaves
