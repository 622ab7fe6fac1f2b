"""A gathered weight is not kept for backward: it is gathered again.

Autodiff keeps what backward needs, and a product needs its weight: without rematerialisation in the
model, all gathered weights would pile up between forward and backward, which is stage 2's memory at
stage 3's traffic. So reads that no remat of the model's own covers are put under a checkpoint that
keeps every result but gathered weights: in a scan layer by layer, unrolled layers together.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.extend import core

from jzero.jaxpr_flow import REMAT
from jzero.reads import CHEAP, gathers

_REDONE = CHEAP | {"optimization_barrier"}  # of a weight they would keep a whole copy


def keep_all_but_gathered(primitive, *_, **params) -> bool:
    """A `jax.checkpoint` policy: every result is kept, except gathered weights and their views."""
    return primitive.name not in _REDONE and not gathers(primitive, params)


def mostly_uncovered(closed: core.ClosedJaxpr) -> bool:
    """Whether most weights of a traced loss are gathered outside of any remat."""
    uncovered, total = _gathered(closed.jaxpr)
    return 2 * uncovered > total


@contextmanager
def scan_bodies_covered() -> Iterator[None]:
    """While a model is traced, the bodies of its scans are checkpointed where they gather.

    Around the whole scan a checkpoint would gather twice and keep the stack all the same. Models
    call `jax.lax.scan` themselves, or Flax does for them; there is no hook in between.
    """
    scan = jax.lax.scan

    def covering(f, init, xs=None, length=None, *args, **kwargs):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), xs)
        uncovered, _ = _gathered(jax.make_jaxpr(f)(init, one).jaxpr)
        body = f
        if uncovered:
            body = jax.checkpoint(f, policy=keep_all_but_gathered, prevent_cse=False)
        return scan(body, init, xs, length, *args, **kwargs)

    jax.lax.scan = covering
    try:
        yield
    finally:
        jax.lax.scan = scan


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
