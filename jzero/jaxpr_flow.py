"""Follows sets of facts through a jaxpr, into the jaxprs that its calls and loops hold."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from jax.extend import core

Facts = frozenset[Any]
NONE: Facts = frozenset()

REMAT = "remat2"
"""The primitive of jax.checkpoint."""

_CALLS = {
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",  # as closed_call is named from JAX 0.12 on
    "jit": "jaxpr",
    REMAT: "jaxpr",
}


def called(eqn: Any) -> Any | None:
    """The jaxpr, closed or not, that a call runs on its operands; None of any other primitive."""
    key = _CALLS.get(eqn.primitive.name)
    return None if key is None else eqn.params[key]


def split_scan(eqn: Any) -> tuple[int, int]:
    """(constants, carries) among the inputs of a scan; the rest of them it scans."""
    # The parameters that count them differ between JAX versions; what is scanned has one dimension
    # less inside.
    body = eqn.params["jaxpr"]
    inside = zip(body.in_avals, eqn.invars, strict=True)
    scanned = sum(a.ndim != v.aval.ndim for a, v in inside)
    outs = zip(body.out_avals, eqn.outvars, strict=True)
    carried = sum(a.ndim == v.aval.ndim for a, v in outs)
    return len(eqn.invars) - scanned - carried, carried


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
        inner = params["jaxpr"] if name == "shard_map" else called(eqn)
        if inner is not None:
            return self.closed(inner, facts)
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
        body = eqn.params["jaxpr"]
        first, carried = split_scan(eqn)
        consts, carry = facts[:first], facts[first : first + carried]
        slices = [self.sliced(x) for x in facts[first + carried :]]
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
