"""Unrolled layers in turn: how far ahead they are gathered, how long reductions may wait.

A scan keeps its layers apart. Of unrolled ones XLA may start every gather at once, since a stored
weight is always there, and leave every reduce-scatter to the end, since nothing waits for it: whole
weights and whole gradients pile up. So each layer's weights are tied to a result from before it:
forward they are not gathered before that result is there, and backward its cotangent is not used
before the layer's gradients are reduced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jzero.reads import CHEAP, elements_read, inputs_read, is_read
from jzero.renaming import renamed, stand_in


@dataclass(frozen=True)
class Prefetch:
    """How many elements of unrolled layers may be gathered before they are used.

    Attributes:
      ahead: so many are, beside the layer that is being used; 0 for none.
      live: never more, that layer included, but that layer itself.
    """

    ahead: int
    live: int


@dataclass(frozen=True)
class _Layer:
    """An equation that reads weights.

    Attributes:
      at: its place.
      elements: that it reads.
      inputs: stored weights and taps among the loss's own inputs.
      result: the place and the variable of what is computed with the weights; None if nothing is.
    """

    at: int
    elements: int
    inputs: tuple[Any, ...]
    result: tuple[int, Any] | None


def in_turn(closed: core.ClosedJaxpr, prefetch: Prefetch) -> core.ClosedJaxpr:
    """The same loss, its unrolled layers tied to one another.

    Arguments:
      closed: the loss, traced: its inputs are taps, its constants stored weights and the batch.
      prefetch: how far ahead gathers may run.
    """
    jaxpr = closed.jaxpr
    layers = _layers(jaxpr)
    tied: dict[int, list[tuple[Any, _Layer]]] = {}  # by the place of the result
    for k, layer in enumerate(layers):
        result = _waits_for(layers[:k], layer, prefetch)
        if result is not None and layer.inputs:
            tied.setdefault(result[0], []).append((result[1], layer))
    eqns: list[Any] = []
    now: dict[Any, Any] = {}  # variable -> what stands for it after the barriers so far
    for at, eqn in enumerate(jaxpr.eqns):
        eqns.append(renamed(eqn, now))
        for result, layer in tied.get(at, []):
            eqns += _barrier(result, layer.inputs, now)
    outvars = [stand_in(v, now) for v in jaxpr.outvars]
    return core.ClosedJaxpr(jaxpr.replace(eqns=eqns, outvars=outvars), closed.consts)


def _layers(jaxpr) -> list[_Layer]:
    own = {*jaxpr.invars, *jaxpr.constvars}
    found = []
    for at, eqn in enumerate(jaxpr.eqns):
        elements = 0 if eqn.primitive.name in ("scan", "while") else elements_read(eqn)
        if elements:
            read = [eqn.invars[i] for i in inputs_read(eqn)]
            read = [v for v in read if not isinstance(v, core.Literal)]
            inputs = tuple(dict.fromkeys(v for v in read if v in own))
            found.append(_Layer(at, elements, inputs, _result(jaxpr.eqns, at)))
    return found


def _result(eqns: Sequence[Any], at: int) -> tuple[int, Any] | None:
    """What is first computed with the weights that an equation reads."""
    if not is_read(eqns[at]):
        return _activation(at, eqns[at])
    weights = set(eqns[at].outvars)
    for later in range(at + 1, len(eqns)):
        eqn = eqns[later]
        if weights.isdisjoint(v for v in eqn.invars if not isinstance(v, core.Literal)):
            continue
        if eqn.primitive.name not in CHEAP:
            return _activation(later, eqn)
        weights.update(eqn.outvars)
    return None


def _activation(at: int, eqn) -> tuple[int, Any] | None:
    """The largest float that an equation makes; what it only hands on says nothing."""
    handed_on = {v for inner in core.jaxprs_in_params(eqn.params) for v in inner.invars}
    made = [
        [not isinstance(v, core.Literal) and v in handed_on for v in inner.outvars]
        for inner in core.jaxprs_in_params(eqn.params)
    ]
    found = [
        v
        for i, v in enumerate(eqn.outvars)
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
        and not any(len(each) == len(eqn.outvars) and each[i] for each in made)
    ]
    return (at, max(found, key=lambda v: v.aval.size)) if found else None


def _waits_for(
    before: Sequence[_Layer], layer: _Layer, prefetch: Prefetch
) -> tuple[int, Any] | None:
    """The last result after which no more is gathered ahead than may be."""
    pending = 0
    for earlier in reversed(before):
        enough = pending >= prefetch.ahead
        too_much = pending + earlier.elements + layer.elements > prefetch.live
        if (enough or too_much) and earlier.result is not None and earlier.result[0] < layer.at:
            return earlier.result
        pending += earlier.elements
    return None


@jax.custom_vjp
def _tie(result, inputs):
    return lax.optimization_barrier((result, inputs))


def _tie_forward(result, inputs):
    return _tie(result, inputs), None


def _tie_backward(_, cotangents):
    return lax.optimization_barrier(cotangents)


_tie.defvjp(_tie_forward, _tie_backward)


def _barrier(result, inputs: Sequence[Any], now: dict[Any, Any]) -> list[Any]:
    """Equations that tie a result and a later layer's inputs; `now` gets their new names."""
    old = (result, *inputs)
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in old]
    inner = jax.make_jaxpr(lambda result, *inputs: _tie(result, inputs))(*avals).jaxpr
    names = {v: now.get(o, o) for v, o in zip(inner.invars, old, strict=True)}
    now.update(zip(old, inner.outvars, strict=True))
    return [renamed(eqn, names) for eqn in inner.eqns]
