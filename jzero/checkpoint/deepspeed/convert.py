"""From a DeepSpeed checkpoint to one of jzero."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from jzero.checkpoint.choice import SCALE
from jzero.checkpoint.counterparts import some
from jzero.checkpoint.deepspeed import moments
from jzero.checkpoint.deepspeed.first_values import first_values, without_counterpart
from jzero.checkpoint.deepspeed.match import Origin, match
from jzero.checkpoint.deepspeed.parameter import MOMENTS, WEIGHT
from jzero.checkpoint.deepspeed.source import Source, read_source
from jzero.checkpoint.entries import PARAMS, Entry, entries, parameters
from jzero.checkpoint.folders import published, step_folder
from jzero.checkpoint.host_leaves import HostLeaf, write_leaves
from jzero.checkpoint.manifest import Facts
from jzero.checkpoint.name_map import NameMap
from jzero.checkpoint.steps import make_folder
from jzero.errors import JzeroError
from jzero.setup import Setup


@dataclass(frozen=True)
class Imported:
    """What an import wrote.

    Attributes:
      folder: the step folder.
      step: its step, DeepSpeed's `global_steps`.
      parameters: number of the model's leaves.
      first_values: leaves that DeepSpeed has no counterpart of: they are as in a new run.
      left_out: DeepSpeed's parameters that the name map leaves out.
      moments_left_out: DeepSpeed's parameters whose moments have no place in the optimizer's state.
      cast: (dtype in the files, dtype of the leaf) -> leaves that were cast.
    """

    folder: Path
    step: int
    parameters: int
    first_values: tuple[str, ...]
    left_out: tuple[str, ...]
    moments_left_out: tuple[str, ...]
    cast: Mapping[tuple[str, str], int]


def import_deepspeed(
    folder: str | Path,
    directory: str | Path,
    setup: Setup,
    *,
    name_map: NameMap | None = None,
    parameters_only: bool = False,
    strict: bool = True,
    seed: int = 0,
) -> Imported:
    """Makes a checkpoint from DeepSpeed's of ZeRO stage 1, 2 or 3, moments and steps included.

    `checkpointer.restore()` reads it at any stage, on any devices, and training goes on from there.
    Runs in one process, and holds one leaf in memory at a time.

    Arguments:
      folder: what DeepSpeed wrote for one tag, or its converter to the universal format; or the
        folder above, whose file `latest` names the tag.
      directory: the folder of step folders.
      setup: the model and its optimizer, from `zero.setup_for(model, tx)`. The moments go wherever
        the optimizer has an Adam.
      name_map: what DeepSpeed calls the leaves, as for safetensors: a parameter's moments are
        transposed and stacked as it is. None where they have the same names and shapes.
      parameters_only: leave out moments, steps and loss scale; then the optimizers may be any.
      strict: whether a floating leaf that DeepSpeed has no counterpart of is an error; otherwise it
        is as in a new run. The run's PRNG key always is.
      seed: of a new run.

    Raises:
      JzeroError: files that are missing, damaged, of two saves, of a kind that is not imported, or
        that name what may not be read; parameters or moments that do not fit; a step that is there;
        no folder that can be made.
      RunFailed: it cannot be written.
    """
    source = read_source(folder)
    if source.steps in published(Path(directory)):
        place = step_folder(Path(directory), source.steps)
        raise JzeroError(f"{place} is there already; delete it, or give another folder")
    wanted = entries(setup, setup.abstract_state())
    origins, left_out = match(source, parameters(wanted), name_map)
    made = {PARAMS + path: (origin, WEIGHT) for path, origin in origins.items()}
    numbers: dict[str, float] = {}
    first: dict[str, np.ndarray] = {}
    if not parameters_only:
        made |= _moments(source, setup, origins)
        numbers = _counts(source, setup, origins) | _progress(source)
        rest = without_counterpart(source.said, wanted, {*made, *numbers}, strict)
        first = first_values(setup, seed, rest)

    def leaf(name: str, entry: Entry) -> HostLeaf:
        if name in made:
            origin, what = made[name]
            make = partial(origin.make, what, entry.shape, entry.dtype)
            return name, entry.shape, entry.dtype, make
        if name in numbers:
            return name, entry.shape, entry.dtype, np.array(numbers[name], entry.dtype)
        return name, entry.shape, entry.dtype, first[name]

    there = {*made, *numbers, *first}
    leaves = (leaf(name, entry) for name, entry in wanted.items() if name in there)
    facts = Facts(
        source=f"imported from {source.said}",
        dynamic_loss_scale=bool(numbers) and source.loss_scale is not None,
        applied_steps=source.steps - source.skipped,
    )
    make_folder(Path(directory))
    written = write_leaves(Path(directory), source.steps, leaves, facts)
    moved = (origin for origin, what in made.values() if what in MOMENTS)
    placed = {parameter.name for origin in moved for _, parameter in origin.parameters}
    casts = Counter(
        (dtype, wanted[name].dtype)
        for name, (origin, what) in made.items()
        for dtype in sorted(set(origin.dtypes(what)))
        if dtype != wanted[name].dtype
    )
    unplaced = (n for n, p in source.parameters.items() if p.slices.keys() & MOMENTS)
    return Imported(
        written,
        source.steps,
        len(origins),
        tuple(first),
        left_out,
        tuple(n for n in unplaced if n not in placed and n not in left_out),
        casts,
    )


def _moments(
    source: Source, setup: Setup, origins: Mapping[str, Origin]
) -> dict[str, tuple[Origin, str]]:
    """The leaves of the optimizer's state that are moments."""
    found = moments.find(setup).moments
    if not found:
        raise JzeroError(
            "the optimizer's state has no Adam, so DeepSpeed's moments have no place in it; take "
            "the parameters only, or give an optimizer with optax.scale_by_adam"
        )
    made = {
        name: (origins[moment.path], moment.what)
        for name, moment in found.items()
        if moment.path in origins
    }
    lacking = dict.fromkeys(x for origin, what in made.values() for x in origin.lacks(what))
    if lacking:
        raise JzeroError(
            f"{source.said}: has no moments of Adam for {some(lacking)}: not trained there, or by "
            f"another optimizer; freeze it with trainable=, or take the parameters only"
        )
    return made


def _counts(source: Source, setup: Setup, origins: Mapping[str, Origin]) -> dict[str, float]:
    """The leaves of the optimizer's state that count steps: Adam's own, and those of schedules."""
    counts: dict[str, float] = {}
    for name, paths in moments.find(setup).counts.items():
        own = (p for path in paths if path in origins for _, p in origins[path].parameters)
        steps = sorted({p.steps for p in own if p.steps is not None})
        if len(steps) > 1:
            raise JzeroError(
                f"{source.said}: Adam's steps differ between parameters ({steps[0]} to "
                f"{steps[-1]}), but {name} counts them for all"
            )
        counts[name] = steps[0] if steps else source.steps - source.skipped
    return counts


def _progress(source: Source) -> dict[str, float]:
    scale = {} if source.loss_scale is None else vars(source.loss_scale)
    return {
        "progress/step": source.steps,
        "progress/skipped": source.skipped,
        **{SCALE + name: value for name, value in scale.items()},
    }
