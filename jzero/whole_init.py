"""Initialisers that cannot be born sharded: XLA makes their leaf whole on each device, then cuts.

Random draws and what is computed from them element by element are made piece by piece, each on its
device. Factorisations, scans over a dimension and constants are not; measured on compiled programs.
"""

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import jax

from jzero.jaxpr_flow import NONE, Facts, Flow
from jzero.layout import Layout
from jzero.partition import Leaf
from jzero.paths import flatten

_WHOLE = frozenset(
    """cholesky cummax cummin cumlogsumexp cumprod cumsum eig eigh fft ffi_call hessenberg
    householder_product io_callback lu pure_callback qr schur svd triangular_solve tridiagonal
    tridiagonal_solve""".split()
)
# Only where the leaf is padded: its pieces do not fall together with the operand's.
_WHOLE_IF_PADDED = frozenset(["reshape", "sort"])
_CONSTANT = "a constant array"
_DRAWN = "random_bits"  # of itself, it is done in pieces


class _Cause(NamedTuple):
    name: str
    size: int  # elements
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


def whole_at_init(build: Callable[[jax.Array], tuple[Any, Any]], layout: Layout) -> dict[str, str]:
    """The sharded weights that each device makes whole when the model is initialised.

    Arguments:
      build: key -> (parameters, other variables), as `Model.build`; traced, never run.
      layout: where everything lives.

    Returns:
      path -> what makes it whole: a primitive's name such as "qr" (orthogonal initialisers), or
      "a constant array". That costs memory for a moment only: the state is sharded all the same.
    """
    jaxpr, shapes = jax.make_jaxpr(build, return_shape=True)(jax.random.key(0))
    facts = _Causes().closed(jaxpr, [NONE] * len(jaxpr.in_avals))
    params, _ = shapes
    found = {}
    # The parameters are the first outputs.
    for path, causes in zip(flatten(params), facts, strict=False):
        leaf = layout.leaves[path]
        if leaf.shard_parameter or (leaf.shard_state and layout.has_master(leaf)):
            names = sorted(cause.name for cause in causes if _applies(cause, leaf))
            if names:
                found[path] = names[0]
    return found


def notice(found: Mapping[str, str]) -> str:
    """What `whole_at_init` found, in one line.

    Example:
      >>> notice({"a/kernel": "qr", "b/kernel": "qr"}).split(";")[0]
      'made whole on each device at init, then cut: a/kernel (qr), b/kernel (qr)'
    """
    names = [f"{path} ({cause})" for path, cause in found.items()]
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return (
        f"made whole on each device at init, then cut: {', '.join(names[:5])}{more}; choose an "
        f"initialiser that draws each element alone, such as normal, if memory is short there"
    )


class _Causes(Flow):
    """Follows, for each value, what it was computed with that cannot be done in pieces."""

    def constant(self, x: Any) -> Facts:
        return frozenset([_Cause(_CONSTANT, x.size)]) if getattr(x, "size", 0) > 1 else NONE

    def value(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        name, union = eqn.primitive.name, NONE.union(*facts)
        if name == _DRAWN:
            union |= {_Cause(name, 0)}
        # What is not drawn, such as zeros, XLA makes in whichever shape it is wanted.
        elif name in _WHOLE or (name in _WHOLE_IF_PADDED and union):
            before = eqn.invars[0].aval.shape if eqn.invars else ()
            after = eqn.outvars[0].aval.shape if eqn.outvars else ()
            size = max(prod(before), prod(after))
            union |= {_Cause(name, size, tuple(before), tuple(after))}
        return [union] * len(eqn.outvars)


def _applies(cause: _Cause, leaf: Leaf) -> bool:
    if cause.name == _CONSTANT:  # tables as large as a layer; not a list of coefficients
        return cause.size >= leaf.array.layer_size
    if cause.name not in _WHOLE_IF_PADDED:
        return cause.name != _DRAWN
    if not leaf.is_padded or cause.after != leaf.array.shape:
        return False
    return cause.name == "sort" or not _keeps_dim(cause, leaf)


def _keeps_dim(cause: _Cause, leaf: Leaf) -> bool:
    """Whether a reshape leaves the sharded dimension as it is."""
    dim, shape = leaf.dim or 0, leaf.array.shape
    return any(
        size == shape[dim] and prod(cause.before[:i]) == prod(shape[:dim])
        for i, size in enumerate(cause.before)
    )
