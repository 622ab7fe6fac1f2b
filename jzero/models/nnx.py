"""Flax NNX: each `Param` holds a `Sharded`, and a hook gathers when the module reads it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import spmd
from jax.core import Tracer

from jzero.errors import JzeroError
from jzero.models.model import Model, removed_axes
from jzero.models.nnx_rngs import rngs_of
from jzero.paths import path_name
from jzero.sharded import is_sharded, read

_CREATED = "zero_created_shape"


def from_constructor(make: Callable[..., nnx.Module], seed: int) -> Model:
    """A model that `make(rngs=nnx.Rngs(seed))` constructs.

    Raises:
      JzeroError: it returns something else than an `nnx.Module`.
    """

    def construct(key):
        with nnx.use_eager_sharding(False):  # jzero places the state, not the model
            return _arrays_as_data(make(rngs=rngs_of(key)))

    with _creation_shapes():
        abstract = nnx.eval_shape(lambda: construct(jax.random.key(seed)))
    if not isinstance(abstract, nnx.Module):
        raise JzeroError(
            f"init has a parameter named rngs, so it should return an nnx.Module; it returned "
            f"{type(abstract).__name__}"
        )

    def build(key):
        _, params, rest = nnx.split(construct(key), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    return _model(abstract, build, None)


def from_instance(module: nnx.Module) -> Model:
    """A model with weights: its arrays are placed leaf by leaf."""
    _, params, rest = nnx.split(module, nnx.Param, ...)
    weights = nnx.to_pure_dict(params), nnx.to_pure_dict(rest)
    return _model(module, lambda key: weights, weights)


def _model(module: nnx.Module, build, weights) -> Model:
    graph, params, rest = nnx.split(module, nnx.Param, ...)
    variables = list(nnx.to_flat_state(params))
    others = list(nnx.to_flat_state(rest))
    layers, names = {}, {}
    for path, var in variables:
        shape = jnp.shape(var.get_raw_value())
        created = var.get_metadata(_CREATED, shape)
        gone = removed_axes(shape, created)
        if gone:
            layers[_join(path)] = gone
        if axes := _names(var, shape, gone or ()):
            names[_join(path)] = axes

    def bind(param_tree, rest_tree, fold):
        bound = []
        for path, var in variables:
            var = var.replace(_lookup(param_tree, path))
            user = var.get_metadata("on_get_value", ())
            hooks = user if isinstance(user, tuple) else (user,)
            var.set_metadata(on_get_value=(_on_get_value, *hooks))
            bound.append((path, var))
        for path, var in others:
            value = _lookup(rest_tree, path)
            if isinstance(var, nnx.Variable):
                value = var.replace(fold(value) if _is_key(var) else value)
            bound.append((path, value))  # a module may also hold plain arrays: tables, masks
        return nnx.merge(graph, nnx.from_flat_state(bound))

    def collect(model, before):
        now = dict(nnx.to_flat_state(nnx.state(model)))
        kept = [
            (path, _lookup(before, path) if _is_key(var) else _raw(now[path]))
            for path, var in others
        ]
        return nnx.to_pure_dict(nnx.from_flat_state(kept))

    return Model(build, bind, collect, layers, names, weights)


def _arrays_as_data(module):
    """A module whose plain arrays, such as tables and masks, are part of its state.

    Made under a trace, NNX takes them for static attributes, and the trace would leak.
    """
    if isinstance(module, nnx.Module):
        for _, node in nnx.iter_graph(module):
            for name, value in list(vars(node).items()) if isinstance(node, nnx.Module) else ():
                if isinstance(value, Tracer):
                    setattr(node, name, nnx.data(value))
    return module


def _on_get_value(variable, value):
    # Flax prints a module by mapping its arrays to descriptions: those are not read.
    return read(value) if is_sharded(value) and isinstance(value.value, jax.Array) else value


def _raw(x):
    return x.get_raw_value() if isinstance(x, nnx.Variable) else x


def _is_key(variable) -> bool:
    return isinstance(variable, nnx.RngKey)


def _lookup(tree, path):
    for key in path:
        tree = tree[key]
    return tree


def _join(path) -> str:
    return path_name(tuple(jax.tree_util.DictKey(k) for k in path))


def _names(var, shape, layer_axes) -> tuple[Any, ...]:
    """Mesh axis names from the variable's metadata, one entry for each dimension."""
    sharding = var.get_metadata("out_sharding", None)
    if not sharding:
        return ()
    spec: Any = spmd.apply_rules(sharding, var.get_metadata("sharding_rules", None))
    names = list(getattr(spec, "spec", spec))
    # vmap without transform_metadata leaves the names of one layer on the stacked variable.
    if len(names) == len(shape) - len(layer_axes):
        for axis in layer_axes:
            names.insert(axis, None)
    return tuple(names)


@contextmanager
def _creation_shapes() -> Iterator[None]:
    """Notes on each Variable the shape it was created with.

    Layers made under `nnx.vmap` have one axis less there than as stored: the layer axis. Flax has
    no hook for it that covers every Variable.
    """
    original = nnx.Variable.__init__

    def noting(self, *args, **kwargs):
        original(self, *args, **kwargs)
        shape = getattr(self.get_raw_value(), "shape", None)
        if shape is not None:
            self.set_metadata(_CREATED, tuple(shape))

    nnx.Variable.__init__ = noting
    try:
        yield
    finally:
        nnx.Variable.__init__ = original
