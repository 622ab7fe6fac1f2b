"""jzero's reads of parameters in a traced loss: what they read, and what they gather."""

import math
from typing import Any

from jax.extend import core

from jzero.gather import read_with_tap
from jzero.mesh import MANUAL

_READ = read_with_tap.__name__  # pyright: ignore[reportAttributeAccessIssue]
# Casts and changes of shape: cheap to redo, and of a weight they are still the weight.
CHEAP = frozenset(
    {
        "broadcast_in_dim",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "pad",
        "reshape",
        "rev",
        "slice",
        "squeeze",
        "transpose",
    }
)


def gathers(primitive, params) -> bool:
    """Whether an equation is a read that gathers, as called or as differentiated.

    Also a gather of the user's own over the ZeRO axes.
    """
    if primitive.name == "all_gather":
        return any(str(a).startswith(MANUAL) for a in params["axis_name"])
    if primitive.name in ("custom_vjp_call", "shard_map"):
        return any(
            gathers(eqn.primitive, eqn.params)
            for j in core.jaxprs_in_params(params)
            for eqn in j.eqns
        )
    return False


def is_read(eqn) -> bool:
    """Whether an equation is a read: of a weight that is gathered, or whose gradient is reduced."""
    if eqn.primitive.name == "custom_vjp_call":
        return is_trained_read(eqn)
    return gathers(eqn.primitive, eqn.params)


def is_trained_read(eqn) -> bool:
    """Whether an equation is a read with a tap: it takes a stored weight and the tap."""
    if eqn.primitive.name != "custom_vjp_call":
        return False
    return eqn.params["call_jaxpr"].jaxpr.debug_info.func_name == _READ


def elements_read(eqn) -> int:
    """Elements of all weights that an equation reads, loops multiplied out."""
    if is_read(eqn):
        return sum(math.prod(v.aval.shape) for v in eqn.outvars)
    times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
    return times * sum(
        elements_read(each) for j in core.jaxprs_in_params(eqn.params) for each in j.eqns
    )


def inputs_read(eqn) -> list[int]:
    """Which of an equation's inputs its reads take: stored weights, and taps for gradients."""
    if is_read(eqn):
        return list(range(len(eqn.invars)))
    for inner in core.jaxprs_in_params(eqn.params):
        if len(inner.invars) != len(eqn.invars):
            continue
        wanted: set[Any] = set()
        for each in reversed(inner.eqns):
            wanted.update(each.invars[i] for i in inputs_read(each))
            if each.primitive.name in CHEAP and not wanted.isdisjoint(each.outvars):
                wanted.add(each.invars[0])
        return [i for i, v in enumerate(inner.invars) if v in wanted]
    return []
