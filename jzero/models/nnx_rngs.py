"""The random streams that an NNX model is constructed with."""

import jax
import numpy as np
from flax import nnx


class HostCounted(nnx.RngStream):
    """The keys of an `nnx.RngStream`, counted on the host while nothing else holds the count.

    A count that is traced makes construction quadratic in the number of leaves: Flax asks each new
    count for its sharding, and JAX walks the whole trace to say that a tracer has none.
    """

    def __init__(self, key: jax.Array, *, tag: str):
        super().__init__(key, tag=tag)
        if not self.key.shape:
            self._count_from(0)

    def __call__(self) -> jax.Array:
        count = self.count.get_raw_value()
        if not isinstance(count, np.ndarray):  # inside an nnx transform
            return super().__call__()
        self._count_from(int(count) + 1)
        return jax.random.fold_in(self.key[...], count)

    def _count_from(self, number: int):
        self.count = nnx.RngCount(np.array(number, np.uint32), tag=self.tag)  # pyright: ignore


def rngs_of(key: jax.Array) -> nnx.Rngs:
    """`nnx.Rngs(key)`: the same keys in the same order."""
    rngs = nnx.Rngs(key)
    rngs.default = HostCounted(key, tag="default")  # pyright: ignore[reportAttributeAccessIssue]
    return rngs
