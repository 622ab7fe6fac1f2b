"""A gathered weight is not kept for backward: it is gathered again.

Autodiff keeps what backward needs, and a product needs its weight: without rematerialisation in the
model, all gathered weights would pile up between forward and backward, which is stage 2's memory at
stage 3's traffic. So reads that no remat of the model's own covers are put under a checkpoint that
keeps every result but gathered weights.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend import core

_REMAT = "remat2"  # the primitive of jax.checkpoint
# Casts and changes of shape: cheap to redo, and of a weight they would keep a whole copy.
_CHEAP = {
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


def keep_all_but_gathered(primitive, *_, **params) -> bool:
    """A `jax.checkpoint` policy: every result is kept, except gathered weights and their views."""
    return primitive.name not in _CHEAP and not _gathers(primitive, params)


def regathering(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a local loss so that it keeps no gathered weight for backward.

    Layers in a scan are covered layer by layer, in the scan's body: around the whole scan a
    checkpoint gathers twice and keeps the stack all the same. Unrolled layers are covered together.
    """

    def wrapped(*args):
        with _scan_bodies_covered():
            jaxpr, shapes = jax.make_jaxpr(loss, return_shape=True)(*args)
        uncovered, total = _gathered(jaxpr.jaxpr)
        run = core.jaxpr_as_fun(jaxpr)
        if 2 * uncovered > total:
            run = jax.checkpoint(run, policy=keep_all_but_gathered)
        return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(args)))

    return wrapped


@contextmanager
def _scan_bodies_covered() -> Iterator[None]:
    """While a model is traced, the bodies of its scans are checkpointed where they gather.

    Models call `jax.lax.scan` themselves, or Flax does for them; there is no hook in between.
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
        if _gathers(eqn.primitive, eqn.params):
            size = sum(math.prod(x.aval.shape) for x in eqn.outvars)  # pyright: ignore
            uncovered, total = uncovered + size, total + size
            continue
        for inner in _jaxprs(eqn.params):
            inside, all_inside = _gathered(inner)
            times = eqn.params.get("length", 1) if name == "scan" else 1
            uncovered += 0 if name == _REMAT else inside * times
            total += all_inside * times
    return uncovered, total


def _gathers(primitive, params) -> bool:
    """Whether an equation is a read of jzero's that gathers: as called, or as differentiated."""
    if primitive.name == "all_gather":
        return any(str(a).startswith("zero_") for a in params["axis_name"])
    if primitive.name in ("custom_vjp_call", "shard_map"):
        return any(_gathers(eqn.primitive, eqn.params) for j in _jaxprs(params) for eqn in j.eqns)
    return False


def _jaxprs(params) -> Iterator[core.Jaxpr]:
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, core.ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, core.Jaxpr):
                yield x
