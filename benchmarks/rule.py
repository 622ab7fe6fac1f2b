"""Which dimension of a weight is sharded, for the contenders that do not ask jzero."""

from typing import Any

import jax
from jax.sharding import PartitionSpec

UNSHARDED = -1


def dims_of(weights: Any, devices: int) -> Any:
    """The first dimension that the devices divide, never that of the stacked layers.

    Arguments:
      weights: pytree of arrays; below a key `layers` they are stacked in dim 0.
      devices: among which to shard.

    Returns:
      A pytree of dimensions, `UNSHARDED` for a weight that stays whole.
    """

    def one(path: Any, x: Any) -> int:
        first = 1 if any(str(getattr(key, "key", "")) == "layers" for key in path) else 0
        fits = [d for d in range(first, x.ndim) if x.shape[d] % devices == 0]
        return fits[0] if fits and devices > 1 else UNSHARDED

    return jax.tree_util.tree_map_with_path(one, weights)


def spec_of(dim: int) -> PartitionSpec:
    """
    >>> spec_of(1), spec_of(UNSHARDED)
    (PartitionSpec(None, 'data'), PartitionSpec())
    """
    return PartitionSpec() if dim == UNSHARDED else PartitionSpec(*[None] * dim, "data")
