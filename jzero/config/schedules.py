"""Learning-rate schedules with DeepSpeed's formulas (`deepspeed/runtime/lr_schedules.py`).

Step i counts optimizer steps from 0. DeepSpeed itself uses i = 0 for its first two steps; jzero
does not. Every schedule is a pure function of a Python int (giving a float) or of a traced integer.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero.config import optimizer_params as p
from jzero.config.document import Scheduler
from jzero.errors import ConfigError

Schedule = Callable[[Any], Any]


def _on_host_too(formula: Callable[[Any, Any], Any]) -> Schedule:
    """A schedule from a formula over (array module, step): NumPy for host integers, else JAX."""

    def schedule(step: Any) -> Any:
        if isinstance(step, jax.Array):
            return formula(jnp, step.astype(jnp.float32))
        return float(formula(np, np.float64(step)))

    return schedule


def _warmup(xp: Any, i: Any, steps: int, kind: str) -> Any:
    """Progress of warming up, 0 to 1, meant for i < W; W = max(2, steps)."""
    w = max(2, steps)
    inside = xp.minimum(i, w - 1.0)
    return xp.log(inside + 1.0) / math.log(w) if kind == "log" else inside / w


def _warmup_lr(params: p.WarmupLrParams, lr: float) -> Schedule:
    low, high = params.warmup_min_lr, lr if params.warmup_max_lr is None else params.warmup_max_lr
    w = max(2, params.warmup_num_steps)
    total = params.total_num_steps if isinstance(params, p.WarmupDecayLrParams) else None

    def formula(xp: Any, i: Any) -> Any:
        rising = _warmup(xp, i, params.warmup_num_steps, params.warmup_type)
        falling = 1.0 if total is None else xp.clip((total - i) / max(1, total - w), 0.0, 1.0)
        return low + (high - low) * xp.where(i < w, rising, falling)

    return _on_host_too(formula)


def _warmup_cosine_lr(params: p.WarmupCosineLrParams, lr: float) -> Schedule:
    w, start, end = max(2, params.warmup_num_steps), params.warmup_min_ratio, params.cos_min_ratio
    decay = max(1, params.total_num_steps - w)

    def formula(xp: Any, i: Any) -> Any:
        rising = _warmup(xp, i, params.warmup_num_steps, params.warmup_type)
        progress = xp.clip((i - w + 1.0) / decay, 0.0, 1.0)
        falling = end + (1.0 - end) * (1.0 + xp.cos(math.pi * progress)) / 2.0
        # Rounding of the cosine must not take the rate below its end.
        falling = xp.maximum(falling, end)
        return lr * xp.where(i < w, start + (1.0 - start) * rising, falling)

    return _on_host_too(formula)


def _one_cycle(params: p.OneCycleParams) -> Schedule:
    up = params.cycle_first_step_size
    down = params.cycle_second_step_size or up
    up_stairs = params.cycle_first_stair_count
    down_stairs = params.cycle_second_stair_count
    down_stairs = up_stairs if down_stairs is None else down_stairs
    low, high, total = params.cycle_min_lr, params.cycle_max_lr, up + down
    rate = params.decay_lr_rate / params.decay_step_size if params.decay_step_size else 0.0

    def stairs(xp: Any, height: Any, count: int) -> Any:
        # The small shift keeps a height that is a whole stair from rounding down to the one below.
        return xp.floor(height * count + 1e-6) / count if count else height

    def formula(xp: Any, i: Any) -> Any:
        rising = stairs(xp, xp.minimum(i / up, 1.0), up_stairs)
        falling = stairs(xp, xp.clip((total - i) / down, 0.0, 1.0), down_stairs)
        cycle = low + (high - low) * xp.where(i <= up, rising, falling)
        return xp.where(i <= total, cycle, low / (1.0 + rate * xp.maximum(i - total, 0.0)))

    return _on_host_too(formula)


def _lr_range_test(params: p.LrRangeTestParams) -> Schedule:
    def formula(xp: Any, i: Any) -> Any:
        interval = i / params.lr_range_test_step_size
        if params.lr_range_test_staircase:
            interval = xp.floor(interval)
        return params.lr_range_test_min_lr * (1.0 + params.lr_range_test_step_rate * interval)

    return _on_host_too(formula)


def build_schedule(scheduler: Scheduler | None, lr: float) -> Schedule:
    """The learning rate as a function of the optimizer step.

    Arguments: the scheduler's section, None for a constant rate; `lr`, the optimizer's own
    rate, which schedules without rates of their own use or multiply.

    Raises: `ConfigError` for a type that has no schedule here.
    """
    if scheduler is None:
        return _on_host_too(lambda xp, i: xp.full_like(i, lr))
    params = scheduler.params
    if isinstance(params, p.WarmupLrParams):
        return _warmup_lr(params, lr)
    if isinstance(params, p.WarmupCosineLrParams):
        return _warmup_cosine_lr(params, lr)
    if isinstance(params, p.OneCycleParams):
        return _one_cycle(params)
    if isinstance(params, p.LrRangeTestParams):
        return _lr_range_test(params)
    raise ConfigError(
        f"scheduler.type: found {scheduler.type!r}; allowed: {', '.join(p.SCHEDULERS)}"
    )
