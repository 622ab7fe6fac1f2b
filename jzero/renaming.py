"""Equations of a jaxpr with others in them, while it is rewritten: variables, and jaxprs inside."""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend import core


def renamed(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """An equation that takes, for each of its operands, what stands for it."""
    return eqn.replace(invars=[stand_in(v, names) for v in eqn.invars])


def stand_in(v: Any, names: Mapping[Any, Any]) -> Any:
    """What stands for an operand: itself if nothing else does."""
    return v if isinstance(v, core.Literal) else names.get(v, v)


# Differentiated by rules that do not see the jaxpr or need several to agree, or of axes of its own.
_OWN_RULES = frozenset({"custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "shard_map"})


def inside(eqn: Any, change: Callable[[core.Jaxpr], core.Jaxpr]) -> Any:
    """An equation whose calls, branches and loops run changed jaxprs.

    Arguments:
      eqn: the equation; itself is returned where nothing changes, since JAX caches by a jaxpr's
        identity.
      change: jaxpr -> one with the same inputs and outputs, or the same one.
    """

    def of(value: Any) -> Any:
        if isinstance(value, core.Jaxpr):
            return change(value)
        if isinstance(value, core.ClosedJaxpr):
            new = change(value.jaxpr)
            return value if new is value.jaxpr else core.ClosedJaxpr(new, value.consts)
        if isinstance(value, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in value):
            new = tuple(map(of, value))
            return value if all(map(operator.is_, new, value)) else new
        return value

    if eqn.primitive.name in _OWN_RULES:
        return eqn
    params = {key: of(value) for key, value in eqn.params.items()}
    changed = any(params[key] is not eqn.params[key] for key in params)
    return eqn.replace(params=params) if changed else eqn
