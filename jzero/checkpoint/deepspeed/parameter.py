"""A parameter as DeepSpeed kept it: flat pieces in the files of several ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.errors import JzeroError

WEIGHT = "fp32"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""DeepSpeed's names of what it keeps of a parameter: also those of its universal files."""


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of a tensor, taken as a row."""

    tensor: Tensor
    start: int
    stop: int

    def read(self) -> np.ndarray:
        return self.tensor.read().reshape(-1)[self.start : self.stop]


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Attributes:
      name: DeepSpeed's.
      shape: its shape.
      slices: WEIGHT, and of MOMENTS those that there are -> the slices that follow each other.
      steps: of Adam on this parameter; None where there are no moments.
      model: the weight as the model held it, in the dtype of the computation; None at stage 3.
    """

    name: str
    shape: tuple[int, ...]
    slices: Mapping[str, tuple[Slice, ...]]
    steps: int | None = None
    model: Tensor | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def dtype(self, what: str) -> str:
        """Of the weight, or of a moment."""
        return self.slices[what][0].tensor.dtype

    def read(self, what: str) -> np.ndarray:
        """The weight or a moment, put together.

        Raises:
          JzeroError: a weight that is not the one that the model held: files of two saves.
        """
        parts = [each.read() for each in self.slices[what]]
        values = (parts[0] if len(parts) == 1 else np.concatenate(parts)).reshape(self.shape)
        if what == WEIGHT and self.model is not None and not _same(values, self.model.read()):
            raise JzeroError(
                f"{self.name} in the optimizer's files is not what the model in "
                f"{self.model.storage.file} held: they are of two saves, or were put together in "
                f"the wrong order"
            )
        return values


def _same(weight: np.ndarray, held: np.ndarray) -> bool:
    """Whether what the model held is the weight in its dtype."""
    with np.errstate(over="ignore"):
        cast = weight.astype(held.dtype)
    return bool(np.all((cast == held) | (np.isnan(cast) & np.isnan(held))))
