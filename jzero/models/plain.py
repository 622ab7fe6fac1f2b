"""A model that is a function of a pytree of arrays."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jzero.errors import JzeroError
from jzero.models.model import Model
from jzero.paths import path_name


def from_function(init: Callable[[jax.Array], Any]) -> Model:
    """A model whose parameters `init(key)` makes; the loss gathers them with `jzero.gather`."""
    return _model(lambda key: (jax.tree.map_with_path(_array, init(key)), {}), None)


def _array(path, x) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError):
        raise JzeroError(
            f"init returned a {type(x).__name__} at {path_name(path) or 'the root'}; return a "
            f"pytree of arrays"
        ) from None


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
