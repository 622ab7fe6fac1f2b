"""The leaves of a state that DeepSpeed has no counterpart of: as in a new run."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from jzero.checkpoint.choice import SCALE
from jzero.checkpoint.counterparts import some
from jzero.checkpoint.entries import Entry
from jzero.errors import JzeroError
from jzero.layout import MASTER
from jzero.partition import is_float
from jzero.paths import flatten
from jzero.setup import Setup

RNG = "progress/rng"


def without_counterpart(
    source: str, wanted: Mapping[str, Entry], found: Collection[str], strict: bool
) -> dict[str, Entry]:
    """The leaves of the state that are not found. A loss scale that is not dynamic is no state.

    Raises:
      JzeroError: strict, and there are some that training shapes: floats, and what an optimizer has
        beside them. Keys and other integers may be new.
    """
    rest = {n: e for n, e in wanted.items() if n not in found and not n.startswith(SCALE)}
    shaped = [n for n, e in rest.items() if is_float(e.dtype) or e.part == "optimizer"]
    if strict and shaped:
        raise JzeroError(
            f"{source}: has no counterpart of {some(shaped)}; with strict=False (--first-values) "
            f"they are as in a new run"
        )
    return rest


def first_values(setup: Setup, seed: int, leaves: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """Leaves as in a new run, of PRNG keys their key data; of all others nothing is computed."""

    def make(key: jax.Array, weights: Any) -> dict[str, jax.Array]:
        found = {RNG: key}
        if leaves.keys() > {RNG}:
            params, variables = setup.model.build(key) if weights is None else weights
            flat = flatten(params)
            masters = {path: flat[path].astype(MASTER) for path in setup.layout.trained}
            state = setup.update.tx.init(setup.update.tree(masters))
            for part, tree in (("params", params), ("variables", variables), ("optimizer", state)):
                found |= {f"{part}/{path}": x for path, x in flatten(tree).items()}
        return {
            name: jax.random.key_data(found[name])
            if entry.is_key
            else found[name].astype(entry.dtype)
            for name, entry in leaves.items()
        }

    return jax.device_get(jax.jit(make)(jax.random.key(seed), setup.model.weights))
