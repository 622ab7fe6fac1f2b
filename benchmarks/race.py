"""Running contenders in turn, so that what else the machine does falls on all of them alike."""

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.job import Contender
from jzero.errors import RunFailed

Quartiles = tuple[float, float, float]
"""The first, the median, the third."""

COMPARED = 3
"""Steps whose losses must agree; they warm up too."""

_CLOSE = {"fp32": 1e-4, "bf16": 1e-2}
"""Relative differences of losses that are rounding."""


class Runner:
    """A contender that is under way."""

    def __init__(self, contender: Contender, batch: Any, one_at_a_time: bool):
        self.name = contender.name
        self.state = contender.state
        self._step, self._batch, self._one_at_a_time = contender.step, batch, one_at_a_time

    def run(self, steps: int) -> list[jax.Array]:
        """Runs steps to their end; each one's loss.

        One at a time on virtual CPU devices, where programs in flight can wait for each other's
        threads (`ZeroMesh.settle`).
        """
        losses = []
        for _ in range(steps):
            self.state, loss = self._step(self.state, self._batch)
            losses.append(loss)
            if self._one_at_a_time:
                jax.block_until_ready(loss)
        jax.block_until_ready((self.state, losses))
        return losses


def losses_of(runners: Sequence[Runner], precision: str) -> dict[str, list[float]]:
    """Every contender's first losses.

    Raises:
      RunFailed: they are not the same: it is not the same step.
    """
    found = {each.name: [float(loss) for loss in each.run(COMPARED)] for each in runners}
    check(found, precision)
    return found


def check(losses: dict[str, list[float]], precision: str) -> None:
    """Whether losses agree with the first contender's.

    Raises:
      RunFailed: naming the contender, the step and both losses.
    """
    first, *others = losses
    for name in others:
        for number, (one, other) in enumerate(zip(losses[first], losses[name], strict=True), 1):
            if not np.isclose(one, other, rtol=_CLOSE[precision], atol=0):
                raise RunFailed(
                    f"{name}: the loss of step {number} is {other:.6g}, {first}'s is {one:.6g}: "
                    f"they do not compute the same"
                )


@dataclass(frozen=True)
class Taken:
    """What one step took, in the mean of one round.

    Attributes:
      seconds: by the clock.
      cpu_seconds: of all threads of this process: what else the machine does is not in it.
    """

    seconds: float
    cpu_seconds: float


def race(runners: Sequence[Runner], steps: int, rounds: int) -> dict[str, list[Taken]]:
    """What each contender took, for each round.

    In every round each runs `steps` steps. The order changes from round to round, through all of
    them: what a step leaves in caches and in the allocator falls on each of the others alike.
    """
    taken: dict[str, list[Taken]] = {each.name: [] for each in runners}
    for order in itertools.islice(itertools.cycle(orders(runners)), rounds):
        for each in order:
            start, cpu_start = time.perf_counter(), time.process_time()
            each.run(steps)
            seconds, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            taken[each.name].append(Taken(seconds / steps, cpu / steps))
    return taken


def orders(runners: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
    """Every order; of as many in turn as there are runners, each begins one.

    >>> ["".join(order) for order in orders("abc")]
    ['abc', 'bca', 'cab', 'acb', 'cba', 'bac']
    """
    first, *others = runners
    for rest in itertools.permutations(others):
        order = (first, *rest)
        yield from ((*order[i:], *order[:i]) for i in range(len(order)))


def quartiles(values: Sequence[float]) -> Quartiles:
    """
    >>> quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 3.0, 4.0)
    """
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
