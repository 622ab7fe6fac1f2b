"""A state's leaves under the names that a checkpoint gives them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jzero.layout import is_leaf
from jzero.partition import Leaf, choose_dim, is_float
from jzero.paths import flatten
from jzero.setup import Setup
from jzero.state import State

PARTS = ("params", "optimizer", "variables", "progress")
PARAMS = "params/"
"""What the names of parameters begin with."""

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One leaf of a state.

    Attributes:
      name: its part, "/", and its path within it.
      array: as stored, maybe padded: a `jax.Array` or a `jax.ShapeDtypeStruct` with a sharding.
      shape: its true shape.
      leaf: where it lives, of parameters and optimizer state; None of others.
      cut: the dim that a stage shards which shards this leaf, and the length of a piece; or None.
    """

    name: str
    array: Any
    shape: tuple[int, ...]
    leaf: Leaf | None = None
    cut: tuple[int, int] | None = None

    @property
    def part(self) -> str:
        return part_of(self.name)

    @property
    def dtype(self) -> str:
        return str(self.array.dtype)

    @property
    def is_key(self) -> bool:
        """Whether it is a PRNG key, or several."""
        return jnp.issubdtype(self.array.dtype, jax.dtypes.prng_key)

    @property
    def trained(self) -> bool:
        """Whether it is anything but a parameter that is not trained."""
        return self.leaf is None or self.leaf.array.trained


def part_of(name: str) -> str:
    """
    Example:
      >>> part_of("optimizer/0/mu/head/kernel")
      'optimizer'
    """
    return name.split("/", 1)[0]


def parameters(leaves: Mapping[str, T]) -> dict[str, T]:
    """Of leaves by name, the parameters by path.

    Example:
      >>> parameters({"params/head/kernel": 1, "optimizer/0/mu/head/kernel": 2})
      {'head/kernel': 1}
    """
    return {name.removeprefix(PARAMS): x for name, x in leaves.items() if name.startswith(PARAMS)}


def statistics(leaves: Mapping[str, Any]) -> tuple[str, ...]:
    """Of all leaves, an entry or a manifest's each: variables that are floats, as Flax names them.

    Batch statistics and running means: what a model needs beside its parameters, unlike counts and
    keys of random streams.
    """
    return tuple(
        name.removeprefix("variables/")
        for name, leaf in leaves.items()
        if name.startswith("variables/") and is_float(leaf.dtype)
    )


def entries(setup: Setup, state: State) -> dict[str, Entry]:
    """A state's leaves by name.

    Parameters are in full precision: the copy in the compute dtype is made from them again.

    Arguments:
      setup: as the state is laid out, `zero.setup`.
      state: arrays, or the abstract state of `setup.abstract_state()`.

    Returns:
      name -> leaf, in the model's order.
    """
    layout, found = setup.layout, {}

    def add(name: str, x: Any, leaf: Leaf) -> None:
        found[name] = Entry(name, x, leaf.array.shape, leaf, _cut(leaf, layout.mesh.group_size))

    for path, leaf in layout.leaves.items():
        add(PARAMS + path, state.weight(path), leaf)
    leaves = flatten(layout.opt_leaves, is_leaf)
    for path, x in flatten(state.opt_state).items():
        add(f"optimizer/{path}", x, leaves[path])
    for part, tree in (("variables", state.variables), ("progress", progress(state))):
        for path, x in flatten(tree).items():
            found[f"{part}/{path}"] = Entry(f"{part}/{path}", x, tuple(x.shape))
    return found


def _cut(leaf: Leaf, group: int) -> tuple[int, int] | None:
    dim, padded = leaf.dim, leaf.padded
    if dim is None:
        array = leaf.array
        taken = {d for d, axes in enumerate(array.other_axes) if axes} | set(array.layer_axes)
        dim, padded, _ = choose_dim(array.shape, group, taken)
    return None if dim is None else (dim, padded // group)


def progress(state: State) -> dict[str, Any]:
    """How far a run is: fields of the state by name."""
    return {name: getattr(state, name) for name in ("step", "skipped", "rng", "scale")}
