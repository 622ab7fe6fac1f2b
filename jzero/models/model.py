"""What jzero needs to know of a model, in whichever way it is written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax


@dataclass(frozen=True)
class Model:
    """A model as two pytrees and the way back.

    Attributes:
      build: key -> (parameters, other variables); traceable, makes the model's weights.
      bind: (parameters, other variables, fold) -> the model that a loss function is given.
        Parameters are `Sharded` leaves; fold(key) decorrelates the model's own PRNG keys.
      collect: (bound model, other variables before) -> other variables after the call.
      layer_axes: path -> axes that the model is known to loop over.
      spec_names: path -> for each dimension, the axis names that the model's metadata gives.
      weights: parameters and other variables that are there already, or None.
    """

    build: Callable[[jax.Array], tuple[Any, Any]]
    bind: Callable[[Any, Any, Callable[[jax.Array], jax.Array]], Any]
    collect: Callable[[Any, Any], Any]
    layer_axes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    spec_names: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    weights: tuple[Any, Any] | None = None


def removed_axes(stored: tuple[int, ...], seen: tuple[int, ...]) -> tuple[int, ...] | None:
    """The axes of a stored shape that were taken away before the model saw it.

    Where sizes make it ambiguous, the first ones: a scan's axis is in front.

    Example:
      >>> removed_axes((40, 5120, 13824), (5120, 13824))
      (0,)
      >>> removed_axes((16, 4, 16), (16, 4))
      (2,)
      >>> removed_axes((5, 5), (5, 5))
      ()
      >>> removed_axes((4, 6), (24,)) is None
      True
    """
    if len(seen) > len(stored):
        return None
    gone = []
    rest = list(seen)
    for axis, size in enumerate(stored):
        left = len(stored) - axis  # axes still to place, this one included
        if len(rest) < left and _fits(stored[axis + 1 :], rest):
            gone.append(axis)
        elif rest and rest[0] == size:
            rest.pop(0)
        else:
            return None
    return tuple(gone)


def _fits(stored: tuple[int, ...], seen: list[int]) -> bool:
    """Whether `seen` is what is left of `stored` after taking axes away."""
    sizes = iter(stored)
    return all(any(s == size for s in sizes) for size in seen)
