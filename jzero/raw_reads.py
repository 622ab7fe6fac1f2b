"""Follows raw parameters through a jaxpr to where they are read, and refuses any other use.

A read of a traced model is marked in its jaxpr (`jzero.gather.mark`). Before it, a raw parameter
may be handed around, and layers may be taken from a stack; no number may be computed from it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jax.extend import core

from jzero.errors import JzeroError
from jzero.gather import marked_shape

# Primitives that hand on each operand as it is.
_SAME = frozenset(
    "copy copy_p device_put optimization_barrier pcast pvary sharding_constraint stop_gradient".split()
)
# Primitives that run a jaxpr on their operands.
_CALLS = {
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "remat2": "jaxpr",
    "shard_map": "jaxpr",
}
_PACKAGE = str(Path(__file__).parent)


class Raw(NamedTuple):
    """A value that is a raw parameter, or layers of it.

    Attributes:
      path: the parameter's.
      dims: for each dimension, the parameter's dimension that it is; -1 for one that it never had.
      gone: dimensions taken away, in that order.
    """

    path: str
    dims: tuple[int, ...]
    gone: tuple[int, ...] = ()

    def without(self, *positions: int) -> "Raw":
        gone = tuple(self.dims[i] for i in positions)
        rest = tuple(d for i, d in enumerate(self.dims) if i not in positions)
        return Raw(self.path, rest, self.gone + gone)

    def stacked(self) -> "Raw":
        """As a loop hands out a layer that it was handed: stacked again."""
        back = self.gone[-1:] or (-1,)
        return Raw(self.path, back + self.dims, self.gone[:-1])


class Seen(NamedTuple):
    """One read: its shape, and the axes that were gone; None if a vmap hides them."""

    shape: tuple[int, ...]
    gone: tuple[int, ...] | None


Raws = frozenset[Raw]
_NONE: Raws = frozenset()


class Walk:
    """Follows raw parameters and collects their reads.

    Arguments:
      shapes: path -> the true shape of each parameter.

    Attributes:
      seen: path -> its reads.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes
        self.seen: dict[str, list[Seen]] = {}

    def run(self, jaxpr: Any, raws: Sequence[Raws]) -> list[Raws]:
        """Walks a jaxpr whose inputs are so; what its outputs are.

        Raises:
          JzeroError: naming the parameter, the primitive, where, and what to do.
        """
        known: dict[Any, Raws] = dict(zip(jaxpr.invars, raws, strict=True))

        def look(v: Any) -> Raws:
            return _NONE if isinstance(v, core.Literal) else known.get(v, _NONE)

        for eqn in jaxpr.eqns:
            inputs = [look(v) for v in eqn.invars]
            if any(inputs):
                known.update(zip(eqn.outvars, self.step(eqn, inputs), strict=True))
        return [look(v) for v in jaxpr.outvars]

    def step(self, eqn: Any, raws: list[Raws]) -> list[Raws]:
        name, params = eqn.primitive.name, eqn.params
        if name in _SAME:
            return raws
        if name == "name":
            shape = marked_shape(params["name"])
            if shape is None:
                return raws
            for raw in raws[0]:
                self.read(eqn, raw, eqn.invars[0].aval.shape, shape)
            return [_NONE]
        if name in ("slice", "dynamic_slice", "squeeze", "transpose") and not any(raws[1:]):
            return [frozenset(_moved(name, params, raw) for raw in raws[0])]
        if name in _CALLS and _CALLS[name] in params:
            inner = params[_CALLS[name]]
            return self.run(getattr(inner, "jaxpr", inner), raws)
        if name == "cond" and not raws[0]:
            outs = [self.run(branch.jaxpr, raws[1:]) for branch in params["branches"]]
            return [frozenset().union(*same) for same in zip(*outs, strict=True)]
        if name == "scan":
            return self.scan(eqn, raws)
        if name == "while":
            return self.loop(eqn, raws)
        self.refuse(eqn, next(iter(frozenset().union(*raws))).path)

    def read(self, eqn: Any, raw: Raw, value: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """Notes a read.

        Arguments:
          value: the shape in the jaxpr: a vmap adds dimensions to it.
          shape: the shape that the model sees.
        """
        stored = self.shapes[raw.path]
        gone: tuple[int, ...] | None = None
        if value == shape:
            want = tuple(d for d in range(len(stored)) if d not in raw.gone)
            if raw.dims != want or shape != tuple(stored[d] for d in want):
                change = f"read as {shape}" if shape != stored else "transposed before it is read"
                raise JzeroError(
                    f"{raw.path} of shape {stored} is {change}{_where(eqn)}: jzero knows layers "
                    f"taken from a stack, not cut, reshaped or transposed weights; read the whole "
                    f"leaf first with jzero.gather"
                )
            gone = raw.gone
        self.seen.setdefault(raw.path, []).append(Seen(shape, gone))

    def scan(self, eqn: Any, raws: list[Raws]) -> list[Raws]:
        # The parameters that count constants and carries differ between JAX versions; what is
        # scanned has one dimension less inside.
        body = eqn.params["jaxpr"]
        outside = [v.aval.ndim for v in eqn.invars]
        scanned = sum(a.ndim != b for a, b in zip(body.in_avals, outside, strict=True))
        outs = zip(body.out_avals, eqn.outvars, strict=True)
        carried = sum(a.ndim == v.aval.ndim for a, v in outs)
        split = len(raws) - scanned
        consts, carry = raws[: split - carried], raws[split - carried : split]
        slices = [frozenset(raw.without(0) for raw in raws) for raws in raws[split:]]
        ys: list[Raws] = []

        def run(carry: list[Raws]) -> list[Raws]:
            outs = self.run(body.jaxpr, [*consts, *carry, *slices])
            ys[:] = outs[carried:]
            return outs[:carried]

        carry = _settle(run, carry)
        return carry + [frozenset(raw.stacked() for raw in y) for y in ys]

    def loop(self, eqn: Any, raws: list[Raws]) -> list[Raws]:
        params = eqn.params
        a, b = params["cond_nconsts"], params["body_nconsts"]
        body, consts = params["body_jaxpr"].jaxpr, raws[a : a + b]
        carry = _settle(lambda carry: self.run(body, [*consts, *carry]), raws[a + b :])
        self.run(params["cond_jaxpr"].jaxpr, [*raws[:a], *carry])
        return carry

    def refuse(self, eqn: Any, path: str) -> NoReturn:
        raise JzeroError(
            f"{path}: {eqn.primitive.name!r} uses the raw value of this parameter{_where(eqn)}, "
            f"which is one device's shard. Read the parameter first: as "
            f"model.{path.replace('/', '.')}[...] in an NNX module, or through jzero.gather(...)"
        )


def _moved(name: str, params: dict[str, Any], raw: Raw) -> Raw:
    if name == "squeeze":
        return raw.without(*params["dimensions"])
    if name == "transpose":
        return raw._replace(dims=tuple(raw.dims[i] for i in params["permutation"]))
    return raw


def _settle(run: Any, carry: list[Raws]) -> list[Raws]:
    """What a loop carries, once it does not change any more."""
    while True:
        wider = [a | b for a, b in zip(carry, run(carry), strict=True)]
        if wider == carry:
            return carry
        carry = wider


def _where(eqn: Any) -> str:
    """The user's line, if the traceback tells: the innermost one outside of libraries."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    for frame in frames:
        name = frame.file_name
        if "site-packages" not in name and not name.startswith((_PACKAGE, "<")):
            return f" at {Path(name).name}:{frame.line_num}"
    return ""
