"""A gathered weight is not kept for backward: it is gathered again.

Autodiff keeps what backward needs, and a product needs its weight: without rematerialisation in the
model, all gathered weights would pile up between forward and backward, which is stage 2's memory at
stage 3's traffic. So reads that no remat of the model's own covers are put under a checkpoint that
keeps every result but gathered weights: in a scan layer by layer, unrolled layers together.
"""

import math
from typing import Any

import jax
from jax.extend import core

from jzero.complex_pairs import makes_complex
from jzero.jaxpr_flow import REMAT
from jzero.reads import CHEAP, gathers
from jzero.renaming import inside

_REDONE = CHEAP | {"optimization_barrier"}  # of a weight they would keep a whole copy


def keep_all_but_gathered(primitive, *avals, **params) -> bool:
    """A `jax.checkpoint` policy: every result is kept, except gathered weights and their views.

    Complex numbers are kept in parts: see `jzero.complex_pairs`.
    """
    again = primitive.name in _REDONE or makes_complex(primitive, avals)
    return not again and not gathers(primitive, params)


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
    eqn = inside(eqn, _covered)
    if eqn.primitive.name != "scan":
        return eqn
    body = eqn.params["jaxpr"]
    if not _gathered(body.jaxpr)[0]:
        return eqn
    run = jax.checkpoint(core.jaxpr_as_fun(body), policy=keep_all_but_gathered, prevent_cse=False)
    return eqn.replace(params=eqn.params | {"jaxpr": jax.make_jaxpr(run)(*body.in_avals)})


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
