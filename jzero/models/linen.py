"""Flax Linen: parameters travel in boxes that gather when a module reads them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import DenyList, FrozenDict, meta, unfreeze
from flax.linen.spmd import logical_to_mesh_axes

from jzero.errors import JzeroError
from jzero.models.model import Model, removed_axes
from jzero.paths import flatten
from jzero.probe import reads


@dataclass
class BoundLinen:
    """A Linen module with its variables: call it as `module.apply` without the variables.

    Collections named in `mutable` are returned beside the output as Flax does, and kept: the next
    call, and after the step the state, has them.
    """

    apply: Callable[..., Any]
    params: Any
    rest: Mapping[str, Any]

    def __call__(self, *args, mutable: Any = False, **kwargs):
        variables = {"params": self.params, **self.rest}
        out = self.apply(variables, *args, mutable=mutable, **kwargs)
        if mutable is not False and mutable is not None:
            self.rest = {**self.rest, **out[1]}
        return out


def from_module(module: nn.Module, sample: Any) -> Model:
    """A Linen module, initialised on a sample input.

    Arguments:
      module: the unmodified module.
      sample: its input: an array or `jax.ShapeDtypeStruct`, or a tuple of positional arguments.

    Raises:
      JzeroError: no sample.
    """
    if sample is None:
        raise JzeroError(
            f"{type(module).__name__} is a Linen module, which is initialised on an input: "
            f"pass sample=x to zero.init, or to jzero.Workload"
        )
    args = sample if isinstance(sample, tuple) else (sample,)

    def inputs():
        return jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
            args,
        )

    def boxed(key):
        return unfreeze(module.init(key, *inputs()))

    def build(key):
        return _split(_unbox(boxed(key)))

    variables = jax.eval_shape(boxed, jax.random.key(0))
    params, rest = _split(_unbox(variables))

    def apply(probes):
        # As init does: any collection may be written, any stream falls back to "params".
        module.apply(
            {"params": probes, **jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)},
            *inputs(),
            rngs={"params": jax.random.key(0)},
            mutable=DenyList(("params",)),
        )

    seen = reads(apply, params)
    layers = {
        path: axes
        for path, leaf in flatten(params).items()
        if path in seen and (axes := seen[path].gone or removed_axes(leaf.shape, seen[path].shape))
    }
    return _model(module.apply, build, layers, _names(variables.get("params", {})), None)


def from_train_state(state: Any) -> Model:
    """A Linen `TrainState`: its `apply_fn` and its weights."""
    variables = {"params": state.params}
    for name in ("batch_stats", "extra_variables"):
        if getattr(state, name, None):
            variables[name] = getattr(state, name)
    weights = _split(_unbox(unfreeze(variables)))
    return _model(state.apply_fn, lambda key: weights, {}, _names(variables["params"]), weights)


def _model(apply, build, layer_axes, names, weights) -> Model:
    def collect(model: BoundLinen, before):
        return {name: unfreeze(model.rest[name]) for name in before}

    return Model(
        build=build,
        bind=lambda params, rest, fold: BoundLinen(apply, params, rest),
        collect=collect,
        layer_axes=layer_axes,
        spec_names=names,
        weights=weights,
    )


def _split(variables) -> tuple[Any, Any]:
    rest = {k: v for k, v in variables.items() if k != "params"}
    return variables.get("params", {}), rest


def _is_box(x) -> bool:
    return isinstance(x, meta.AxisMetadata)


def _unbox(tree):
    """The plain arrays; a box's own sharding constraint would need the user's mesh in context."""

    def one(x):
        if not _is_box(x):
            return x
        return x.unbox(apply_constraint=False) if isinstance(x, meta.Partitioned) else x.unbox()

    if isinstance(tree, FrozenDict):
        tree = unfreeze(tree)
    return jax.tree.map(one, tree, is_leaf=_is_box)


def _names(params) -> dict[str, tuple[Any, ...]]:
    """Axis names from the boxes that the model itself puts around its parameters."""

    def one(x):
        if isinstance(x, nn.LogicallyPartitioned):
            return tuple(logical_to_mesh_axes(x.names, rules=x.rules) or ())
        return tuple(x.names) if isinstance(x, meta.Partitioned) else ()

    # A tuple would be a pytree: wrapped, so that it stays one leaf.
    boxes = jax.tree.map(lambda x: _Names(one(x)), unfreeze(params), is_leaf=_is_box)
    return {path: leaf.names for path, leaf in flatten(boxes).items() if leaf.names}


@dataclass(frozen=True)
class _Names:
    names: tuple[Any, ...]
