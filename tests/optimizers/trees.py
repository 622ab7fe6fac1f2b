"""A small parameter tree with all that matters: stacked layers, a scalar, one that is frozen."""

import jax
import jax.numpy as jnp
import numpy as np

from jzero.partition import Array, place
from jzero.paths import flatten

# Divides by 8 but for one; 5, 6 and 7 need padding.
SHAPES = {
    "embed": (64, 16),
    "frozen": None,
    "layers": {"bias": (2, 24), "kernel": (2, 16, 24)},
    "norm": (16,),
    "scale": (),
}


def abstract(shapes=SHAPES):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


# Enough for the tests that compile.
FEW = {"layers": {"kernel": (2, 16, 24)}, "norm": (16,)}
FAST = {"xla_backend_optimization_level": 0}  # compiling is what takes time


def placed(params, stage, mesh, tensor=None):
    """path -> Leaf; whatever is under "layers" is stacked."""
    arrays = {}
    for path, x in flatten(params).items():
        layers = (0,) if "layers/" in path else ()
        other = ()
        if tensor and path.endswith("kernel"):
            other = ((), (), (tensor,))
        arrays[path] = Array(path, x.shape, str(x.dtype), layers, other)
    return place(arrays, stage, mesh)


def values(params, seed: int):
    """Numbers for a tree of shapes: NumPy arrays, float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)


def loss(params):
    """Any smooth function, for the transformations that ask for one."""
    return sum(jnp.sum(jnp.square(x - 0.5)) for x in jax.tree.leaves(params))
