"""A DeepSpeed checkpoint as a whole: every parameter by name, and how far the run was."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jzero.checkpoint.deepspeed import partitions, universal
from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.checkpoint.deepspeed.files import find
from jzero.checkpoint.deepspeed.parameter import WEIGHT, Parameter, Slice
from jzero.checkpoint.deepspeed.pickles import Record
from jzero.checkpoint.deepspeed.saved import Saved, read
from jzero.errors import JzeroError


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale as DeepSpeed left it.

    Attributes:
      scale: the scale.
      clean: steps without overflow since the last one.
      hysteresis: overflows that may still pass before it halves.
    """

    scale: float
    clean: int
    hysteresis: int


@dataclass(frozen=True)
class Source:
    """A DeepSpeed checkpoint.

    Attributes:
      parameters: name -> parameter, trained or not.
      tied: another name of a parameter -> its name in `parameters`.
      steps, skipped: optimizer steps, and of them those that overflowed.
      loss_scale: None where it is not dynamic.
      said: what wrote it, in words.
    """

    parameters: Mapping[str, Parameter]
    tied: Mapping[str, str]
    steps: int
    skipped: int
    loss_scale: LossScale | None
    said: str


def read_source(folder: str | Path) -> Source:
    """Reads what the files of a checkpoint say; the arrays stay in them until they are asked for.

    Arguments:
      folder: as `files.find` takes it.

    Raises:
      JzeroError: files that are missing, damaged, of two saves, of a kind that is not imported, or
        that may not be read, by their names.
    """
    files = find(folder)
    models = [read(path) for path in files.model]
    model = models[0]
    _check_same(models)
    if files.universal is not None:
        optimizer = read(files.universal / universal.OPTIMIZER)
        trained = universal.trained(model, files.universal, optimizer)
        loss_scale = _loss_scale(optimizer, "loss_scaler")
    else:
        ranks = [read(path) for path in files.optimizer]
        trained = partitions.trained(model, ranks, files.stage3)
        loss_scale = _loss_scale(ranks[0], "optimizer_state_dict", "loss_scaler")
    parameters = {parameter.name: parameter for parameter in trained}
    tied = model.get(dict, "shared_params")
    if files.stage3:
        parameters |= {p.name: p for p in _frozen_pieces(models)}
    else:
        parameters |= {p.name: p for p in _whole(model, parameters, tied)}
    steps, skipped = model.count("global_steps"), model.count("skipped_steps")
    if skipped > steps:
        raise JzeroError(f"{model.path}: has {skipped} skipped steps of {steps}")
    version = model.get(str, "ds_version")
    return Source(
        parameters,
        {name: stored for name, stored in tied.items() if stored in parameters},
        steps,
        skipped,
        loss_scale,
        f"DeepSpeed {version}, {files.folder}",
    )


def _check_same(models: Sequence[Saved]) -> None:
    """Of stage 3, whose ranks have a model file each."""
    for key in ("global_steps", "skipped_steps", "param_shapes", "frozen_param_shapes"):
        for other in models[1:]:
            if other.find(key) != models[0].find(key):
                raise JzeroError(
                    f"{other.path} and {models[0].path.name} differ in {key}: they are of two saves"
                )


def _whole(
    model: Saved, trained: Mapping[str, Parameter], tied: Mapping[str, str]
) -> Iterator[Parameter]:
    """The weights that the model file has whole, below stage 3.

    Those of trained parameters are there to compare with; the others are nowhere else.
    """
    buffers = model.get(list, "buffer_names")
    for name, held in model.get(dict, "module").items():
        if not isinstance(held, Tensor) or name in buffers or name in tied:
            continue
        if name in trained:
            if held.shape != trained[name].shape:
                raise JzeroError(
                    f"{model.path}: {name} is {list(held.shape)} in the model, and "
                    f"{list(trained[name].shape)} in the optimizer"
                )
            yield replace(trained[name], model=held)
        else:
            yield Parameter(name, held.shape, {WEIGHT: (Slice(held, 0, held.size),)})


def _frozen_pieces(models: Sequence[Saved]) -> Iterator[Parameter]:
    """At stage 3 parameters that are not trained are in pieces, in the ranks' model files."""
    if models[0].find("frozen_param_shapes") is None:  # `exclude_frozen_parameters`
        return
    for name, shape in models[0].shapes("frozen_param_shapes").items():
        parameter = Parameter(name, shape, {})
        pieces = [saved.get(Tensor, "frozen_param_fragments", name) for saved in models]
        slices = [
            Slice(tensor, 0, partitions.piece(parameter.size, rank, len(models)))
            for rank, tensor in enumerate(pieces)
        ]
        if any(tensor.size != slices[0].stop for tensor in pieces):
            raise JzeroError(
                f"{models[0].path.parent}: the pieces of {name}, which is not trained, do not add "
                f"up to {list(shape)}: {', '.join(str(tensor.size) for tensor in pieces)}"
            )
        yield replace(parameter, slices={WEIGHT: tuple(slices)})


def _loss_scale(optimizer: Saved, *keys: str) -> LossScale | None:
    """A DynamicLossScaler; None of a LossScaler, and where there is none."""
    scaler = optimizer.find(*keys)
    held = vars(scaler) if isinstance(scaler, Record) else {}
    if not held.get("dynamic"):
        return None
    inside = Saved(optimizer.path, held)
    scale = inside.find("cur_scale")  # an int until it changes
    if not isinstance(scale, int | float) or not 0 < scale <= float(np.finfo(np.float32).max):
        raise JzeroError(f"{optimizer.path}: the loss scale is not a positive, finite float32")
    clean = inside.get(int, "cur_iter") - inside.get(int, "last_overflow_iter") - 1
    clean = inside.as_count(clean, "cur_iter after last_overflow_iter")
    return LossScale(float(scale), clean, inside.count("cur_hysteresis"))
