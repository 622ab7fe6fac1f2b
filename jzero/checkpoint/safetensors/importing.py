"""From safetensors files to a checkpoint."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.cast import cast, castable
from jzero.checkpoint.counterparts import Counterpart, counterparts, left_out, some
from jzero.checkpoint.entries import PARAMS, entries, parameters, statistics
from jzero.checkpoint.folders import published
from jzero.checkpoint.host_leaves import HostLeaf, write_leaves
from jzero.checkpoint.manifest import Facts
from jzero.checkpoint.name_map import NameMap
from jzero.checkpoint.safetensors.file import Tensor
from jzero.checkpoint.safetensors.folder import find
from jzero.checkpoint.steps import make_folder
from jzero.errors import JzeroError
from jzero.setup import Setup

STEP = 0


@dataclass(frozen=True)
class Imported:
    """What an import wrote.

    Attributes:
      folder: the step folder.
      leaves: number of parameters.
      left_out: tensors that the name map leaves out.
      cast: (dtype in the files, dtype of the leaf) -> tensors that were cast.
      statistics: the model's other variables that are numbers, such as batch statistics: a fresh
        state's.
    """

    folder: Path
    leaves: int
    left_out: tuple[str, ...]
    cast: Mapping[tuple[str, str], int]
    statistics: tuple[str, ...]


def import_safetensors(
    sources: str | Path | Iterable[str | Path],
    directory: str | Path,
    setup: Setup,
    *,
    name_map: NameMap | None = None,
) -> Imported:
    """Makes a checkpoint of step 0 from safetensors files: parameters alone.

    `checkpointer.restore(parts=("params",), base=state)` reads it at any stage, on any devices.
    Every tensor must be a parameter's and every parameter must have its tensors, of the right
    shape. Floats are cast to the dtype in which jzero keeps the parameter: fp32 where it is
    trained, else the dtype of the computation. Runs in one process without devices, and holds one
    leaf in memory at a time.

    Arguments:
      sources: files, an index, or a folder, as Hugging Face lays them out.
      directory: the folder of step folders to be; no checkpoint may be there.
      setup: the model as it will be trained, from `zero.setup_for(model, tx)`.
      name_map: as for `export_safetensors`, the same one.

    Raises:
      JzeroError: files that are missing, damaged or pickled; names or shapes that differ; tied
        tensors that do; a checkpoint that is there; no folder that can be made.
      RunFailed: it cannot be written.

    Example:
      import_safetensors("llama", "runs/a/checkpoints", zero.setup_for(Net, tx), name_map=rules)
    """
    directory = Path(directory)
    if there := published(directory):
        raise JzeroError(f"{directory}: has checkpoints (step {there[-1]}); give a new folder")
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    found = find(map(Path, given))
    every = entries(setup, setup.abstract_state())
    leaves = parameters(every)
    shapes = {name: entry.shape for name, entry in leaves.items()}
    skipped = left_out(name_map, shapes, found)
    sources_of = _match(
        counterparts(name_map, shapes),
        {name: tensor for name, tensor in found.items() if name not in skipped},
        {name: entry.dtype for name, entry in leaves.items()},
    )
    casts = Counter(
        (tensor.spec.dtype, leaves[leaf].dtype)
        for leaf, own in sources_of.items()
        for _, tensor in own
        if tensor.spec.dtype != leaves[leaf].dtype
    )

    def all_leaves() -> Iterator[HostLeaf]:
        for leaf, own in sources_of.items():
            entry = leaves[leaf]
            make = partial(_assemble, own, entry.shape, entry.dtype)
            yield PARAMS + leaf, entry.shape, entry.dtype, make

    facts = Facts(source=f"imported from {', '.join(map(str, given))}")
    make_folder(directory)
    folder = write_leaves(directory, STEP, all_leaves(), facts)
    return Imported(folder, len(sources_of), tuple(sorted(skipped)), casts, statistics(every))


def _assemble(
    own: list[tuple[Counterpart, Tensor]], shape: tuple[int, ...], dtype: str
) -> np.ndarray:
    """A leaf from its tensors."""
    values = np.empty(shape, jnp.dtype(dtype))
    for theirs, tensor in own:
        values[theirs.index] = cast(tensor.name, theirs.to_ours(tensor.read()), dtype)
    return values


def _match(
    wanted: list[Counterpart], found: Mapping[str, Tensor], dtypes: Mapping[str, str]
) -> dict[str, list[tuple[Counterpart, Tensor]]]:
    """Leaf -> the tensors that it is made from.

    Raises:
      JzeroError: tensors that are missing, unexpected, of another shape or kind; tied ones that
        are not equal.
    """
    known = {name for theirs in wanted for name in theirs.names}
    # Of names that are tied, one is enough: what is tied is often written once.
    there = [(theirs, [found[name] for name in theirs.names if name in found]) for theirs in wanted]
    missing = [theirs.names[0] for theirs, tensors in there if not tensors]
    extra = [name for name in found if name not in known]
    problems = []
    if missing:
        problems.append(f"the model needs {some(missing)}, which the files do not have")
    if extra:
        problems.append(
            f"the files have {some(extra)}, which no leaf takes; to leave a tensor out give the "
            f"name map a rule with null as `ours`"
        )
    differ = []
    for theirs, tensors in there:
        leaf, shape = theirs.leaf, theirs.their_shape
        for tensor in tensors:
            if tensor.spec.shape != shape:
                differ.append(
                    f"{tensor.name} is {list(tensor.spec.shape)} for {list(shape)} of {leaf}"
                )
            if not castable(tensor.spec.dtype, dtypes[leaf]):
                differ.append(f"{tensor.name} is {tensor.spec.dtype} for {dtypes[leaf]} of {leaf}")
    if differ:
        problems.append(f"what they are differs: {some(differ)}")
    if problems:
        raise JzeroError("; ".join(problems))
    sources: dict[str, list[tuple[Counterpart, Tensor]]] = {}
    for theirs, (first, *tied) in there:
        for other in tied:
            if not first.same(other):
                raise JzeroError(
                    f"{other.name} differs from {first.name}, but {theirs.leaf} is both: the "
                    f"model's are tied, the files' are not"
                )
        sources.setdefault(theirs.leaf, []).append((theirs, first))
    return sources
