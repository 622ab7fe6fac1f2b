"""Which of DeepSpeed's parameters each leaf of a model is made from."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.cast import cast, castable
from jzero.checkpoint.counterparts import Counterpart, counterparts, left_out, some
from jzero.checkpoint.deepspeed.parameter import WEIGHT, Parameter
from jzero.checkpoint.deepspeed.source import Source
from jzero.checkpoint.entries import Entry
from jzero.checkpoint.name_map import NameMap
from jzero.errors import JzeroError


@dataclass(frozen=True)
class Origin:
    """What a leaf of the model is made from: one parameter, or several of which it is a stack."""

    parameters: tuple[tuple[Counterpart, Parameter], ...]

    def lacks(self, what: str) -> list[str]:
        """The parameters that have no such moment; what is empty needs none."""
        return [p.name for _, p in self.parameters if what not in p.slices and p.size]

    def dtypes(self, what: str) -> list[str]:
        return [p.dtype(what) for _, p in self.parameters if p.size]

    def make(self, what: str, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        """The leaf, or its moment: they are named, transposed and stacked alike."""
        values = np.empty(shape, jnp.dtype(dtype))
        for theirs, parameter in self.parameters:
            if parameter.size:
                ours = theirs.to_ours(parameter.read(what))
                values[theirs.index] = cast(parameter.name, ours, dtype)
        return values


def match(
    source: Source, leaves: Mapping[str, Entry], name_map: NameMap | None
) -> tuple[dict[str, Origin], tuple[str, ...]]:
    """Each leaf with its origin.

    Arguments:
      source: the checkpoint.
      leaves: path -> parameter of the model.
      name_map: whose names are whose, as for safetensors.

    Returns:
      path -> origin, without leaves that the name map leaves out; names that it leaves out.

    Raises:
      JzeroError: parameters that are missing, unexpected, of another shape, or tied otherwise.
    """
    shapes = {path: entry.shape for path, entry in leaves.items()}
    skipped = left_out(name_map, shapes, source.parameters)
    found: dict[str, list[tuple[Counterpart, Parameter]]] = {}
    takers: dict[str, str] = {}
    missing, problems = [], []
    for theirs in counterparts(name_map, shapes):
        leaf = theirs.leaf
        stored = dict.fromkeys(source.tied.get(name, name) for name in theirs.names)
        if not stored.keys() & source.parameters.keys():
            missing.append(theirs.names[0])
            continue
        [name, *others] = (name for name in stored if name in source.parameters)
        parameter = source.parameters[name]
        if others:
            problems.append(f"{leaf} ties {name} to {some(others)}, trained apart there")
        elif name in takers:
            problems.append(f"{leaf} and {takers[name]} are both {name}, one parameter there")
        elif parameter.shape != theirs.their_shape:
            problems.append(
                f"{name} is {list(parameter.shape)} for {list(theirs.their_shape)} of {leaf}"
            )
        elif parameter.size and not castable(parameter.dtype(WEIGHT), leaves[leaf].dtype):
            problems.append(
                f"{name} is {parameter.dtype(WEIGHT)} for {leaves[leaf].dtype} of {leaf}"
            )
        takers |= dict.fromkeys((name, *others), leaf)
        found.setdefault(leaf, []).append((theirs, parameter))
    extra = [name for name in source.parameters if name not in takers and name not in skipped]
    if missing:
        problems.append(f"the model needs {some(missing)}, which is not there")
    if extra:
        problems.append(
            f"there is {some(extra)}, which no leaf takes; to leave one out give the name map a "
            f"rule with null as `ours`"
        )
    if problems:
        raise JzeroError(f"{source.said}: {'; '.join(problems)}")
    return {path: Origin(tuple(own)) for path, own in found.items()}, tuple(sorted(skipped))
