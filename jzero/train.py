"""The steps that a user calls: traced and compiled at the first call, then only dispatched."""

from collections.abc import Callable
from typing import Any

import jax

from jzero import xla_options
from jzero.batches import place_batch
from jzero.errors import JzeroError
from jzero.monitor import Monitor
from jzero.paths import flatten
from jzero.relayout import discover, relayout
from jzero.setup import Holder
from jzero.state import State
from jzero.step import Step, with_aux
from jzero.watch import Watch


class TrainStep:
    """step(state, batch) -> (state, metrics); see `Zero.train_step`."""

    def __init__(self, holder: Holder, loss_fn: Callable[..., Any], monitor: Monitor | None):
        self._holder = holder
        self._loss_fn = loss_fn
        self._monitor = monitor
        self._jitted: Any = None
        self._setup: Any = None  # that the jitted step was made for
        self._paths: list[str] = []  # its trained parameters
        self._rows: set[int] = set()
        self._watch: Watch | None = None

    def __call__(self, state: State, batch: Any) -> tuple[State, dict[str, jax.Array]]:
        """Runs one optimizer step.

        Raises:
          JzeroError: a batch that does not split; an overflow at the minimum loss scale in an
            earlier step, which is looked at while the step after it runs. The state stays usable.
          Exception: the monitor's, of an earlier step.
        """
        if self._watch is not None:
            self._watch.check()
        check_usable(state)
        mesh = self._holder.setup.mesh
        batch = place_batch(mesh, batch)
        mesh.settle(state.step)
        with mesh.context():
            state, run = self._ready(state, batch)
            state, metrics, health = run(state, batch)
        if self._watch is None:
            setup = self._holder.setup
            self._watch = Watch(
                setup.scaling.minimum,
                setup.config.steps_per_print,
                self._monitor or Monitor(setup.config),
            )
        self._watch.add(health, self._paths, max(self._rows), metrics)
        self._watch.look()
        return state, metrics

    def finish(self) -> None:
        """Waits for the steps so far and reports them: for the end of a training loop.

        Raises:
          JzeroError: an overflow at the minimum loss scale in one of them.
          Exception: the monitor's.
        """
        if self._watch is not None:
            self._watch.look(wait=True)
            self._watch.check()

    def lower(self, batch: Any):
        """The step lowered for abstract arrays: `.compile()` it to read its memory and collectives.

        Arguments:
          batch: pytree of `jax.ShapeDtypeStruct`s [global rows, ...].
        """
        sharding = self._holder.setup.mesh.batch
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch
        )
        with self._holder.setup.mesh.context():
            _, run = self._ready(None, batch)
            return run.lower(self._holder.setup.abstract_state(), batch)

    def _ready(self, state: Any, batch: Any) -> tuple[Any, Any]:
        """The state as the step takes it, and the jitted step; made for the first batch."""
        rows = {x.shape[0] for x in jax.tree.leaves(batch) if x.shape}
        if rows != self._rows:
            self._check_rows(rows)
            self._rows = rows
        setup = self._holder.setup
        if self._setup is setup:
            return state, self._jitted
        if state is not None:
            check_state(state, setup.abstract_state())
        # Only now, with a loss, is it known of every model which axes are a layer scan's.
        found = discover(setup.region(self._loss_fn, 1), setup.variables, batch)
        if found:
            self._holder.setup = setup.with_layer_axes(found)
            state = relayout(state, setup.layout, self._holder.setup)
            setup = self._holder.setup
        step = Step(
            region=setup.region(self._loss_fn, setup.batch.accumulation),
            update=setup.update,
            scaling=setup.scaling,
            clip=setup.config.gradient_clipping,
            sum_gradients=setup.config.gradient_op == "sum",
            schedule=setup.schedule,
        )
        state_shardings = jax.tree.map(lambda x: x.sharding, setup.abstract_state())
        whole = setup.mesh.whole
        self._jitted = jax.jit(
            step.__call__,
            donate_argnums=0,
            out_shardings=(state_shardings, whole, whole),
            compiler_options=xla_options.compiler_options(setup.mesh.platform, setup.prefetched)
            or None,
        )
        self._setup, self._paths = setup, list(setup.layout.differentiated)
        return state, self._jitted

    def _check_rows(self, rows: set[int]) -> None:
        setup = self._holder.setup
        want = setup.batch.train
        if want is not None and rows != {want}:
            raise JzeroError(
                f"the batch has {sorted(rows)} rows over all processes, but train_batch_size is "
                f"{want} (micro-batch {setup.batch.micro} x accumulation "
                f"{setup.batch.accumulation} x {setup.mesh.data_size} devices)"
            )


class EvalStep:
    """evaluate(state, batch) -> metrics; see `Zero.eval_step`."""

    def __init__(self, holder: Holder, fn: Callable[..., Any]):
        self._holder = holder
        self._fn = fn
        self._jitted: Any = None
        self._setup: Any = None  # that the jitted evaluation was made for

    def __call__(self, state: State, batch: Any) -> dict[str, Any]:
        check_usable(state)
        setup = self._holder.setup
        batch = place_batch(setup.mesh, batch)
        if self._setup is not setup:
            check_state(state, setup.abstract_state())
            self._setup = setup
            region = setup.region(self._fn, 1)

            def evaluate(state: State, batch):
                values = {path: state.stored(path) for path in setup.layout.leaves}
                key = jax.random.fold_in(state.rng, state.step)
                loss, aux = region.losses(values, state.variables, batch, key)
                return with_aux({"loss": loss}, aux)

            self._jitted = jax.jit(evaluate, out_shardings=setup.mesh.whole)
        setup.mesh.settle(state.step)
        with setup.mesh.context():
            return self._jitted(state, batch)


def check_usable(state: Any) -> None:
    """Whether this is a state, and still there.

    Raises:
      JzeroError: something else, or a state that was given to an earlier step.
    """
    if not isinstance(state, State):
        raise JzeroError(
            f"the first argument is a {type(state).__name__}, not a jzero.State: call step(state, "
            f"batch)"
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise JzeroError(
            "this state was given to an earlier step, which updated it in place; go on with the "
            "state that step returned"
        )


def check_state(state: State, want: State) -> None:
    """Whether a state is laid out as the current setup says.

    Raises:
      JzeroError: naming the first leaf that is not.
    """
    have, expected = flatten(state), flatten(want)
    for path in (*expected, *have):
        found, needed = have.get(path), expected.get(path)
        if _is_other(found, needed):
            raise JzeroError(
                f"this state is not one of the model that zero.init laid out last: {path} is "
                f"{_words(found, 'missing')}, expected {_words(needed, 'nothing')}; use one "
                f"jzero.Zero per model"
            )


def _is_other(found: Any, needed: Any) -> bool:
    if found is None or needed is None or found.shape != needed.shape:
        return True
    # A NumPy array, for a hyperparameter say, gets its dtype where it is used.
    return isinstance(found, jax.Array) and found.dtype != needed.dtype


def _words(x: Any, none: str) -> str:
    return none if x is None else f"{x.dtype} {x.shape}"
