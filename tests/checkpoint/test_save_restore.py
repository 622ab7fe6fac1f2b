"""A checkpoint fits every stage, mesh and number of devices, bit for bit, and training goes on."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import OPTIMIZERS, Net, assert_close, make_batch, mesh
from states import assert_same, compilations, save, whole

import jzero
from jzero.checkpoint import restore

pytestmark = pytest.mark.xdist_group("save_restore")  # they share their runs

STAGES, COUNTS = (0, 1, 2, 3), (1, 2, 3, 4, 6, 8)
# Eight devices divide none of its dims, so that stored leaves are padded; six divide one.
NET = Net(vocab=50, width=18, hidden=22)
BEFORE, AFTER = 2, 3  # steps


class Run:
    """Two steps at a stage on eight devices, saved, and three more without an interruption."""

    def __init__(self, stage: int, precision: str, root):
        self.zero = make_zero(stage, precision, 8)
        state = self.zero.init(NET.init, OPTIMIZERS["adamw"](), seed=0)
        self.step = self.zero.train_step(NET.loss)
        state, _ = self.train(self.step, state, range(BEFORE))
        self.saved = whole(self.zero, state)
        self.folder = save(root, self.zero, state, data={"batch": BEFORE})
        self.last, self.losses = self.train(self.step, state)
        self.end = whole(self.zero, self.last)

    def train(self, step, state, batches=range(BEFORE, BEFORE + AFTER), fill: int = 0):
        losses = []
        for i in batches:
            state, metrics = step(state, make_batch(i, NET.vocab, fill=fill))
            losses.append(float(metrics["loss"]))
        return state, losses


def make_zero(stage: int, precision: str, devices: int) -> jzero.Zero:
    return jzero.Zero(stage=stage, precision=precision, mesh=mesh(devices))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(stage, precision) -> Run, each made once."""
    runs = {}

    def one(stage: int, precision: str) -> Run:
        if (stage, precision) not in runs:
            root = tmp_path_factory.mktemp(f"stage{stage}-{precision}")
            runs[stage, precision] = Run(stage, precision, root)
        return runs[stage, precision]

    return one


def matrix():
    """Any two of (stage before, stage after, devices) meet; with --full, all with both dtypes."""
    few = {0: "fp32", 1: "bf16", 2: "fp32", 3: "bf16"}
    for before, after, (j, devices) in itertools.product(STAGES, STAGES, enumerate(COUNTS)):
        for precision in ("fp32", "bf16"):
            chosen = after == (before + j) % 4 and precision == few[before]
            marks = () if chosen else pytest.mark.full
            name = f"{before}-to-{after}-on-{devices}-{precision}"
            yield pytest.param(before, after, devices, precision, marks=marks, id=name)


@pytest.mark.parametrize("before, after, devices, precision", list(matrix()))
def test_every_leaf_comes_back_bit_by_bit(run, before, after, devices, precision):
    saved = run(before, precision)
    zero = make_zero(after, precision, devices)
    zero.setup_for(NET.init, OPTIMIZERS["adamw"]())
    restored = restore(saved.folder, zero.setup)
    assert_same(whole(zero, restored.state), saved.saved)
    assert (restored.step, restored.data) == (BEFORE, {"batch": BEFORE})
    assert_laid_out(restored.state, zero.setup.abstract_state())


def assert_laid_out(state, want) -> None:
    """As a step takes it, and every buffer the device's own."""
    pointers = []
    for found, like in zip(jax.tree.leaves(state), jax.tree.leaves(want), strict=True):
        assert (found.shape, found.dtype, found.sharding) == (like.shape, like.dtype, like.sharding)
        if not jnp.issubdtype(found.dtype, jax.dtypes.prng_key):
            pointers += [x.data.unsafe_buffer_pointer() for x in found.addressable_shards]
    assert len(set(pointers)) == len(pointers)


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "bf16")])
def test_the_same_stage_goes_on_bit_by_bit(run, stage, precision):
    saved = run(stage, precision)
    restored = restore(saved.folder, saved.zero.setup)
    with compilations() as compiled:
        state, losses = saved.train(saved.step, restored.state)
    assert compiled == []  # the state is as the step's own
    assert losses == saved.losses
    assert_same(whole(saved.zero, state), saved.end)
    assert restored.state.step.is_deleted() and all(
        x.is_deleted() for x in jax.tree.leaves(restored.state.opt_state)
    )


def elsewhere():
    few = {(0, 3, 6, "fp32"), (3, 1, 3, "bf16"), (2, 0, 1, "fp32"), (1, 2, 4, "bf16")}
    for case in itertools.product(STAGES, STAGES, COUNTS, ("fp32", "bf16")):
        if case[0] != case[1] or case[2] != 8:
            yield pytest.param(*case, marks=() if case in few else pytest.mark.full)


@pytest.mark.parametrize("before, after, devices, precision", list(elsewhere()))
def test_another_stage_or_count_goes_on_to_rounding(run, before, after, devices, precision):
    saved = run(before, precision)
    zero = make_zero(after, precision, devices)
    zero.setup_for(NET.init, OPTIMIZERS["adamw"]())
    state = restore(saved.folder, zero.setup).state
    state, losses = saved.train(zero.train_step(NET.loss), state, fill=-32 % devices)
    found = whole(zero, state)
    assert found["progress/step"] == BEFORE + AFTER
    np.testing.assert_allclose(losses, saved.losses, rtol=1e-5 if precision == "fp32" else 2e-3)
    if precision == "fp32":
        weights = {name: x for name, x in saved.end.items() if name.startswith("params/")}
        assert_close({name: found[name] for name in weights}, weights)


def test_a_loss_scale_in_the_middle_of_its_overflows(tmp_path):
    """fp16: skipped steps, the scale, its clean steps and its hysteresis go on where they were."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "fp16": {"enabled": True, "initial_scale_power": 26, "hysteresis": 3},
        "zero_optimization": {"stage": 2},
    }
    zero = jzero.Zero(config)
    state = zero.init(NET.init, OPTIMIZERS["adamw"](), seed=0)
    step = zero.train_step(NET.loss)
    state, _ = step(state, make_batch(0, NET.vocab))
    saved, folder = whole(zero, state), save(tmp_path, zero, state)
    assert saved["progress/skipped"] == 1 and saved["progress/scale/hysteresis"] == 2

    def go_on(state):
        scales = []
        for i in range(1, 5):
            state, metrics = step(state, make_batch(i, NET.vocab))
            scales.append(float(metrics["loss_scale"]))
        return whole(zero, state), scales

    want, scales = go_on(state)
    assert want["progress/skipped"] > 1 and len(set(scales)) > 1
    found, again = go_on(restore(folder, zero.setup).state)
    assert again == scales
    assert_same(found, want)
    other = jzero.Zero({**config, "zero_optimization": {"stage": 3}}, mesh=mesh(6))
    other.setup_for(NET.init, OPTIMIZERS["adamw"]())
    assert_same(whole(other, restore(folder, other.setup).state), saved)


def test_a_plain_pytree_is_moved_at_its_first_step_as_ever(tmp_path):
    """Its layer axes show in its loss, so that a fresh process restores into another layout."""
    net = Net("plain", vocab=50, width=18, hidden=22)
    zero = make_zero(3, "bf16", 8)
    state = zero.init(net.init, OPTIMIZERS["adamw"]())
    step = zero.train_step(net.loss)
    state, _ = step(state, make_batch(0, net.vocab))
    saved, folder = whole(zero, state), save(tmp_path, zero, state)
    fresh = make_zero(3, "bf16", 8)
    fresh.setup_for(net.init, OPTIMIZERS["adamw"]())
    assert fresh.setup.layer_axes != zero.setup.layer_axes
    restored = restore(folder, fresh.setup).state
    assert_same(whole(fresh, restored), saved)

    def go_on(owner, step, state):
        for i in range(1, 4):
            state, _ = step(state, make_batch(i, net.vocab))
        return whole(owner, state)

    want = go_on(zero, step, state)
    assert_same(go_on(fresh, fresh.train_step(net.loss), restored), want)
