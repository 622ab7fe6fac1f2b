"""Complex results in a traced loss, taken apart so that a checkpoint can keep them.

A `jax.checkpoint` whose policy keeps a complex result fails in JAX (0.10 to 0.12): what is kept
goes through `reduce_precision`, which takes real numbers alone. So a complex result is kept as its
real and imaginary parts, and what follows takes it from these.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jzero.renaming import inside, renamed, stand_in


def is_complex(x: Any) -> bool:
    """Whether an abstract value is an array of complex numbers."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.complexfloating)


def makes_complex(primitive: Any, avals: tuple[Any, ...]) -> bool:
    """Whether a policy must not keep what a primitive makes of such operands.

    Its parts are kept, or it is made again from those of its operands.
    """
    name = primitive.name
    return name == "complex" or (name not in ("real", "imag") and any(map(is_complex, avals)))


def in_pairs(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same computation; the same jaxpr where nothing is complex."""
    eqns: list[Any] = []
    now: dict[Any, Any] = {}  # a complex result -> the same, of its parts
    for old in jaxpr.eqns:
        eqn = inside(renamed(old, now) if now else old, in_pairs)
        eqns.append(eqn)
        for v in eqn.outvars:
            if is_complex(v.aval) and not isinstance(v, core.DropVar):
                eqns += _pair(v, now)
    if not now and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True)):
        return jaxpr
    return jaxpr.replace(eqns=eqns, outvars=[stand_in(v, now) for v in jaxpr.outvars])


def _pair(v: Any, now: dict[Any, Any]) -> list[Any]:
    like = jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
    inner = jax.make_jaxpr(lambda x: lax.complex(lax.real(x), lax.imag(x)))(like).jaxpr
    [now[v]] = inner.outvars
    return [renamed(eqn, {inner.invars[0]: v}) for eqn in inner.eqns]
