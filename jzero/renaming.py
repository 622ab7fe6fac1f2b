"""Variables of a jaxpr that others stand for, while it is rewritten."""

from collections.abc import Mapping
from typing import Any

from jax.extend import core


def renamed(eqn: Any, names: Mapping[Any, Any]) -> Any:
    """An equation that takes, for each of its operands, what stands for it."""
    return eqn.replace(invars=[stand_in(v, names) for v in eqn.invars])


def stand_in(v: Any, names: Mapping[Any, Any]) -> Any:
    """What stands for an operand: itself if nothing else does."""
    return v if isinstance(v, core.Literal) else names.get(v, v)
