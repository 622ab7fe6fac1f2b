"""A model, an optimizer and a configuration on a mesh: all that is known without arrays."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np
import optax

from jzero import config as configs
from jzero import xla_options
from jzero.birth import abstract_state
from jzero.config import Batch, Config
from jzero.errors import JzeroError
from jzero.gradient import Region
from jzero.in_turn import Prefetch
from jzero.layout import MASTER, Layout, Policy
from jzero.mesh import ZeroMesh
from jzero.models import Model
from jzero.optimizer_state import place_state
from jzero.optimizer_trace import updates_as_stored, uses_gradient
from jzero.partition import STAGES, Array, is_float, place
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
      tx: the user's Optax transformation, or None for the configuration's.
      trained: path -> whether a gradient is taken.
      layer_axes: path -> axes that the model loops over.
    """

    config: Config
    mesh: ZeroMesh
    batch: Batch
    model: Model
    params: Any
    variables: Any
    tx: optax.GradientTransformation | None
    trained: Mapping[str, bool]
    layer_axes: Mapping[str, tuple[int, ...]]

    @cached_property
    def _optimizer(self) -> tuple[optax.GradientTransformationExtraArgs, Any]:
        """The transformation, and the learning rate by applied steps or None if unknown."""
        tx, schedule = self.tx, None
        if tx is None:
            tx, schedule = configs.build_optimizer(
                self.config, stacked=lambda path: bool(self.layer_axes.get(path))
            )
        return _with_extra_args(tx), schedule

    @property
    def schedule(self) -> Callable[[Any], Any] | None:
        return self._optimizer[1]

    @cached_property
    def scaling(self) -> Scaling:
        scale = self.config.loss_scale
        return Scaling() if scale is None else Scaling(**vars(scale))

    @cached_property
    def layout(self) -> Layout:
        """Where every array of the state lives."""
        config, mesh = self.config, self.mesh
        arrays = {
            path: Array(
                path,
                tuple(x.shape),
                str(x.dtype),
                self.layer_axes.get(path, ()),
                _other_axes(self.model.spec_names.get(path, ()), len(x.shape), mesh.other_axes),
                self.trained[path],
            )
            for path, x in flatten(self.params).items()
        }
        leaves = place(
            arrays,
            config.stage,
            mesh,
            config.persistence_threshold,
            config.model_persistence_threshold,
        )
        policy = Policy(config.compute_dtype, config.communication_dtype, config.accumulation_dtype)
        tx, tree = self._optimizer[0], self._masters
        used = uses_gradient(tx, tree, **self._extra)
        return Layout(
            mesh,
            config.stage,
            policy,
            leaves,
            place_state(tx, tree, leaves, mesh),
            frozenset(path for path, used in used.items() if not used),
        )

    @cached_property
    def update(self) -> Update:
        """The optimizer on that layout."""
        layout, (tx, _), tree = self.layout, self._optimizer, self._masters
        as_stored = updates_as_stored(tx, tree, layout.leaves, layout.opt_leaves, **self._extra)
        return Update(layout, tx, tree, as_stored)

    @cached_property
    def _masters(self) -> Any:
        """What the optimizer sees: a pytree like the parameters, None where one is not trained."""
        flat = flatten(self.params)
        masters = {path: jax.ShapeDtypeStruct(x.shape, MASTER) for path, x in flat.items()}
        return unflatten(
            self.params, {path: masters[path] if self.trained[path] else None for path in flat}
        )

    @property
    def _extra(self) -> dict[str, Any]:
        """The extra arguments that the step gives an update."""
        return {"value": jax.ShapeDtypeStruct((), MASTER), "grad": self._masters}

    def region(self, loss_fn: Callable[..., Any], accumulation: int) -> Region:
        config = self.config
        prefetch = Prefetch(config.prefetch_elements, config.live_elements)
        regather = STAGES[config.stage].parameters and not config.keep_gathered
        return Region(
            self.layout, self.model, self.params, loss_fn, accumulation, prefetch, regather
        )

    @property
    def prefetched(self) -> xla_options.Layers:
        """Scanned or unrolled layers, which the options that hide traffic are chosen by."""
        if not self.config.prefetch_elements:
            return xla_options.Layers()
        scanned = xla_options.layer_bytes(self.layout)
        gathered = STAGES[self.config.stage].parameters
        return xla_options.Layers(scanned, unrolled=gathered and not scanned)

    def abstract_state(self) -> State:
        """The state as `jax.ShapeDtypeStruct`s with shardings."""
        return abstract_state(self.layout, self.variables, self.scaling)

    def with_layer_axes(self, found: Mapping[str, tuple[int, ...]]) -> "Setup":
        """The same, laid out with more known about the model."""
        return replace(self, layer_axes={**self.layer_axes, **found})

    def at_stage(self, stage: int) -> "Setup":
        """The same, laid out as another stage has it."""
        return replace(self, config=configs.load(self.config, stage=stage))


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
      JzeroError: a mask, a path or a leaf that does not fit; no optimizer, or something else.
    """
    if tx is not None and not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise JzeroError(
            f"tx is {tx!r:.60}; give an Optax transformation such as optax.adamw(1e-3), or None "
            f"for the optimizer that the configuration names"
        )
    if model.weights is None:
        params, variables = jax.eval_shape(model.build, jax.eval_shape(lambda: jax.random.key(0)))
    else:
        # Without their shardings: the user's mesh is not the one that they are going to.
        params, variables = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
            jax.eval_shape(lambda weights: weights, model.weights),
        )
    trained = _trained(params, trainable)
    given = {p: (a,) if isinstance(a, int) else tuple(a) for p, a in layer_axes.items()}
    for path, taken in given.items():
        if path in trained and not all(0 <= a < len(flatten(params)[path].shape) for a in taken):
            raise JzeroError(
                f"layer_axes[{path!r}] is {taken}, but its shape is {flatten(params)[path].shape}; "
                f"give axes from 0"
            )
        if path not in trained:
            raise JzeroError(
                f"layer_axes names {path!r}, which is not a parameter; there are "
                f"{', '.join(list(trained)[:5])}, ..."
            )
    axes = {**model.layer_axes, **given}
    setup = Setup(config, mesh, batch, model, params, variables, tx, trained, axes)
    _ = setup.update  # so that what does not fit is said now
    return setup


def _with_extra_args(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """The transformation, given no extra argument that it does not take."""
    tx = optax.with_extra_args_support(tx)
    known = inspect.signature(tx.update).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in known):
        return tx
    names = {p.name for p in known}

    def update(updates, state, params=None, **extra):
        taken = {name: x for name, x in extra.items() if name in names}
        return tx.update(updates, state, params, **taken)

    return optax.GradientTransformationExtraArgs(tx.init, update)


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
        if not isinstance(chosen[path], bool | np.bool_):
            raise JzeroError(f"trainable: {path} is {chosen[path]!r}; give True or False")
        if str(x.dtype) == "float64" or str(x.dtype).startswith("complex"):
            raise JzeroError(
                f"{path} is {x.dtype}: weights are trained in float32; give it in float32"
            )
    return {path: bool(chosen[path]) and is_float(str(x.dtype)) for path, x in flat.items()}


def _other_axes(names, ndim: int, others: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Of the names in a model's metadata, those of mesh axes that ZeRO leaves alone."""
    entries = []
    for d in range(ndim):
        name = names[d] if d < len(names) else None
        each = name if isinstance(name, tuple) else (name,)
        entries.append(tuple(n for n in each if n in others))
    return tuple(entries) if any(entries) else ()
