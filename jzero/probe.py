"""One abstract trace of a model, to learn how it reads its parameters; nothing is computed.

What a module holds of a parameter, and what is in a pytree of them, is one device's shard: numbers
computed from that without a read would be silently wrong. So the trace is followed from the raw
parameters to the reads, and nothing but taking layers from a stack is let through in between.
"""

from collections.abc import Callable
from typing import Any

import jax

from jzero.errors import JzeroError
from jzero.jaxpr_flow import NONE
from jzero.partition import Array, Leaf
from jzero.paths import flatten, unflatten
from jzero.raw_reads import Raw, RawReads, Read
from jzero.recipe import Recipe
from jzero.sharded import Sharded, recording


def reads(use: Callable[..., Any], params: Any, *args: Any) -> dict[str, Read]:
    """How each parameter is read.

    Arguments:
      use: called once as use(parameters, *args), each parameter a `Sharded`; traced, never run.
      params: pytree of arrays or `jax.ShapeDtypeStruct`s with the true shapes.
      args: further abstract arguments.

    Returns:
      path -> how it is read; a leaf that is never read is absent. Where a leaf is read in several
      shapes, the read of the lowest rank: a scan also sees the stack.

    Raises:
      JzeroError: the raw value of a parameter is used without a read; a parameter is reshaped,
        transposed or cut before it is read; or layers are taken from it along different axes.
    """

    return reads_in(trace(use, params, *args), params)


def trace(use: Callable[..., Any], params: Any, *args: Any) -> Any:
    """The jaxpr of use(parameters, *args), each parameter a `Sharded`, with its reads marked."""

    def marked(values, *args):
        probes = {path: _probe(path, x) for path, x in flatten(values).items()}
        with recording():
            return use(unflatten(values, probes), *args)

    return jax.make_jaxpr(marked)(params, *args)


def reads_in(jaxpr: Any, params: Any) -> dict[str, Read]:
    """How each parameter is read in what `trace` returned: see `reads`."""
    shapes = {path: tuple(x.shape) for path, x in flatten(params).items()}
    facts = [frozenset([Raw(path, tuple(range(len(shape))))]) for path, shape in shapes.items()]
    rest = [NONE] * (len(jaxpr.in_avals) - len(facts))
    walk = RawReads(shapes)
    walk.closed(jaxpr, facts + rest)
    return {path: _lowest(path, seen) for path, seen in walk.seen.items()}


def _probe(path: str, x: jax.Array) -> Sharded:
    array = Array(path, x.shape, str(x.dtype))
    leaf = Leaf(array, None, 0, False, False, False, "")
    return Sharded(x, None, Recipe(leaf, (), (), str(x.dtype), str(x.dtype)))


def _lowest(path: str, seen: list[Read]) -> Read:
    known = [x for x in seen if x.gone is not None]
    longest = max((x.gone or () for x in known), key=len, default=())
    for x in known:
        if x.gone != longest[: len(x.gone or ())]:
            raise JzeroError(
                f"{path}: layers are taken from it along axes {x.gone} in one place and {longest} "
                f"in another; take them along the same axes everywhere, or read the whole leaf "
                f"first with jzero.gather"
            )
    return min(seen, key=lambda x: len(x.shape))
