"""Refuses reads that only some devices would take part in.

From stage 2 on a read is a collective, in forward or in backward. Where a branch or a loop depends
on a device's own rows or random numbers, devices part ways: collectives of different parameters
would meet, with wrong numbers on CPU and a hang on accelerators.
"""

from typing import Any

import jax
from jax.extend import core

from jzero.errors import JzeroError
from jzero.jaxpr_flow import NONE, Facts, Flow
from jzero.partition import is_float, is_shardable
from jzero.paths import flatten
from jzero.raw_reads import where
from jzero.sharded import marked_shape

_LOCAL: Facts = frozenset(["local"])
# What these hand out is the same on every device of the axes that they run over.
_UNIFORM = frozenset("psum psum_invariant pmax pmin all_gather all_gather_invariant".split())


def check_uniform(jaxpr: Any, batch: Any, variables: Any, reads: bool) -> None:
    """Checks that devices part ways nowhere where they must not.

    Arguments:
      jaxpr: of a loss with marked reads, `jzero.probe.trace`: its last inputs are the batch, its
        outputs the model's other variables after the call.
      batch, variables: those pytrees.
      reads: whether reads are collectives, so that every device must take the same branches.

    Raises:
      JzeroError: naming the branch or loop, the user's line, and what to do; or an integer variable
        that would be another on every device.
    """
    local = len(jax.tree.leaves(batch))
    facts = [NONE] * (len(jaxpr.in_avals) - local) + [_LOCAL] * local
    after = _Divergence(reads).closed(jaxpr, facts)
    for (path, x), fact in zip(flatten(variables).items(), after, strict=True):
        if fact and not is_float(str(x.dtype)) and is_shardable(str(x.dtype)):
            raise JzeroError(
                f"{path}: this {x.dtype} variable of the model is computed from a device's own "
                f"rows, so devices would disagree; keep it as a float, which is averaged over "
                f"them, or sum it with lax.psum over zero.axis_name"
            )


class _Divergence(Flow):
    """Follows whether a value may differ between devices."""

    def __init__(self, reads: bool):
        self.reads = reads

    def value(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        name = eqn.primitive.name
        if name == "axis_index":
            return [_LOCAL]
        local = NONE if name in _UNIFORM else NONE.union(*facts)
        return [local] * len(eqn.outvars)

    def step(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        outs = super().step(eqn, facts)
        if not self.reads:
            return outs
        name, params = eqn.primitive.name, eqn.params
        if name == "cond" and facts[0] and any(map(_reads, params["branches"])):
            _refuse(eqn, "a branch")
        if name == "while" and _reads(params["body_jaxpr"]):
            consts = params["cond_nconsts"]
            if any(self.closed(params["cond_jaxpr"], [*facts[:consts], *outs])):
                _refuse(eqn, "a loop")
        return outs


def _reads(jaxpr: Any) -> bool:
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return any(
        (eqn.primitive.name == "name" and marked_shape(eqn.params["name"]) is not None)
        or any(map(_reads, core.jaxprs_in_params(eqn.params)))
        for eqn in inner.eqns
    )


def _refuse(eqn: Any, what: str) -> None:
    raise JzeroError(
        f"parameters are read inside {what}{where(eqn)} that depends on a device's own rows or "
        f"random numbers: devices would not gather together. Read them before it "
        f"(w = layer.kernel[...], or jzero.gather), compute both and choose with jnp.where, or "
        f"decide alike everywhere, from lax.psum over zero.axis_name"
    )
