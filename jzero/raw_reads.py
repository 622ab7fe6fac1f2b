"""Follows raw parameters through a jaxpr to where they are read, and refuses any other use.

A read of a traced model is marked in its jaxpr (`jzero.sharded.marked_shape`). Before it, a raw
parameter may be handed around, and layers may be taken from a stack; no number may be computed
from it.
"""

from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jzero.errors import JzeroError
from jzero.jaxpr_flow import NONE, Facts, Flow
from jzero.sharded import marked_shape

# Primitives that hand on each operand as it is.
_SAME = frozenset(
    """copy copy_p device_put optimization_barrier pcast pvary sharding_constraint
    stop_gradient""".split()
)
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


class Read(NamedTuple):
    """How a model reads one parameter.

    Attributes:
      shape: as read.
      gone: the axes of the stored shape that were taken away before, in that order; None where a
        vmap took one away, so that only the shape can tell.
    """

    shape: tuple[int, ...]
    gone: tuple[int, ...] | None


class RawReads(Flow):
    """Follows raw parameters, as sets of `Raw`, and collects their reads.

    Arguments:
      shapes: path -> the true shape of each parameter.

    Attributes:
      seen: path -> its reads.

    Raises, as it walks:
      JzeroError: naming the parameter, the primitive, where, and what to do.
    """

    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes
        self.seen: dict[str, list[Read]] = {}

    def step(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        if not any(facts):
            return [NONE] * len(eqn.outvars)
        return super().step(eqn, facts)

    def value(self, eqn: Any, facts: list[Facts]) -> list[Facts]:
        name, params = eqn.primitive.name, eqn.params
        if name in _SAME:
            return facts
        if name == "name":
            shape = marked_shape(params["name"])
            if shape is None:
                return facts
            for raw in facts[0]:
                self._read(eqn, raw, eqn.invars[0].aval.shape, shape)
            return [NONE]
        if name in ("slice", "dynamic_slice", "squeeze", "transpose") and not any(facts[1:]):
            return [frozenset(_moved(name, params, raw) for raw in facts[0])]
        self._refuse(eqn, NONE.union(*facts))

    def chosen(self, eqn: Any, index: Facts, either: Facts) -> Facts:
        if index:
            self._refuse(eqn, index)
        return either

    def sliced(self, facts: Facts) -> Facts:
        return frozenset(raw.without(0) for raw in facts)

    def stacked(self, facts: Facts) -> Facts:
        return frozenset(raw.stacked() for raw in facts)

    def _read(self, eqn: Any, raw: Raw, value: tuple[int, ...], shape: tuple[int, ...]) -> None:
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
                    f"{raw.path} of shape {stored} is {change}{where(eqn)}: jzero knows layers "
                    f"taken from a stack, not cut, reshaped or transposed weights; read the whole "
                    f"leaf first with jzero.gather"
                )
            gone = raw.gone
        self.seen.setdefault(raw.path, []).append(Read(shape, gone))

    def _refuse(self, eqn: Any, raws: Facts) -> NoReturn:
        path = min(raw.path for raw in raws)
        raise JzeroError(
            f"{path}: {eqn.primitive.name!r} uses the raw value of this parameter{where(eqn)}, "
            f"which is one device's shard. Read the parameter first: as "
            f"model.{path.replace('/', '.')}[...] in an NNX module, or through jzero.gather(...)"
        )


def _moved(name: str, params: dict[str, Any], raw: Raw) -> Raw:
    if name == "squeeze":
        return raw.without(*params["dimensions"])
    if name == "transpose":
        return raw._replace(dims=tuple(raw.dims[i] for i in params["permutation"]))
    return raw


def where(eqn: Any) -> str:
    """The user's line, if the traceback tells: the innermost one outside of libraries."""
    frames = getattr(getattr(eqn.source_info, "traceback", None), "frames", ())
    for frame in frames:
        name = frame.file_name
        if "site-packages" not in name and not name.startswith((_PACKAGE, "<")):
            return f" at {Path(name).name}:{frame.line_num}"
    return ""
