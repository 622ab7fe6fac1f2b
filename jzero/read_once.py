"""A leaf that a loss reads twice is gathered once, and its gradient is reduced once.

Tied embeddings are read at both ends of a model. Their two gradients meet before the reduction: the
paper's traffic counts each parameter once, whatever a model does with it. The price: between its
two reads the leaf is whole, and in backward its gradient.
"""

from typing import Any

import jax.numpy as jnp
from jax.extend import core

from jzero.jaxpr_flow import REMAT
from jzero.reads import elements_read, is_trained_read
from jzero.renaming import renamed, stand_in

_WHOLE = ("jit", REMAT)
"""Calls that are looked into: a loss may be in one as a whole."""


def read_once(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same loss, where a leaf that is read again is the one read before.

    Not where gradients are reduced in a wider dtype than the model computes in: the sum of two
    would be rounded before it is wide. Nor across calls: what a loop's body or a remat gathers is
    freed behind it.

    Arguments:
      closed: the loss, traced.
    """
    return core.ClosedJaxpr(_read_once(closed.jaxpr), closed.consts)


def _read_once(jaxpr: core.Jaxpr) -> core.Jaxpr:
    eqns: list[Any] = []
    first: dict[Any, Any] = {}  # a stored weight and its tap -> the whole weight
    now: dict[Any, Any] = {}  # what a later read makes -> what the first made
    for eqn in jaxpr.eqns:
        eqn = renamed(eqn, now)
        if eqn.primitive.name in _WHOLE and elements_read(eqn):  # JAX caches by a jaxpr's identity
            eqn = eqn.replace(params=eqn.params | {"jaxpr": _inside(eqn.params["jaxpr"])})
        elif _may_be_one(eqn):
            [made], taken = eqn.outvars, tuple(eqn.invars)
            if taken in first:
                now[made] = first[taken]
                continue
            first[taken] = made
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns, outvars=[stand_in(v, now) for v in jaxpr.outvars])


def _inside(jaxpr: Any) -> Any:
    return read_once(jaxpr) if isinstance(jaxpr, core.ClosedJaxpr) else _read_once(jaxpr)


def _may_be_one(eqn: Any) -> bool:
    """Whether an equation is a read that is used, whose gradient is reduced no wider than it is."""
    if not is_trained_read(eqn) or not eqn.outvars or isinstance(eqn.outvars[0], core.DropVar):
        return False
    reduced, computed = eqn.invars[1].aval.dtype, eqn.outvars[0].aval.dtype
    return jnp.promote_types(reduced, computed) == computed
