"""Follows arrays through a jaxpr: which are computed element by element, and from which parameter.

What is not known to be so counts as reading across a parameter: an unknown primitive only costs the
unpadding of padded leaves.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jzero.jaxpr_flow import called, split_scan

# Primitives that compute each element of their output from the elements at the same place.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor
    ge gt imag integer_pow is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter
    not or population_count pow real reduce_precision rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor""".split()
)
# Of one operand: zero where the operand is zero.
_KEEPS_ZERO = frozenset(
    """abs asin asinh atan atanh cbrt ceil conj convert_element_type copy copy_p erf expm1 floor
    imag log1p neg real reduce_precision round sign sin sinh sqrt square stop_gradient tan
    tanh""".split()
)
_SHAPE_ONLY = frozenset("broadcast_in_dim expand_dims reshape rev slice squeeze transpose".split())


@dataclass(frozen=True)
class Kind:
    """What is known of a value.

    Attributes:
      leaf: it is computed element by element from arrays of this parameter's shape.
      mixed: it is an array of any other sort. Neither of both: the same everywhere, as a scalar.
      zero: it is zero in the parameter's padding (or everywhere, without a leaf).
    """

    leaf: str | None = None
    mixed: bool = False
    zero: bool = False


UNIFORM = Kind()
ZERO = Kind(zero=True)
MIXED = Kind(mixed=True)


class Walk:
    """Follows kinds through a jaxpr and collects the parameters that are read across."""

    def __init__(self, paths: Mapping[str, Any]):
        self.paths = paths
        self.found: set[str] = set()

    def closed(self, closed: Any, kinds: Sequence[Kind]) -> list[Kind]:
        return self.run(closed.jaxpr, [_of_constant(c) for c in closed.consts], kinds)

    def run(self, jaxpr: Any, consts: Sequence[Kind], kinds: Sequence[Kind]) -> list[Kind]:
        known: dict[Any, Kind] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, kinds, strict=True))

        def look(v: Any) -> Kind:
            return _of_constant(v.val) if isinstance(v, core.Literal) else known[v]

        for eqn in jaxpr.eqns:
            known.update(zip(eqn.outvars, self.step(eqn, [*map(look, eqn.invars)]), strict=True))
        return [look(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        name = eqn.primitive.name
        inner = called(eqn)
        if isinstance(inner, core.Jaxpr):
            return self.run(inner, [], kinds)
        if inner is not None:
            return self.closed(inner, kinds)
        if name == "cond":
            outs = [self.closed(branch, kinds[1:]) for branch in eqn.params["branches"]]
            return [self.join(*same) for same in zip(*outs, strict=True)]
        if name == "scan":
            return self.scan(eqn, kinds)
        if name == "while":
            return self.loop(eqn, kinds)
        if name == "optimization_barrier":
            return kinds
        return [self.value(eqn, kinds, out.aval) for out in eqn.outvars]

    def value(self, eqn: Any, kinds: list[Kind], out: Any) -> Kind:
        """One output of a primitive without a jaxpr inside."""
        name = eqn.primitive.name
        shapes = [v.aval.shape for v in eqn.invars]
        leaves = {k.leaf for k in kinds if k.leaf is not None}
        alone = len(leaves) == 1 and not any(k.mixed for k in kinds)
        if name in _ELEMENTWISE:
            same = all(s == out.shape for s, k in zip(shapes, kinds, strict=True) if k.leaf)
            if not leaves:
                return self.uniform(kinds, out, _zero(eqn, kinds))
            if alone and same:
                return Kind(next(iter(leaves)), zero=_zero(eqn, kinds))
        elif not leaves:
            if name in _SHAPE_ONLY:
                return self.uniform(kinds, out, kinds[0].zero)
            if name == "reduce_sum" and kinds[0].zero:
                return ZERO
            if any(not k.mixed and np.prod(s) > 1 for k, s in zip(kinds, shapes, strict=True)):
                self.found.update(self.paths)  # it may count the elements of a leaf
        elif alone and name in ("broadcast_in_dim", "reshape") and shapes[0] == out.shape:
            return kinds[0]
        elif alone and name == "reduce_sum" and kinds[0].zero and not out.shape:
            return UNIFORM
        self.found |= leaves
        return UNIFORM if out.size == 1 else MIXED

    def uniform(self, kinds: Sequence[Kind], out: Any, zero: bool) -> Kind:
        if any(k.mixed for k in kinds) and out.size != 1:
            return MIXED
        return Kind(zero=zero)

    def join(self, *kinds: Kind) -> Kind:
        """A value that is one or another."""
        leaves = {k.leaf for k in kinds if k.leaf is not None}
        if any(k.mixed for k in kinds) or len(leaves) > 1:
            self.found |= leaves
            return MIXED
        return Kind(next(iter(leaves), None), zero=all(k.zero for k in kinds))

    def scan(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        body_jaxpr = eqn.params["jaxpr"]
        first, carried = split_scan(eqn)
        split = first + carried
        consts, carry, xs = kinds[:first], kinds[first:split], kinds[split:]
        self.found |= {k.leaf for k in xs if k.leaf is not None}
        slices = [
            UNIFORM if x.size == 1 else MIXED if k.leaf is not None else k
            for k, x in zip(xs, body_jaxpr.in_avals[split:], strict=True)
        ]
        ys: list[Kind] = []

        def body(carry):
            outs = self.closed(body_jaxpr, [*consts, *carry, *slices])
            ys[:] = outs[carried:]
            return outs[:carried]

        carry = self.settle(body, carry)
        self.found |= {k.leaf for k in ys if k.leaf is not None}
        return carry + [MIXED] * len(ys)

    def loop(self, eqn: Any, kinds: list[Kind]) -> list[Kind]:
        a, b = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        carry = self.settle(
            lambda carry: self.closed(eqn.params["body_jaxpr"], [*kinds[a : a + b], *carry]),
            kinds[a + b :],
        )
        self.closed(eqn.params["cond_jaxpr"], [*kinds[:a], *carry])
        return carry

    def settle(self, body: Any, carry: list[Kind]) -> list[Kind]:
        """The kinds that a loop's body keeps as they are."""
        while True:
            wider = [self.join(*pair) for pair in zip(carry, body(carry), strict=True)]
            if wider == carry:
                return carry
            carry = wider


def _of_constant(x: Any) -> Kind:
    if getattr(x, "size", 1) != 1:
        return MIXED
    if jnp.issubdtype(jax.dtypes.result_type(x), jax.dtypes.prng_key):
        return UNIFORM
    return UNIFORM if np.any(np.asarray(x)) else ZERO


def _zero(eqn: Any, kinds: Sequence[Kind]) -> bool:
    """Whether an elementwise result is zero wherever its operands are known to be."""
    name = eqn.primitive.name
    if name in _KEEPS_ZERO:
        return kinds[0].zero
    if name == "integer_pow":
        return kinds[0].zero and eqn.params["y"] > 0
    if name == "mul":  # what is zero in the padding times a number; zero times infinity is not zero
        return any(k.zero for k in kinds) and all(k.zero or k.leaf is None for k in kinds)
    if name == "div":  # by a number that is not zero, or everything is infinite anyway
        return kinds[0].zero and kinds[1].leaf is None and not kinds[1].zero
    if name == "select_n":
        return all(k.zero for k in kinds[1:])
    return name in ("add", "add_any", "sub", "max", "min") and all(k.zero for k in kinds)
