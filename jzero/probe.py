"""One abstract trace of a model, to learn which shapes it reads; nothing is computed."""

from collections.abc import Callable
from typing import Any

import jax

from jzero.gather import Recipe, Sharded, recording
from jzero.partition import Array, Leaf
from jzero.paths import flatten, unflatten


def read_shapes(use: Callable[..., Any], params: Any, *args: Any) -> dict[str, tuple[int, ...]]:
    """The shape in which each parameter is read.

    Arguments:
      use: called once as use(parameters, *args), each parameter a `Sharded`; traced, never run.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s with the true shapes.
      args: further abstract arguments.

    Returns:
      path -> shape as read; a leaf that is never read is absent. Where a leaf is read in several
      shapes, the one of the lowest rank: a scan also sees the stack.
    """
    seen: dict[str, tuple[int, ...]] = {}

    def note(path: str, shape: tuple[int, ...]):
        if path not in seen or len(shape) < len(seen[path]):
            seen[path] = shape

    def trace(values, *args):
        probes = {path: _probe(path, x) for path, x in flatten(values).items()}
        with recording(note):
            use(unflatten(values, probes), *args)

    jax.eval_shape(trace, params, *args)
    return seen


def _probe(path: str, x: jax.Array) -> Sharded:
    array = Array(path, x.shape, str(x.dtype))
    leaf = Leaf(array, None, 0, False, False, False, "")
    return Sharded(x, None, Recipe(leaf, (), (), str(x.dtype), str(x.dtype)))
