"""A local loss, traced and rewritten so that whole weights and gradients do not pile up."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from jzero.complex_pairs import in_pairs
from jzero.in_turn import Prefetch, in_turn
from jzero.read_once import read_once
from jzero.regather import keep_all_but_gathered, mostly_uncovered, scan_bodies_covered


def rewritten(loss: Callable[..., Any], prefetch: Prefetch, regather: bool) -> Callable[..., Any]:
    """The same loss, and the same numbers, with its collectives at other places.

    Arguments:
      loss: a function of the taps of its parameters.
      prefetch: how far ahead unrolled layers are gathered.
      regather: gather weights again for backward instead of keeping them.
    """

    def wrapped(*args):
        jaxpr, shapes = jax.make_jaxpr(loss, return_shape=True)(*args)
        jaxpr = read_once(jaxpr)
        if regather:
            jaxpr = core.ClosedJaxpr(in_pairs(jaxpr.jaxpr), jaxpr.consts)
            jaxpr = scan_bodies_covered(jaxpr)
        run = core.jaxpr_as_fun(in_turn(jaxpr, prefetch))
        if regather and mostly_uncovered(jaxpr):
            run = jax.checkpoint(run, policy=keep_all_but_gathered)
        return jax.tree.unflatten(jax.tree.structure(shapes), run(*jax.tree.leaves(args)))

    return wrapped
