"""Bytes that a training state really has on a device, summed from the arrays themselves."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from jzero.state import State


def real_bytes(state: State) -> dict[str, int]:
    """Bytes per device of a state's arrays, from the shards that are there.

    Arguments:
      state: a state of arrays. Only devices of this process are looked at.

    Returns:
      {"params", "master", "optimizer", "other"}, of the device that has most in all. Equals
      `Zero.explain().bytes_per_device`: every device has pieces of equal size, padding included.
    """
    kinds = {
        "params": state.params,
        "master": state.master,
        "optimizer": state.opt_state,
        "other": (state.step, state.skipped, state.rng, state.scale, state.variables),
    }
    found = {kind: _by_device(tree) for kind, tree in kinds.items()}
    devices = set().union(*found.values())
    fullest = max(devices, key=lambda d: sum(count[d] for count in found.values()), default=None)
    return {kind: count[fullest] for kind, count in found.items()}


def _by_device(tree: Any) -> Counter[Any]:
    count: Counter[Any] = Counter()
    for x in jax.tree.leaves(tree):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        for shard in x.addressable_shards:
            count[shard.device] += shard.data.nbytes
    return count
