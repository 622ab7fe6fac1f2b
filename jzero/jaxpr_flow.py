"""Follows sets of facts through a jaxpr, into the jaxprs that its calls and loops hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Facts = frozenset[Any]
NONE: Facts = frozenset()

REMAT = "remat2"
"""The primitive of jax.checkpoint."""

# Primitives that run one jaxpr on their operands.
_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    REMAT: "jaxpr",
    "shard_map": "jaxpr",
}


class Flow(ABC):
    """What is known of each value, as a set that only grows from where it is first known.

    A subclass says what a primitive makes of its operands.
    """

    @abstractmethod
    def value(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        """Of a primitive without a jaxpr inside, or one not known: the facts of its outputs."""

    def constant(self, x: Any) -> Facts:
        return NONE

    def sliced(self, facts: Facts) -> Facts:
        """Of one slice of what a loop scans."""
        return facts

    def stacked(self, facts: Facts) -> Facts:
        """Of the stack of what a loop hands out."""
        return facts

    def closed(self, jaxpr: Any, facts: Sequence[Facts]) -> list[Facts]:
        """Walks a jaxpr, closed or not, whose inputs are so; the facts of its outputs."""
        inner = getattr(jaxpr, "jaxpr", jaxpr)
        known: dict[Any, Facts] = dict(zip(inner.invars, facts, strict=True))
        consts = zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False)
        known.update((v, self.constant(c)) for v, c in consts)

        def look(v: Any) -> Facts:
            return NONE if isinstance(v, core.Literal) else known.get(v, NONE)

        for eqn in inner.eqns:
            outs = self.step(eqn, [look(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, outs, strict=True))
        return [look(v) for v in inner.outvars]

    def step(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        name, params = eqn.primitive.name, eqn.params
        if name in _CALLS and _CALLS[name] in params:
            return self.closed(params[_CALLS[name]], facts)
        if name == "cond":
            outs = [self.closed(branch, facts[1:]) for branch in params["branches"]]
            return [
                self.chosen(eqn, facts[0], NONE.union(*each)) for each in zip(*outs, strict=True)
            ]
        if name == "scan":
            return self._scan(eqn, facts)
        if name == "while":
            return self._while(eqn, facts)
        return self.value(eqn, facts)

    def chosen(self, eqn: Any, index: Facts, either: Facts) -> Facts:
        """Of a value that is one of several branches'."""
        return index | either

    def _scan(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        # The parameters that count constants and carries differ between JAX versions; what is
        # scanned has one dimension less inside.
        body = eqn.params["jaxpr"]
        outside = [v.aval.ndim for v in eqn.invars]
        scanned = sum(a.ndim != b for a, b in zip(body.in_avals, outside, strict=True))
        outs = zip(body.out_avals, eqn.outvars, strict=True)
        carried = sum(a.ndim == v.aval.ndim for a, v in outs)
        split = len(facts) - scanned
        consts, carry = facts[: split - carried], facts[split - carried : split]
        slices = [self.sliced(x) for x in facts[split:]]
        ys: list[Facts] = []

        def run(carry: list[Facts]) -> list[Facts]:
            outs = self.closed(body, [*consts, *carry, *slices])
            ys[:] = outs[carried:]
            return outs[:carried]

        return _settle(run, carry) + [self.stacked(y) for y in ys]

    def _while(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        params = eqn.params
        a, b = params["cond_nconsts"], params["body_nconsts"]
        consts = facts[a : a + b]
        body = params["body_jaxpr"]
        carry = _settle(lambda carry: self.closed(body, [*consts, *carry]), facts[a + b :])
        self.closed(params["cond_jaxpr"], [*facts[:a], *carry])
        return carry


def _settle(run: Callable[[list[Facts]], list[Facts]], carry: list[Facts]) -> list[Facts]:
    """What a loop carries, once it does not change any more."""
    while True:
        wider = [a | b for a, b in zip(carry, run(carry), strict=True)]
        if wider == carry:
            return carry
        carry = wider
