"""The table of leaves: what is sharded, what is not, and why."""

from dataclasses import dataclass

import jax

from jzero.layout import Layout, bytes_per_device
from jzero.paths import flatten
from jzero.state import State


@dataclass(frozen=True)
class Row:
    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    rows: tuple[Row, ...]


def explain(layout: Layout, state: State) -> Explanation:
    return Explanation(())
