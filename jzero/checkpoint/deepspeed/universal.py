"""DeepSpeed's universal format: a folder for each parameter, a file for each moment.

deepspeed/checkpoint/ds_to_universal.py, of 0.19.8. Its files hold a tensor in its shape, in a dict
with some notes (stages 1 and 2), or as a row (stage 3).
"""

import math
from collections.abc import Iterator
from pathlib import Path

from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.checkpoint.deepspeed.parameter import MOMENTS, WEIGHT, Parameter, Slice
from jzero.checkpoint.deepspeed.partitions import group_steps
from jzero.checkpoint.deepspeed.saved import Saved, read
from jzero.errors import JzeroError

OPTIMIZER = "optimizer_state.pt"


def trained(model: Saved, folder: Path, optimizer: Saved) -> Iterator[Parameter]:
    """The parameters that the optimizer has, with their moments.

    Arguments:
      model: model states, which say the parameters' names and shapes.
      folder: of the parameters' folders.
      optimizer: its file for what all parameters have in common.

    Raises:
      JzeroError: a file that is missing or damaged, or a tensor of another size.
    """
    for group in range(len(model.get(list, "param_shapes"))):
        for name, shape in model.shapes("param_shapes", group).items():
            slices = {WEIGHT: _whole(folder / name / f"{WEIGHT}.pt", shape)}
            for what in MOMENTS:
                file = folder / name / f"{what}.pt"
                if file.is_file():  # there is none for what never had a gradient
                    slices[what] = _whole(file, shape)
            steps = _steps(folder / name, optimizer, group) if MOMENTS[0] in slices else None
            yield Parameter(name, shape, slices, steps)


def _whole(file: Path, shape: tuple[int, ...]) -> tuple[Slice]:
    if not file.is_file():
        raise JzeroError(f"{file}: is missing")
    saved = read(file)
    tensor = saved.get(Tensor, *(["param"] if isinstance(saved.content, dict) else []))
    if tensor.shape not in (shape, (math.prod(shape),)):
        raise JzeroError(f"{file}: its tensor is {list(tensor.shape)} for {list(shape)}")
    return (Slice(tensor, 0, tensor.size),)


def _steps(folder: Path, optimizer: Saved, group: int) -> int:
    file = folder / "step.pt"
    steps = read(file).steps() if file.is_file() else None
    if steps is None:  # stage 3, whose converter leaves rank 0's own state there
        steps = optimizer.steps("optimizer_state_dict", "state", group, "step")
    found = {steps} if steps is not None else group_steps(optimizer)
    [steps, *others] = found or {None}
    if steps is None or others:
        raise JzeroError(f"{optimizer.path}: does not say Adam's steps on {folder.name}")
    return steps
