"""Where Adam's moments are in the state of an Optax transformation."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import optax

from jzero.checkpoint.deepspeed.parameter import MOMENTS
from jzero.layout import is_leaf
from jzero.paths import path_name
from jzero.setup import Setup

_FIELDS = dict(zip(("mu", "nu"), MOMENTS, strict=True))


@dataclass(frozen=True)
class Moment:
    """A moment of a parameter.

    Attributes:
      path: the parameter's.
      what: DeepSpeed's name of the moment.
    """

    path: str
    what: str


@dataclass(frozen=True)
class Found:
    """What of an optimizer's state DeepSpeed has a counterpart of, by the leaves' names.

    Attributes:
      moments: leaf -> moment.
      counts: leaf that counts steps -> the parameters whose Adam it belongs to; none if it is
        another transformation's, such as a schedule's.
    """

    moments: Mapping[str, Moment]
    counts: Mapping[str, tuple[str, ...]]


def find(setup: Setup) -> Found:
    """The moments and counts in a setup's optimizer state.

    Adam is found by its type, wherever the user's chain has it, and however often: masked and
    partitioned transformations have one for each part.
    """
    moments: dict[str, Moment] = {}
    counts: dict[str, tuple[str, ...]] = {}
    tree = setup.layout.opt_leaves
    for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf):
        if key_path and path_name(key_path[-1:]) == "count" and not leaf.array.shape:
            counts[f"optimizer/{path_name(key_path)}"] = ()
    for key_path, state in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_adam):
        if not _is_adam(state):
            continue
        paths = []
        for below, _ in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_leaf):
            field, _, path = path_name(below).partition("/")
            if field in _FIELDS:
                name = f"optimizer/{path_name((*key_path, *below))}"
                moments[name] = Moment(path, _FIELDS[field])
                paths.append(path)
        count = path_name((*key_path, jax.tree_util.GetAttrKey("count")))
        counts[f"optimizer/{count}"] = tuple(dict.fromkeys(paths))
    return Found(moments, counts)


def _is_adam(x: object) -> bool:
    return isinstance(x, optax.ScaleByAdamState)
