"""A state from a step folder, on any stage, mesh and number of devices."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jzero.checkpoint import manifest
from jzero.checkpoint.agree import all_or_none
from jzero.checkpoint.choice import SCALE, RestoreReport, choose
from jzero.checkpoint.copies import compute_copy
from jzero.checkpoint.entries import PARTS, entries, progress
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.place import read_leaves
from jzero.checkpoint.store import Reader
from jzero.checkpoint.verify import offering_the_step_before
from jzero.errors import JzeroError
from jzero.paths import flatten, unflatten
from jzero.setup import Setup
from jzero.state import State
from jzero.train import check_state, check_usable


@dataclass(frozen=True)
class Restored:
    """A run as it was saved.

    Attributes:
      state: laid out as the setup says.
      step: the checkpoint's step.
      positions: in the data: one if all processes were at the same, otherwise one per process.
      report: where each leaf came from.
    """

    state: State
    step: int
    positions: tuple[Any, ...]
    report: RestoreReport

    @property
    def data(self) -> Any:
        """This process's position in the data, as it was given to `save`.

        Raises:
          JzeroError: each process had its own, and there are more or fewer now.
        """
        if len(self.positions) == 1:
            return self.positions[0]
        if len(self.positions) == jax.process_count():
            return self.positions[jax.process_index()]
        raise JzeroError(
            f"the position in the data was saved by {len(self.positions)} processes, each its own, "
            f"and there are {jax.process_count()} now: place the data from all of them, positions"
        )


def restore(
    folder: Path,
    setup: Setup,
    *,
    parts: Collection[str] = PARTS,
    base: State | None = None,
    strict: bool = True,
) -> Restored:
    """Reads a step folder into a state laid out as `setup` says, bit for bit.

    Every process calls it, in the main thread. Each reads its own pieces alone, leaf by leaf; the
    copies of weights in the compute dtype are made from them on the devices.

    Arguments:
      folder: a published step folder.
      setup: `zero.setup`, after `zero.setup_for(...)` or `zero.init(...)`.
      parts: which of params, optimizer, variables and progress (step, loss scale, RNG) to take.
      base: a state of `zero.init` for what is not taken. It is used up.
      strict: whether a leaf that differs is an error; otherwise it comes from `base`.

    Raises:
      DamagedCheckpoint: a file that is needed is missing, cut short or changed; it names the last
        complete step before.
      JzeroError: leaves that are missing, unexpected, or of another shape or dtype (none is cast),
        by their names; no `base` where one is needed.
      RunFailed: another process could not read its pieces.
    """
    folder, like = Path(folder), setup.abstract_state()
    wanted = entries(setup, like)
    if base is not None:
        check_usable(base)
        check_state(base, like)

    def read() -> tuple[Manifest, RestoreReport, dict[str, jax.Array]]:
        if not folder.is_dir():
            raise JzeroError(f"{folder}: no such step folder")
        saved = manifest.read(folder)
        report = choose(
            folder,
            saved,
            wanted,
            parts,
            dynamic_loss_scale=setup.scaling.dynamic,
            has_base=base is not None,
            strict=strict,
        )
        arrays = read_leaves(Reader(folder, saved), [wanted[name] for name in report.taken])
        return saved, report, arrays

    with setup.mesh.context(), offering_the_step_before(folder):
        saved, report, arrays = all_or_none(read, "read the step")
    if base is not None:
        given = entries(setup, base)
        arrays |= {name: given[name].array for name in report.from_base}
    with setup.mesh.context():
        if report.from_config:
            shardings = jax.tree.map(lambda x: x.sharding, like.scale)
            scale = jax.jit(setup.scaling.init, out_shardings=shardings)()
            arrays |= {SCALE + path: x for path, x in flatten(scale).items()}
        state = _assemble(setup, like, arrays)
    return Restored(state, saved.step, saved.facts.data, report)


def _assemble(setup: Setup, like: State, arrays: dict[str, jax.Array]) -> State:
    """The state from its leaves by name."""
    layout = setup.layout

    def part(name: str, tree: Any) -> Any:
        return unflatten(tree, {path: arrays[f"{name}/{path}"] for path in flatten(tree)})

    params, master = {}, {}
    for path, leaf in layout.leaves.items():
        weight = arrays[f"params/{path}"]
        if not layout.has_master(leaf):
            params[path] = weight
            continue
        master[path] = weight
        if layout.has_parameter(leaf):
            params[path] = compute_copy(layout.mesh, weight, layout.parameter(leaf))
    return State(
        params=params,
        master=master,
        opt_state=part("optimizer", like.opt_state),
        variables=part("variables", like.variables),
        **part("progress", progress(like)),
    )
