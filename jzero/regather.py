"""A gathered weight is not kept for backward: it is gathered again.

Autodiff keeps what backward needs, and a product needs its weight: without rematerialisation in the
model, all gathered weights would pile up between forward and backward, which is stage 2's memory at
stage 3's traffic. So reads that no remat of the model's own covers are put under a checkpoint that
keeps every result but gathered weights: in a scan layer by layer, unrolled layers together.
"""

import math
import operator
from typing import Any

import jax
from jax.extend import core

from jzero.jaxpr_flow import REMAT
from jzero.reads import CHEAP, gathers

# Differentiated by rules that do not see the jaxpr, or of axes of its own.
_OWN_RULES = frozenset({"custom_jvp_call", "custom_vjp_call", "shard_map"})
_REDONE = CHEAP | {"optimization_barrier"}  # of a weight they would keep a whole copy


def keep_all_but_gathered(primitive, *_, **params) -> bool:
    """A `jax.checkpoint` policy: every result is kept, except gathered weights and their views."""
    return primitive.name not in _REDONE and not gathers(primitive, params)


def mostly_uncovered(closed: core.ClosedJaxpr) -> bool:
    """Whether most weights of a traced loss are gathered outside of any remat."""
    uncovered, total = _gathered(closed.jaxpr)
    return 2 * uncovered > total


def scan_bodies_covered(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same loss, where the bodies of scans that gather are checkpointed.

    Around the whole scan a checkpoint would gather twice and keep the stack all the same.
    """
    return core.ClosedJaxpr(_covered(closed.jaxpr), closed.consts)


def _covered(jaxpr: core.Jaxpr) -> core.Jaxpr:
    eqns = [_cover(eqn) for eqn in jaxpr.eqns]
    # JAX caches by a jaxpr's identity.
    changed = any(new is not old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr.replace(eqns=eqns) if changed else jaxpr


def _cover(eqn: Any) -> Any:
    name = eqn.primitive.name
    if name in _OWN_RULES:
        return eqn
    params = {key: _inside(value) for key, value in eqn.params.items()}
    if name == "scan":
        body = params["jaxpr"]
        if _gathered(body.jaxpr)[0]:
            run = jax.checkpoint(
                core.jaxpr_as_fun(body), policy=keep_all_but_gathered, prevent_cse=False
            )
            params["jaxpr"] = jax.make_jaxpr(run)(*body.in_avals)
    changed = any(params[key] is not eqn.params[key] for key in params)
    return eqn.replace(params=params) if changed else eqn


def _inside(value: Any) -> Any:
    """A parameter of an equation: a jaxpr, closed or not, a tuple of them, or anything else."""
    if isinstance(value, core.Jaxpr):
        return _covered(value)
    if isinstance(value, core.ClosedJaxpr):
        inner = _covered(value.jaxpr)
        return value if inner is value.jaxpr else core.ClosedJaxpr(inner, value.consts)
    if isinstance(value, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in value):
        inside = tuple(map(_inside, value))
        return value if all(map(operator.is_, inside, value)) else inside
    return value


def _gathered(jaxpr: core.Jaxpr) -> tuple[int, int]:
    """Elements of the weights gathered outside of any remat, and of all gathered."""
    uncovered = total = 0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if gathers(eqn.primitive, eqn.params):
            size = sum(math.prod(x.aval.shape) for x in eqn.outvars)  # pyright: ignore
            uncovered, total = uncovered + size, total + size
            continue
        for inner in core.jaxprs_in_params(eqn.params):
            inside, all_inside = _gathered(inner)
            times = eqn.params.get("length", 1) if name == "scan" else 1
            uncovered += 0 if name == REMAT else inside * times
            total += all_inside * times
    return uncovered, total
