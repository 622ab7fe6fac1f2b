"""From a checkpoint to safetensors files."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from jzero.checkpoint import manifest
from jzero.checkpoint.cast import cast
from jzero.checkpoint.counterparts import Counterpart, counterparts
from jzero.checkpoint.entries import PARAMS, parameters, statistics
from jzero.checkpoint.files import sync
from jzero.checkpoint.folders import new_nonce
from jzero.checkpoint.name_map import NameMap
from jzero.checkpoint.safetensors.file import Spec, Tensor
from jzero.checkpoint.safetensors.folder import create_files
from jzero.checkpoint.steps import choose_step
from jzero.checkpoint.store import Reader
from jzero.checkpoint.verify import offering_the_step_before
from jzero.errors import JzeroError
from jzero.partition import is_float

SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Exported:
    """What an export wrote.

    Attributes:
      folder: where.
      step: the checkpoint's step.
      files: names of the safetensors files.
      tensors, bytes: their number and size.
      trainable_only: whether the checkpoint lacks the parameters that are not trained.
      statistics: other variables that are numbers, such as batch statistics: not in the files.
    """

    folder: Path
    step: int
    files: tuple[str, ...]
    tensors: int
    bytes: int
    trainable_only: bool
    statistics: tuple[str, ...]


def export_safetensors(
    directory: str | Path,
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    name_map: NameMap | None = None,
) -> Exported:
    """Writes a checkpoint's parameters as safetensors files, laid out as Hugging Face does.

    Full logical arrays, whatever the stage and the devices of the run: fp32 master weights where
    they were trained. Runs in one process without devices, and holds little more than a leaf in
    memory, of a stack of layers only a part.

    Arguments:
      directory: the folder of step folders.
      out: a new folder. It appears when all of it is written, or not at all.
      step: by default the last one.
      dtype: of floating-point weights: "float32", "bfloat16" or another; None for as saved.
      max_shard_bytes: of tensors in one file. What fits in one is `model.safetensors`; else there
        are several and `model.safetensors.index.json`.
      name_map: what the tensors are called, and how they lie; None for jzero's names and shapes.

    Raises:
      DamagedCheckpoint: a file that is missing, cut short or changed.
      JzeroError: no such step; `out` is there; a name map that does not fit; a weight that the
        dtype cannot hold.
      OSError: it cannot be written.

    Example:
      export_safetensors("runs/a/checkpoints", "model", dtype="bfloat16")
    """
    out = Path(out)
    if out.exists():
        raise JzeroError(f"{out}: is there already; give a new folder")
    if not out.absolute().parent.is_dir():
        raise JzeroError(f"{out}: there is no folder {out.parent}")
    folder = choose_step(directory, step)
    with offering_the_step_before(folder):
        return _export(folder, out, dtype, max_shard_bytes, name_map)


def _export(
    folder: Path, out: Path, dtype: str | None, most: int, name_map: NameMap | None
) -> Exported:
    found = manifest.read(folder)
    leaves = parameters(found.leaves)
    wanted = counterparts(name_map, {name: leaf.shape for name, leaf in leaves.items()})
    kinds = {
        name: dtype if dtype is not None and is_float(leaf.dtype) else leaf.dtype
        for name, leaf in leaves.items()
    }
    specs = {
        name: Spec(tensor.their_shape, kinds[tensor.leaf])
        for tensor in wanted
        for name in tensor.names
    }
    if not specs:
        raise JzeroError(f"{folder}: has no parameters to export")
    beside = out.with_name(f".{out.name}.unfinished-{new_nonce()}")
    beside.mkdir()
    try:
        places = create_files(beside, specs, most)
        reader = Reader(folder, found)
        for leaf, own in groupby(wanted, key=lambda tensor: tensor.leaf):
            _write(reader, list(own), kinds[leaf], places)
        for path in beside.iterdir():
            sync(path)
        sync(beside)
        os.rename(beside, out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    sync(out.absolute().parent)
    files = sorted({place.file.name for place in places.values()})
    return Exported(
        out,
        found.step,
        tuple(files),
        len(specs),
        sum(spec.nbytes for spec in specs.values()),
        found.facts.trainable_only,
        statistics(found.leaves),
    )


def _write(
    reader: Reader, own: list[Counterpart], dtype: str, places: Mapping[str, Tensor]
) -> None:
    """Writes the tensors of a leaf, reading together the entries of a stack that share a chunk."""
    name = PARAMS + own[0].leaf
    entry = reader.manifest.leaves[name]

    def put(tensor: Counterpart, values: np.ndarray) -> None:
        theirs = tensor.to_theirs(cast(tensor.leaf, values, dtype))
        for their_name in tensor.names:
            places[their_name].write(theirs)

    if not own[0].index:
        put(own[0], reader.region(name))
        return
    rest = [slice(0, size) for size in entry.shape[1:]]
    for _, block in groupby(own, key=lambda tensor: tensor.index[0] // entry.chunk[0]):
        block = list(block)
        first, last = block[0].index[0], block[-1].index[0]
        values = reader.region(name, (slice(first, last + 1), *rest))
        for tensor in block:
            put(tensor, np.asarray(values[(tensor.index[0] - first, *tensor.index[1:])]))
