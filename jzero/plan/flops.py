"""Operations and kept values of a traced function: no compiler is asked."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from jzero.jaxpr_flow import REMAT


@dataclass(frozen=True)
class Work:
    """Floating-point operations of products and convolutions.

    Attributes:
      once: of one evaluation.
      again: of those, what backward computes a second time.
    """

    once: float
    again: float

    def __add__(self, other: "Work") -> "Work":
        return Work(self.once + other.once, self.again + other.again)

    def times(self, n: int) -> "Work":
        return Work(n * self.once, n * self.again)


def count(jaxpr: Any) -> Work:
    """Operations of a jaxpr, scans multiplied out, a while loop's body counted once.

    >>> import jax, jax.numpy as jnp
    >>> x = jnp.ones((4, 4))
    >>> count(jax.make_jaxpr(lambda x: jax.checkpoint(jnp.dot)(x, x))(x))
    Work(once=128, again=128)
    """
    total = Work(0, 0)
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            total += Work(_product(eqn), 0)
        elif name == "conv_general_dilated":
            total += Work(_convolution(eqn), 0)
        elif name == "cond":
            total += max((count(branch) for branch in eqn.params["branches"]), key=_once)
        else:
            below = sum((count(inner) for inner in _inner(eqn)), Work(0, 0))
            if name == "scan":
                below = below.times(eqn.params["length"])
            total += Work(below.once, below.once) if name == REMAT else below
    return total


def remat_bodies(jaxpr: Any) -> Iterator[tuple[Any, ...]]:
    """Every function in a jaxpr that is rematerialised as a whole, and its abstract arguments.

    Of functions with the same arguments only the first, since layers mostly repeat.
    """
    seen: set[tuple[str, ...]] = set()
    for eqn in _all(jaxpr):
        if eqn.primitive.name != REMAT:
            continue
        body = eqn.params["jaxpr"]
        kinds = tuple(str(v.aval) for v in body.invars)
        if kinds not in seen:
            seen.add(kinds)
            args = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in body.invars]
            yield core.jaxpr_as_fun(core.ClosedJaxpr(body, ())), *args


def residual_bytes(function: Callable[..., Any], *args: Any) -> int:
    """Bytes that autodiff keeps of a function for backward, without those of its arguments.

    Arguments:
      function: traced, never run.
      args: pytrees of arrays or `jax.ShapeDtypeStruct`s; what has the shape and dtype of one of
        their leaves is taken for that leaf.
    """
    sizes: list[int] = []
    leaves, structure = jax.tree.flatten(args)
    own = {(x.shape, str(x.dtype)) for x in leaves}
    moving = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]

    def keep(leaves):
        def of_floats(*floats):
            values = list(leaves)
            for i, x in zip(moving, floats, strict=True):
                values[i] = x
            return function(*jax.tree.unflatten(structure, values))

        _, pull = jax.vjp(of_floats, *(leaves[i] for i in moving))
        for x in jax.tree.leaves(pull):
            if hasattr(x, "shape") and (x.shape, str(x.dtype)) not in own:
                sizes.append(_bytes(x))
        return ()

    jax.make_jaxpr(keep)(leaves)
    return sum(sizes)


def _once(work: Work) -> float:
    return work.once


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs that an equation holds; of a custom_jvp or custom_vjp, the function's alone."""
    for value in eqn.params.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            if hasattr(getattr(each, "jaxpr", each), "eqns"):
                yield each


def _all(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in _inner(eqn):
            yield from _all(inner)


def _product(eqn: Any) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)


def _convolution(eqn: Any) -> int:
    kernel = eqn.invars[1].aval.shape
    out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // max(out_features, 1)


def _bytes(x: Any) -> int:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or x.dtype == jax.dtypes.float0:
        return 0
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
