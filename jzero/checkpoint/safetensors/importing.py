"""From safetensors files to a checkpoint."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.entries import entries
from jzero.checkpoint.folders import published
from jzero.checkpoint.manifest import Facts
from jzero.checkpoint.safetensors.cast import cast, castable
from jzero.checkpoint.safetensors.export import PART
from jzero.checkpoint.safetensors.file import Tensor
from jzero.checkpoint.safetensors.folder import find
from jzero.checkpoint.safetensors.name_map import NameMap
from jzero.checkpoint.safetensors.pieces import Piece, left_out, pieces, some
from jzero.checkpoint.save import write_leaves
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
    """

    folder: Path
    leaves: int
    left_out: tuple[str, ...]
    cast: Mapping[tuple[str, str], int]


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
        tensors that do; a checkpoint that is there.
      RunFailed: it cannot be written.

    Example:
      import_safetensors("llama", "runs/a/checkpoints", zero.setup_for(Net, tx), name_map=rules)
    """
    directory = Path(directory)
    if there := published(directory):
        raise JzeroError(f"{directory}: has checkpoints (step {there[-1]}); give a new folder")
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    found = find(map(Path, given))
    leaves = {
        name.removeprefix(PART): entry
        for name, entry in entries(setup, setup.abstract_state()).items()
        if name.startswith(PART)
    }
    shapes = {name: entry.shape for name, entry in leaves.items()}
    wanted = pieces(name_map, shapes)
    skipped = left_out(name_map, shapes, found)
    sources_of = _match(
        wanted,
        {name: tensor for name, tensor in found.items() if name not in skipped},
        {name: entry.dtype for name, entry in leaves.items()},
    )
    casts = Counter(
        (tensor.spec.dtype, leaves[piece.leaf].dtype)
        for piece, tensor in sources_of
        if tensor.spec.dtype != leaves[piece.leaf].dtype
    )

    def all_leaves() -> Iterator[tuple[str, tuple[int, ...], str, Callable[[], np.ndarray]]]:
        for name, entry in leaves.items():
            own = [(piece, tensor) for piece, tensor in sources_of if piece.leaf == name]
            if own:
                make = partial(_assemble, own, entry.shape, entry.dtype)
                yield PART + name, entry.shape, entry.dtype, make

    facts = Facts(source=f"imported from {', '.join(map(str, given))}")
    folder = write_leaves(directory, STEP, all_leaves(), facts)
    return Imported(folder, len({p.leaf for p, _ in sources_of}), tuple(sorted(skipped)), casts)


def _assemble(own: list[tuple[Piece, Tensor]], shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """A leaf from its pieces."""
    values = np.empty(shape, jnp.dtype(dtype))
    for piece, tensor in own:
        values[piece.index] = cast(tensor.name, piece.to_ours(tensor.read()), dtype)
    return values


def _match(
    wanted: list[Piece], found: Mapping[str, Tensor], dtypes: Mapping[str, str]
) -> list[tuple[Piece, Tensor]]:
    """Each piece with the tensor that it is made from.

    Raises:
      JzeroError: tensors that are missing, unexpected, of another shape or kind; tied ones that
        are not equal.
    """
    known = {name for piece in wanted for name in piece.theirs}
    # Of names that are tied, one is enough: what is tied is often written once.
    there = [[found[name] for name in piece.theirs if name in found] for piece in wanted]
    missing = [p.theirs[0] for p, tensors in zip(wanted, there, strict=True) if not tensors]
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
    for piece, tensors in zip(wanted, there, strict=True):
        for tensor in tensors:
            if tensor.spec.shape != piece.their_shape:
                differ.append(
                    f"{tensor.name} is {list(tensor.spec.shape)} for {list(piece.their_shape)} of "
                    f"{piece.leaf}"
                )
            if not castable(tensor.spec.dtype, dtypes[piece.leaf]):
                differ.append(
                    f"{tensor.name} is {tensor.spec.dtype} for {dtypes[piece.leaf]} of {piece.leaf}"
                )
    if differ:
        problems.append(f"what they are differs: {some(differ)}")
    if problems:
        raise JzeroError("; ".join(problems))
    for piece, (first, *tied) in zip(wanted, there, strict=True):
        for other in tied:
            if not first.same(other):
                raise JzeroError(
                    f"{other.name} differs from {first.name}, but {piece.leaf} is both: the "
                    f"model's are tied, the files' are not"
                )
    return [(piece, tensors[0]) for piece, tensors in zip(wanted, there, strict=True)]
