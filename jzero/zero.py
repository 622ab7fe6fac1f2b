"""`Zero`: one configuration, one mesh, and the functions that train a model on it."""

import functools
import json
import logging
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jzero import config as configs
from jzero.batches import batches, place_batch
from jzero.birth import born, placed
from jzero.calls import check_call
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.errors import JzeroError
from jzero.explain import explain
from jzero.explanation import Explanation
from jzero.layout import is_leaf
from jzero.logs import in_first_process, set_logging
from jzero.mesh import make_zero_mesh
from jzero.models import describe
from jzero.monitor import Monitor
from jzero.padding import unpad
from jzero.partition import Leaf
from jzero.paths import unflatten
from jzero.setup import Setup, make_setup
from jzero.sharded import Sharded
from jzero.state import State
from jzero.train import EvalStep, TrainStep, check_usable
from jzero.whole_init import notice, whole_at_init

log = logging.getLogger("jzero")


class Zero:
    """ZeRO training of one model: the stage decides what each device keeps, never the numbers.

    Arguments:
      config: a DeepSpeed-style configuration: a path to its JSON, or a dict; None for keywords.
      mesh: a device mesh of any axis types; by default one axis `data` over all devices. With an
        `AbstractMesh`, `setup_for` gives the specs for devices that are not there.
      axes: mesh axes to shard over; by default `data` and `fsdp`, those that the mesh has.
      replica_axes: mesh axes over which the shards repeat (hybrid sharding); by default `replica`.
      keywords: `stage`, `precision`, `accumulation`, `gradient_clipping` and the others of
        `jzero.config.load`; they override the configuration.

    Raises:
      ConfigError: a key that jzero cannot honour, by its full path.
      JzeroError: a mesh that does not fit.

    Follows the ZeRO paper (arXiv 1910.02054), sections 5 and 7.

    Example:
      >>> import jax, jax.numpy as jnp, optax, jzero
      >>> zero = jzero.Zero(stage=3)
      >>> state = zero.init(lambda key: {"w": jax.random.normal(key, (4, 2))}, optax.adam(1e-2))
      >>> def loss_fn(params, batch, rng):
      ...     return jnp.mean((batch["x"] @ jzero.gather(params["w"]) - batch["y"]) ** 2)
      >>> step = zero.train_step(loss_fn)
      >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.zeros((8, 2))}
      >>> state, metrics = step(state, batch)
      >>> int(state.step)
      1
    """

    def __init__(
        self,
        config: Any = None,
        *,
        mesh: Mesh | AbstractMesh | None = None,
        axes: Any = None,
        replica_axes: Any = (),
        **keywords: Any,
    ):
        self.config = configs.load(config, **keywords)
        self.mesh = make_zero_mesh(mesh, axes, replica_axes, self.config.shard_size)
        sizes = {a: self.mesh.storage.shape[a] for a in self.mesh.data_axes}
        self.batch = self.config.resolve_batch(self.mesh.data_size, sizes)
        self._setup: Setup | None = None
        self._made_whole: dict[str, str] = {}  # by their initialisers, for explain()
        set_logging(self.config)
        if not isinstance(mesh, AbstractMesh) and jax.process_count() > 1:
            log.addFilter(in_first_process)
        for line in self.config.notices:
            log.warning(line)

    @property
    def rows_per_process(self) -> int | None:
        """Rows of each batch that this process feeds; None where the configuration does not say."""
        if self.batch.micro is None:
            return None
        return self.batch.micro * self.batch.accumulation * self.mesh.local_data_size

    @property
    def axis_name(self) -> tuple[str, ...]:
        """For layers that take an `axis_name`: the data axes as they are called inside a step."""
        return self.mesh.manual_data_axes

    def init(
        self,
        model: Any,
        tx: optax.GradientTransformation | None = None,
        *,
        seed: int = 0,
        sample: Any = None,
        trainable: Callable[[str], bool] | Any = None,
        layer_axes: Mapping[str, int | tuple[int, ...]] | None = None,
    ) -> State:
        """The first state, born sharded: no device ever holds a whole sharded leaf.

        Arguments:
          model: a constructor with a parameter `rngs` (NNX); a Linen module with `sample`; a
            function of a key that returns a pytree; or weights that are there already: an
            `nnx.Module`, a Linen `TrainState`, a pytree of arrays.
          tx: any Optax transformation; by default a `TrainState`'s own, or the configuration's
            optimizer.
          seed: of the weights and of the run's randomness.
          sample: a Linen module's input, an array or `jax.ShapeDtypeStruct` (or a tuple of them).
          trainable: which parameters are trained: a function of a leaf's path, or a pytree of
            booleans like the parameters. Frozen ones have no gradient and no optimizer state.
          layer_axes: path -> the axes of a leaf that the model loops over, where the model itself
            does not tell (a plain pytree tells at the first step).

        Returns:
          The state; `explain()` says where each leaf is.

        Raises:
          JzeroError: a model or a leaf that jzero cannot place.
        """
        setup = self.setup_for(
            model, tx, seed=seed, sample=sample, trainable=trainable, layer_axes=layer_axes
        )
        self._made_whole = {}
        if setup.model.weights is None:
            with self.mesh.context():
                self._made_whole = whole_at_init(setup.model.build, setup.layout)
            if self._made_whole:
                log.warning(notice(self._made_whole))
        if self.config.dump_state:
            log.info("%s\n%s", json.dumps(self.config.resolved(), indent=2), self.explain())
        make = born if setup.model.weights is None else placed
        with self.mesh.context():
            return make(setup.model, setup.update, setup.scaling, seed, setup.abstract_state())

    def setup_for(
        self,
        model: Any,
        tx: optax.GradientTransformation | None = None,
        *,
        seed: int = 0,
        sample: Any = None,
        trainable: Any = None,
        layer_axes: Mapping[str, int | tuple[int, ...]] | None = None,
    ) -> Setup:
        """All that `init` does but making arrays: the specs, on a mesh that need not be there."""
        if tx is None and isinstance(model, TrainState):
            tx = model.tx
        for key in ("optimizer", "scheduler"):
            if tx is not None and getattr(self.config, key) is not None:
                log.warning("%s: not used, since zero.init was given an Optax transformation", key)
        try:
            operator.index(seed)
        except TypeError:
            raise JzeroError(f"seed is {seed!r:.60}; give a whole number") from None
        with self.mesh.context():
            described = describe(model, seed, sample)
            self.setup = make_setup(
                self.config, self.mesh, self.batch, described, tx, trainable, layer_axes or {}
            )
        return self.setup

    @property
    def setup(self) -> Setup:
        """The model and its optimizer as laid out on the mesh."""
        if self._setup is None:
            raise JzeroError(
                "call zero.setup_for(model, tx) or zero.init(model, tx) first: it says which "
                "leaves there are"
            )
        return self._setup

    @setup.setter
    def setup(self, setup: Setup) -> None:
        self._setup = setup

    def train_step(
        self, loss_fn: Callable[..., Any], *, monitor: Monitor | None = None
    ) -> TrainStep:
        """The jitted training step of a loss function.

        Arguments:
          loss_fn: loss_fn(model, batch, rng) -> a scalar, averaged with equal weight over devices
            and micro-batches; or `jzero.Mean(total, weight)`, the exact global mean; or (either,
            aux), aux a dict of scalars and Means that are averaged and reported too. `model` is
            the NNX module; a callable for Linen; a pytree, for `jzero.gather`, otherwise.
          monitor: where the metrics go; by default what the configuration's `tensorboard` and
            `csv_monitor` ask for, below the folder `runs`.

        Returns:
          step(state, batch) -> (state, metrics); step.finish() waits for the last ones to be
          reported. The state is donated. `batch` is a pytree of this
          process's rows. metrics: `loss`, `grad_norm` (before clipping), `grad_norm_clipped`,
          `loss_scale`, `skipped`, `lr` where known, and aux; global scalars.
        """
        check_call(loss_fn, "loss_fn", "model", "batch", "rng")
        return TrainStep(self, loss_fn, monitor)

    def eval_step(self, fn: Callable[..., Any]) -> EvalStep:
        """A jitted evaluation, of a function like a loss function.

        Arguments:
          fn: fn(model, batch, rng) -> what a loss function returns: more figures than one go into
            its aux, as in `return loss, {"accuracy": accuracy}`.

        Returns:
          evaluate(state, batch) -> {"loss": ..., and aux}, means over the global batch. The state
          is neither changed nor donated.
        """
        check_call(fn, "fn", "model", "batch", "rng")
        return EvalStep(self, fn)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Global batches from this process's rows: pytrees of arrays [rows, ...].

        Raises:
          JzeroError: a batch with other rows than the first; see `dataloader_drop_last`.
        """
        return batches(self.mesh, loader, self.config.drop_last)

    def place_batch(self, batch: Any) -> Any:
        """One batch of this process's rows as global arrays."""
        return place_batch(self.mesh, batch)

    def monitor(self, folder: str | Path = "runs") -> Monitor:
        """Writers for what the configuration's `tensorboard` and `csv_monitor` ask for.

        Arguments:
          folder: where to write when their `output_path` is empty.
        """
        return Monitor(self.config, folder)

    def model(self, state: State) -> Any:
        """The model for inference and generation, in your own jit or outside of one.

        Parameters are gathered as they are read, layer by layer, at stage 3 too. Valid until the
        state is donated to the next step.

        Returns:
          What a loss function is given: the NNX module, a callable, or a pytree.
        """
        setup = self.setup
        sharded = {
            path: Sharded(state.stored(path), None, setup.layout.global_recipe(leaf))
            for path, leaf in setup.layout.leaves.items()
        }
        params = unflatten(setup.params, sharded)
        return setup.model.bind(params, state.variables, lambda key: key)

    def params(self, state: State) -> Any:
        """The parameters as a pytree of global arrays of their true shapes: fp32 master weights.

        Sharded as the state is; a leaf that is stored padded comes whole. Valid until the state is
        donated to the next step: copy what you keep.
        """

        check_usable(state)
        leaves = self.setup.layout.leaves
        flat = {path: self._true(leaf, state.weight(path)) for path, leaf in leaves.items()}
        return unflatten(self.setup.params, flat)

    def opt_state(self, state: State) -> Any:
        """The Optax state with true shapes, as `params` gives the weights."""
        check_usable(state)
        leaves = self.setup.layout.opt_leaves
        return jax.tree.map(self._true, leaves, state.opt_state, is_leaf=is_leaf)

    def checkpointer(
        self,
        folder: str | Path,
        *,
        every: int = 50,
        keep_last: int | None = 3,
        keep_every: int | None = None,
        trainable_only: bool = False,
        timeout: float = 1800.0,
    ) -> Checkpointer:
        """Saves states of this model in the background, and restores them on any mesh and stage.

        Arguments:
          folder: where the step folders go, on a file system that all processes see.
          every: steps between saves.
          keep_last: how many of the last steps stay; None for all.
          keep_every: each multiple of it stays for good, or the first step saved after it; itself a
            multiple of `every`.
          trainable_only: leave out the parameters that are not trained.
          timeout: seconds that a save waits for the other processes.

        Returns:
          A `Checkpointer`, for a `with` block around the training loop: see docs/checkpoints.md.

        Raises:
          JzeroError: an interval or a number that is not whole and positive.
        """
        return Checkpointer(
            self,
            folder,
            every=every,
            keep_last=keep_last,
            keep_every=keep_every,
            trainable_only=trainable_only,
            timeout=timeout,
        )

    def _true(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """A stored array without padding: whole then, since nothing divides it."""
        if x.shape == leaf.array.shape:
            return x
        sharding = self.mesh.sharding(leaf.spec(self.mesh.shard_axes, sharded=False))
        with self.mesh.context():
            whole = _unpadding(leaf, sharding)(x)
        self.mesh.settle(whole)
        return whole

    def explain(self) -> Explanation:
        """The table of leaves: shape, spec, bytes per device, and the reason for each."""
        setup = self.setup
        return explain(
            setup.layout, setup.abstract_state(), self._made_whole, setup.batch.accumulation
        )


@functools.cache
def _unpadding(leaf: Leaf, sharding: NamedSharding):
    return jax.jit(lambda x: unpad(leaf, x), out_shardings=sharding)
