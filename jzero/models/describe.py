"""Which kind of model the user brought."""

import dataclasses
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.training.train_state import TrainState
from jax import lax

from jzero.calls import explained, signature_of
from jzero.errors import JzeroError
from jzero.models import linen, plain
from jzero.models import nnx as nnx_models
from jzero.models.model import Model
from jzero.state import State

_GIVE_THE_REST = "give the others, as in lambda rngs: Model(width, rngs=rngs)"
_GIVE_RNGS = (
    "give a constructor with a parameter rngs (NNX), as in lambda rngs: Model(width, rngs=rngs), "
    "or a function of a key that returns a pytree"
)


def describe(model: Any, seed: int, sample: Any = None) -> Model:
    """What jzero needs to know of a model.

    Arguments:
      model: a callable with a parameter `rngs` (constructs an `nnx.Module`); a Linen module; any
        other callable, a function of a PRNG key that returns a pytree of parameters; or weights
        that are there already: an `nnx.Module`, a Linen `TrainState`, a pytree of arrays.
      seed: of the NNX streams.
      sample: a Linen module's input.

    Raises:
      JzeroError: none of these.
    """
    if isinstance(model, nnx.Module):
        return nnx_models.from_instance(model)
    if isinstance(model, nn.Module):
        return linen.from_module(model, sample)
    if isinstance(model, State):
        raise JzeroError("init is a jzero.State; to start from its weights give zero.params(state)")
    if isinstance(model, TrainState):
        return linen.from_train_state(model)
    if callable(model):
        make: Any = model
        signature = signature_of(make)
        if signature and "rngs" in signature.parameters:
            make = explained(make, "init", "rngs=", advice=_GIVE_THE_REST)
            return nnx_models.from_constructor(make, seed)
        return plain.from_function(explained(make, "init", "key", advice=_GIVE_RNGS))
    leaves = jax.tree.leaves(model)
    if not leaves or not all(hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves):
        raise JzeroError(
            f"init is a {type(model).__name__}; give a constructor with a parameter rngs (NNX), a "
            f"Linen module with sample=, a function of a key, or weights: an nnx.Module, a "
            f"TrainState, a pytree of arrays"
        )
    return plain.from_pytree(model)


def stop_gradient(model: Any) -> Any:
    """The same model, whose weights receive no gradient: a teacher, or a GAN's other half.

    Arguments:
      model: what a loss function was given, or a part of it: an NNX module, a bound Linen module, a
        pytree.

    Returns:
      A model of the same kind, gathered on use as before.
    """
    if isinstance(model, linen.BoundLinen):
        return dataclasses.replace(model, params=jax.tree.map(lax.stop_gradient, model.params))
    if isinstance(model, nnx.Module):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return nnx.merge(graph, jax.tree.map(lax.stop_gradient, params), rest)
    return jax.tree.map(lax.stop_gradient, model)
