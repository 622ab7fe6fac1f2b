"""jzero's own step as a contender, and the time that its host code takes."""

import time
from typing import Any

import jax
from model import LM, loss_fn

import jzero
from benchmarks.job import CLIP, Contender, Job
from jzero.train import TrainStep


def contender(job: Job) -> tuple[jzero.Zero, TrainStep, Contender]:
    """The step as a user of jzero has it."""
    zero = jzero.Zero(
        stage=job.stage,
        precision=job.precision,
        gradient_clipping=CLIP,
        mesh=job.mesh,
    )
    state = zero.init(lambda rngs: LM(job.config, rngs=rngs), job.optimizer, seed=0)
    train_step = zero.train_step(loss_fn)

    def step(state: Any, batch: Any):
        state, metrics = train_step(state, batch)
        return state, metrics["loss"]

    return zero, train_step, Contender("jzero", state, step, lambda: train_step.lower(job.batch))


def host_seconds(step: TrainStep, state: Any, batch: Any, steps: int) -> tuple[Any, list[float]]:
    """What a step's call takes beside the call of its compiled function.

    Each step is called once the one before it is done, so nothing waits inside.

    Arguments:
      step: called at least once before.
      state: used up.
      batch: global arrays.
      steps: to run.

    Returns:
      The state after them, and the seconds of each.
    """
    compiled, inside, beside = step._jitted, [0.0], []

    def clocked(*arguments: Any):
        start = time.perf_counter()
        results = compiled(*arguments)
        inside[0] = time.perf_counter() - start
        return results

    step._jitted = clocked
    try:
        for _ in range(steps):
            start = time.perf_counter()
            results = step(state, batch)
            beside.append(time.perf_counter() - start - inside[0])
            state, metrics = results  # any loop drops the old state: not clocked
            jax.block_until_ready((state, metrics))
    finally:
        step._jitted = compiled
    return state, beside
