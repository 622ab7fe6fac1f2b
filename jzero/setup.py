"""A model, an optimizer and a configuration on a mesh: all that is known without arrays."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import optax

from jzero import config as configs
from jzero.birth import abstract_state
from jzero.config import Batch, Config
from jzero.errors import JzeroError
from jzero.gradient import Region
from jzero.layout import Layout, Policy
from jzero.mesh import ZeroMesh
from jzero.models import Model
from jzero.optimizer_state import place_state
from jzero.optimizer_trace import updates_as_stored, uses_gradient
from jzero.partition import Array, is_float, place
from jzero.paths import flatten, unflatten
from jzero.precision import Scaling
from jzero.state import State
from jzero.update import Update


@dataclass(frozen=True)
class Setup:
    """Everything that a step is built from.

    Attributes:
      config, mesh, batch: the configuration, the mesh, and how rows are split.
      model: the model's description.
      params, variables: pytrees of `jax.ShapeDtypeStruct`, with true shapes.
      schedule: learning rate by applied steps, or None if unknown.
      scaling: the loss scale's settings.
      trained: path -> whether a gradient is taken.
      layer_axes: path -> axes that the model loops over.
      layout: where every array of the state lives.
      update: the optimizer on that layout.
    """

    config: Config
    mesh: ZeroMesh
    batch: Batch
    model: Model
    params: Any
    variables: Any
    schedule: Callable[[Any], Any] | None
    scaling: Scaling
    trained: Mapping[str, bool]
    layer_axes: Mapping[str, tuple[int, ...]]
    layout: Layout
    update: Update

    def region(self, loss_fn: Callable[..., Any], accumulation: int) -> Region:
        keep = self.config.keep_gathered or self.config.stage < 3
        return Region(self.layout, self.model, self.params, loss_fn, accumulation, keep)

    def abstract_state(self) -> State:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        return abstract_state(self.layout, self.variables, self.scaling)

    def with_layer_axes(self, found: Mapping[str, tuple[int, ...]]) -> "Setup":
        """The same, laid out with more known about the model."""
        axes = {**self.layer_axes, **found}
        layout, update = _lay_out(
            self.config, self.mesh, self.model, self.params, self.update.tx, self.trained, axes
        )
        return replace(self, layer_axes=axes, layout=layout, update=update)

    def at_stage(self, stage: int) -> "Setup":
        """The same, laid out for another stage.

        Raises:
          ConfigError: no such stage, or a key that it does not go with.
        """
        config = configs.load(self.config, stage=stage)
        layout, update = _lay_out(
            config,
            self.mesh,
            self.model,
            self.params,
            self.update.tx,
            self.trained,
            self.layer_axes,
        )
        return replace(self, config=config, layout=layout, update=update)


class Holder(Protocol):
    """Whoever owns the current setup: `Zero`. A step may find that it must be laid out anew."""

    @property
    def setup(self) -> Setup: ...

    @setup.setter
    def setup(self, setup: Setup) -> None: ...


def make_setup(
    config: Config,
    mesh: ZeroMesh,
    batch: Batch,
    model: Model,
    tx: optax.GradientTransformation | None,
    trainable: Any,
    layer_axes: Mapping[str, int | tuple[int, ...]],
) -> Setup:
    """Lays a model and its optimizer out on a mesh.

    Raises:
      JzeroError: a mask, a path or a leaf that does not fit; no optimizer.
    """
    if model.weights is None:
        key = jax.eval_shape(lambda: jax.random.key(0))
        params, variables = jax.eval_shape(model.build, key)
    else:
        params, variables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.weights
        )
    schedule = None
    if tx is None:
        tx, schedule = configs.build_optimizer(config)
    trained = _trained(params, trainable)
    for path in layer_axes:
        if path not in trained:
            raise JzeroError(
                f"layer_axes names {path!r}, which is not a parameter; there are "
                f"{', '.join(list(trained)[:5])}, ..."
            )
    given = {p: (a,) if isinstance(a, int) else tuple(a) for p, a in layer_axes.items()}
    axes = {**model.layer_axes, **given}
    layout, update = _lay_out(config, mesh, model, params, tx, trained, axes)
    scale = config.loss_scale
    return Setup(
        config=config,
        mesh=mesh,
        batch=batch,
        model=model,
        params=params,
        variables=variables,
        schedule=schedule,
        scaling=Scaling() if scale is None else Scaling(**vars(scale)),
        trained=trained,
        layer_axes=axes,
        layout=layout,
        update=update,
    )


def _lay_out(
    config: Config,
    mesh: ZeroMesh,
    model: Model,
    params: Any,
    tx: optax.GradientTransformation,
    trained: Mapping[str, bool],
    layer_axes: Mapping[str, tuple[int, ...]],
) -> tuple[Layout, Update]:
    arrays = {
        path: Array(
            path,
            tuple(x.shape),
            str(x.dtype),
            layer_axes.get(path, ()),
            _other_axes(model.spec_names.get(path, ()), len(x.shape), mesh.other_axes),
            trained[path],
        )
        for path, x in flatten(params).items()
    }
    leaves = place(
        arrays,
        config.stage,
        mesh,
        config.persistence_threshold,
        config.model_persistence_threshold,
    )
    policy = Policy(config.compute_dtype, config.communication_dtype, config.accumulation_dtype)
    layout = Layout(mesh, config.stage, policy, leaves)
    masters = {
        path: jax.ShapeDtypeStruct(leaf.array.shape, layout.master_dtype(leaf))
        for path, leaf in layout.trained.items()
    }
    tree = unflatten(params, {path: masters.get(path) for path in leaves})
    tx = optax.with_extra_args_support(tx)
    extra = {"value": jax.ShapeDtypeStruct((), "float32"), "grad": tree}
    state = place_state(tx, tree, leaves, mesh)
    used = uses_gradient(tx, tree, **extra)
    unused = frozenset(path for path, used in used.items() if not used)
    layout = replace(layout, opt_leaves=state, unused=unused)
    as_stored = updates_as_stored(tx, tree, leaves, state, **extra)
    return layout, Update(layout, tx, tree, as_stored)


def _trained(params: Any, trainable: Any) -> dict[str, bool]:
    """Which parameters are trained: floats, unless the user says otherwise."""
    flat = flatten(params)
    if trainable is None:
        chosen: Mapping[str, Any] = dict.fromkeys(flat, True)
    elif callable(trainable):
        chosen = {path: trainable(path) for path in flat}
    else:
        chosen = flatten(trainable)
        if chosen.keys() != flat.keys():
            odd = min(chosen.keys() ^ flat.keys())
            raise JzeroError(
                f"trainable: {odd!r} is in only one of the parameters and the mask; give a pytree "
                f"of booleans like the parameters, or a function of a leaf's path"
            )
    for path, x in flat.items():
        if str(x.dtype).startswith("complex"):
            raise JzeroError(f"{path} is {x.dtype}: complex parameters are not supported")
    return {path: bool(chosen[path]) and is_float(str(x.dtype)) for path, x in flat.items()}


def _other_axes(names, ndim: int, others: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Of the names in a model's metadata, those of mesh axes that ZeRO leaves alone."""
    entries = []
    for d in range(ndim):
        name = names[d] if d < len(names) else None
        each = name if isinstance(name, tuple) else (name,)
        entries.append(tuple(n for n in each if n in others))
    return tuple(entries) if any(entries) else ()
