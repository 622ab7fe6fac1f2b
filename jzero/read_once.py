"""A leaf that a loss reads twice is gathered once, and its gradient is reduced once.

Tied embeddings are read at both ends of a model. Their two gradients meet before the reduction: the
paper's traffic counts each parameter once, whatever a model does with it.
"""

from typing import Any

from jax.extend import core

from jzero.reads import is_read
from jzero.renaming import renamed, stand_in


def read_once(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same loss, where a leaf that is read again is the one read before.

    Only outside of layers: what a loop's body or a remat gathers is freed behind it.

    Arguments:
      closed: the loss, traced.
    """
    eqns: list[Any] = []
    first: dict[Any, Any] = {}  # the stored weight and the tap of a read -> what it makes
    now: dict[Any, Any] = {}  # what a later read makes -> what the first made
    for eqn in closed.jaxpr.eqns:
        eqn = renamed(eqn, now)
        made = [v for v in eqn.outvars if not isinstance(v, core.DropVar)]
        if made and is_read(eqn):
            taken = tuple(eqn.invars)
            if taken in first:
                now.update(zip(made, first[taken], strict=True))
                continue
            first[taken] = made
        eqns.append(eqn)
    outvars = [stand_in(v, now) for v in closed.jaxpr.outvars]
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts)
