"""Schedules against their formulas, written out a second time, on ints and under jit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jzero.config import build_optimizer, load

LR = 3e-3


def schedule_of(kind, lr=LR, **params):
    scheduler = {"scheduler": {"type": kind, "params": params}} if kind else {}
    config = load({"optimizer": {"type": "Adam", "params": {"lr": lr}}, **scheduler})
    return build_optimizer(config)[1]


def check(schedule, formula, steps):
    traced = jax.jit(schedule)
    for i in steps:
        expected = formula(i)
        assert isinstance(schedule(i), float)
        np.testing.assert_allclose(schedule(i), expected, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(traced(jnp.int32(i)), expected, rtol=2e-5, atol=1e-9)


def warmup(i, w, kind):
    w = max(2, w)
    if i >= w:
        return None
    return math.log(i + 1) / math.log(w) if kind == "log" else i / w


def test_constant():
    check(schedule_of(None), lambda i: LR, [0, 1, 10**6])


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_warmup(kind, steps):
    def formula(i):
        gamma = warmup(i, steps, kind)
        return 1e-4 + (1e-2 - 1e-4) * (1.0 if gamma is None else gamma)

    schedule = schedule_of(
        "WarmupLR",
        warmup_min_lr=1e-4,
        warmup_max_lr=1e-2,
        warmup_num_steps=steps,
        warmup_type=kind,
    )
    check(schedule, formula, range(20))


def test_warmup_is_logarithmic_and_rises_to_the_optimizers_rate_by_default():
    schedule = schedule_of("WarmupLR", warmup_num_steps=100)
    assert schedule(0) == 0.0
    np.testing.assert_allclose(schedule(9), LR / 2)  # ln 10 / ln 100
    np.testing.assert_allclose([schedule(99), schedule(100), schedule(10**6)], LR)


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("steps", "total"), [(4, 12), (5, 5), (9, 3)])
def test_warmup_decay(kind, steps, total):
    def formula(i):
        gamma = warmup(i, steps, kind)
        if gamma is None:
            gamma = max(0.0, (total - i) / max(1.0, total - max(2, steps)))
        return 1e-5 + (1e-3 - 1e-5) * gamma

    schedule = schedule_of(
        "WarmupDecayLR",
        total_num_steps=total,
        warmup_min_lr=1e-5,
        warmup_num_steps=steps,
        warmup_type=kind,
    )
    check(schedule, formula, range(30))
    assert schedule(total + 1000) == 1e-5


@pytest.mark.parametrize("kind", ["log", "linear"])
@pytest.mark.parametrize(("steps", "total"), [(4, 12), (6, 6)])
def test_warmup_cosine(kind, steps, total):
    def formula(i):
        ratio = warmup(i, steps, kind)
        if ratio is not None:
            return LR * (0.1 + 0.9 * ratio)
        progress = min(1.0, (i - steps + 1) / max(1, total - steps))
        return LR * (0.01 + 0.99 * (1 + math.cos(math.pi * progress)) / 2)

    schedule = schedule_of(
        "WarmupCosineLR",
        total_num_steps=total,
        warmup_num_steps=steps,
        warmup_min_ratio=0.1,
        cos_min_ratio=0.01,
        warmup_type=kind,
    )
    check(schedule, formula, range(30))
    rates = [float(jax.jit(schedule)(i)) for i in range(max(steps, total - 1), total + 20)]
    np.testing.assert_allclose(rates, LR * 0.01, rtol=1e-6)
    assert min(schedule(i) for i in range(steps, 100)) >= LR * 0.01


@pytest.mark.parametrize("stairs", [0, 3])
@pytest.mark.parametrize("down", [None, 5])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_one_cycle(stairs, down, decay):
    up, second = 6, down or 6
    total = up + second

    def formula(i):
        if i > total:
            return 0.1 / (1 + decay * (i - total) / 4) if decay else 0.1
        height = i / up if i <= up else (total - i) / second
        if stairs:
            # The steps of this test meet whole stairs only where integers say so.
            top = i * stairs // up if i <= up else (total - i) * stairs // second
            height = top / stairs
        return 0.1 + 0.9 * height

    schedule = schedule_of(
        "OneCycle",
        cycle_min_lr=0.1,
        cycle_max_lr=1.0,
        cycle_first_step_size=up,
        cycle_second_step_size=down,
        cycle_first_stair_count=stairs,
        cycle_momentum=False,
        decay_lr_rate=decay,
        decay_step_size=4,
    )
    check(schedule, formula, range(30))


@pytest.mark.parametrize("staircase", [False, True])
def test_range_test(staircase):
    def formula(i):
        return 1e-3 * (1 + 2.0 * (i // 5 if staircase else i / 5))

    schedule = schedule_of(
        "LRRangeTest",
        lr_range_test_step_size=5,
        lr_range_test_step_rate=2.0,
        lr_range_test_staircase=staircase,
    )
    check(schedule, formula, range(30))
