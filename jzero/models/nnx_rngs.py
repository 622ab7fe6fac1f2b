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
            self.count = nnx.RngCount(np.zeros((), np.uint32), tag=tag)  # pyright: ignore

    def __call__(self) -> jax.Array:
        count = self.count.get_raw_value()
        if not isinstance(count, np.ndarray | np.generic):  # inside an nnx transform
            return super().__call__()
        self.count.set_raw_value(np.array(count + 1, np.uint32))  # pyright: ignore
        return jax.random.fold_in(self.key[...], count)


def rngs_of(key: jax.Array) -> nnx.Rngs:
    """`nnx.Rngs(key)`: the same keys in the same order."""
    rngs = nnx.Rngs(key)
    rngs.default = HostCounted(key, tag="default")  # pyright: ignore[reportAttributeAccessIssue]
    return rngs
