"""Running a compiled train step on the devices present: seconds per step, and peak memory."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.stages import Compiled

from jzero.compare.here import peak
from jzero.workload import Workload
from jzero.zero import Zero

WARM_UP = 2
"""Steps before those that are timed."""

LEAST, MOST, BUDGET = 3, 10, 30.0
"""Timed steps: at least, at most, and the seconds after which no further one begins."""


@dataclass(frozen=True)
class Run:
    """What a few steps took.

    Attributes:
      seconds: of each timed step, from its call to its results.
      peak_bytes: the most memory that a device had in use, compiling and making the state
        included; None where it does not tell.
      before_bytes: the same, as it was before the first step.
    """

    seconds: tuple[float, ...]
    peak_bytes: int | None
    before_bytes: int | None

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def step_peak_bytes(self) -> int | None:
        """The peak, where it is a step's: devices tell one for the process, and never forget it."""
        return None if self.peak_bytes == self.before_bytes else self.peak_bytes


def run(
    compiled: Compiled,
    zero: Zero,
    workload: Workload,
    tx: optax.GradientTransformation | None,
    rows: int,
) -> Run:
    """Makes a state and a batch, and runs the compiled step on them.

    Arguments:
      compiled: the step, for the devices of this process.
      zero: as it was compiled with.
      workload, tx: what the state is made of.
      rows: of the global batch.

    Raises:
      JzeroError: a model whose state cannot be made.
    """
    # Laid out as the step found it: a plain function shows its layer axes only in its loss.
    layer_axes = zero.setup.layer_axes
    state = zero.init(workload.init, tx, sample=workload.sample, layer_axes=layer_axes)
    batch = make_batch(workload.batch(rows), zero.mesh.batch)
    jax.block_until_ready((state, batch))
    devices = zero.mesh.batch.device_set
    before, seconds = peak(devices), []
    began = time.perf_counter()
    while len(seconds) < WARM_UP + LEAST or _goes_on(seconds, began):
        start = time.perf_counter()
        state, *results = compiled(state, batch)
        jax.block_until_ready((state, results))
        seconds.append(time.perf_counter() - start)
    return Run(tuple(seconds[WARM_UP:]), peak(devices), before)


def make_batch(like: Any, sharding: NamedSharding) -> Any:
    """A batch of made-up values: random floats, zeros for integers and keys, True for booleans.

    Zero is an index into anything; True in a mask leaves something to average.

    Arguments:
      like: pytree of `jax.ShapeDtypeStruct`s [rows, ...].
      sharding: of every leaf.
    """
    leaves, structure = jax.tree.flatten(like)

    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(leaves))
        return [_values(x, key) for x, key in zip(leaves, keys, strict=True)]

    made = jax.jit(make, out_shardings=sharding)(jax.random.key(0))
    return jax.tree.unflatten(structure, made)


def _values(x: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.random.normal(key, x.shape).astype(x.dtype)
    return jnp.full(x.shape, x.dtype == jnp.bool, x.dtype)


def _goes_on(seconds: Sequence[float], began: float) -> bool:
    return len(seconds) < WARM_UP + MOST and time.perf_counter() - began < BUDGET
