"""A run that is resumed gives the numbers of one that was never interrupted, bit for bit."""

import optax
import pytest
from loops import Loop, Net, Rows, assert_same, loss_fn, make_zero

FP16 = {
    "enabled": True,
    "initial_scale_power": 8,
    "loss_scale_window": 4,
    "hysteresis": 2,
}
CASES = {
    "fp32, accumulation": {"stage": 3, "accumulation": 2},
    "bf16, a copy of the parameters": {"stage": 2, "precision": "bf16"},
    # An overflow on each side of the checkpoint: the scale's counters must survive.
    "fp16, overflows": {"stage": 3, "fp16": FP16, "spikes": (3, 9, 14)},
}


def schedule():
    return optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, 20))


def train(folder, steps, spikes=(), **config):
    """Trains up to a step, from the last checkpoint; losses, and the state."""
    fp16 = config.pop("fp16", None)
    if fp16:
        stage = config.pop("stage")
        config = {
            "config": {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "fp16": fp16,
            }
        }
    zero = make_zero(3, **config)
    losses = []
    with zero.checkpointer(folder, every=10, keep_last=None) as checkpoints:
        zero.setup_for(Net, schedule())
        restored = checkpoints.restore()
        state = restored.state if restored else zero.init(Net, schedule())
        rows = Rows(restored.data if restored else 0, spikes)
        step = zero.train_step(loss_fn)
        while rows.position < steps:
            state, metrics = step(state, next(rows))
            losses.append(float(metrics["loss"]))
            checkpoints.save(state, rows.position)
    return losses, state


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_and_ten_resumed_are_twenty(tmp_path, name):
    straight, want = train(tmp_path / "straight", 20, **CASES[name])
    first, middle = train(tmp_path / "resumed", 10, **CASES[name])
    second, found = train(tmp_path / "resumed", 20, **CASES[name])
    assert [str(x) for x in first + second] == [str(x) for x in straight]  # NaN included
    assert_same(found, want)
    if "overflows" in name:
        assert int(want.skipped) == 3
        assert int(middle.scale.hysteresis) == 1, "used up by an overflow before the checkpoint"


def test_the_order_of_the_data_goes_on(tmp_path):
    loop = Loop(tmp_path, every=3).run(7)
    assert loop.rows.position == 7
    assert Loop(tmp_path).rows.position == 7
