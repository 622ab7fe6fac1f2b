"""A model that is a function of a pytree of arrays."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jzero.models.model import Model


def from_function(init: Callable[[jax.Array], Any]) -> Model:
    """A model whose parameters `init(key)` makes; the loss gathers them with `jzero.gather`."""
    return _model(lambda key: (jax.tree.map(jnp.asarray, init(key)), {}), None)


def from_pytree(params: Any) -> Model:
    """A model whose parameters are there already."""
    return _model(lambda key: (params, {}), (params, {}))


def _model(build, weights) -> Model:
    return Model(
        build=build,
        bind=lambda params, rest, fold: params,
        collect=lambda model, rest: rest,
        weights=weights,
    )


def has_parameter(init: Callable, name: str) -> bool:
    """Whether a callable, or a class's constructor, takes a parameter of that name."""
    target = init.__init__ if isinstance(init, type) else init  # a metaclass hides the signature
    try:
        return name in inspect.signature(target).parameters
    except (TypeError, ValueError):
        return False
