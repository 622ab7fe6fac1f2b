"""Files of `torch.save`, read without torch and without running what they hold.

A pickle is a program: it names functions and classes by module, and calls them. Here a name is
looked up in a short list of stand-ins that do nothing but describe a tensor or keep attributes; any
other is refused, and nothing is ever imported.

https://docs.python.org/3/library/pickle.html#restricting-globals
"""

import io
import pickle
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jzero.checkpoint.deepspeed.archive import (
    Archive,
    Storage,
    Tensor,
    read_archive,
    refuse_state,
)
from jzero.checkpoint.sizes import is_size
from jzero.errors import JzeroError

_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
"""torch's class of a storage -> NumPy's name of its dtype."""


class _Dict(dict):
    """Stands for an ordered dict, without the attributes that one may be given."""

    def __setstate__(self, state: Any) -> None:
        pass


class Record:
    """Stands for an object of a class: keeps its attributes, and does nothing."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            refuse_state(self)
        self.__dict__.update(state)


@dataclass(frozen=True)
class _Function:
    """Stands for a function. (A plain one would have attributes that a pickle may set.)"""

    run: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.run(*args)

    def __setstate__(self, state: Any) -> NoReturn:
        refuse_state(self)


def load(path: Path) -> Any:
    """What a file of `torch.save` holds.

    Arguments:
      path: the file.

    Returns:
      The same dicts, lists, tuples and numbers; a `Tensor` for each tensor, a `Record` for each
      other object, an int for an enumeration's member, a tuple for a size.

    Raises:
      JzeroError: a file that is cut short, damaged or of another format, or whose pickle names
        something that is not on the list.
    """
    return _Unpickler(read_archive(path)).load()


class _Unpickler(pickle.Unpickler):
    """Reads one pickle, with stand-ins for all that it names."""

    def __init__(self, archive: Archive):
        super().__init__(io.BytesIO(archive.pickled))
        self._archive = archive

    def load(self) -> Any:
        pickled = self._archive.pickled
        try:
            for opcode, argument, _ in pickletools.genops(pickled):
                if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(pickled):
                    raise ValueError("it asks for a memo larger than itself")
            return super().load()
        except JzeroError:
            raise
        except Exception as error:  # a pickle that is no pickle fails in many ways
            raise JzeroError(f"{self._archive.path}: its pickle is damaged ({error})") from None

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[f"{module}.{name}"]
        except KeyError:
            raise JzeroError(
                f"{self._archive.path}: its pickle names {module}.{name}, which is not on the list "
                f"of what may be read, so nothing of the file was used. If you trust the file, "
                f"load it with PyTorch, take that object out, and save it again"
            ) from None

    def persistent_load(self, pid: Any) -> Storage:
        kind, dtype, key, _, size = pid
        if kind != "storage" or dtype not in _STORAGES.values() or not is_size(size):
            raise ValueError("a storage is not described as torch.save does")
        return self._archive.storage(key, dtype, size)


def _tensor(storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> Tensor:
    """As torch._utils._rebuild_tensor_v2, and within the storage."""
    sizes = (start, *shape, *strides)
    if not isinstance(storage, Storage) or not all(map(is_size, sizes)):
        raise ValueError("a tensor is not described as torch.save does")
    tensor = Tensor(storage, start, tuple(shape), tuple(strides))
    last = start + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if tensor.size > storage.size or (tensor.size and last >= storage.size):
        raise ValueError(f"a tensor {shape} does not fit its storage of {storage.size:,}")
    return tensor


def _of_type(function: Any, _kind: Any, args: Any, _state: Any) -> Any:
    """As torch._tensor._rebuild_from_type_v2: a tensor that was given attributes."""
    if not isinstance(function, _Function):
        raise ValueError("a tensor is not described as torch.save does")
    return function(*args)


_ALLOWED: dict[str, Any] = {
    **_STORAGES,
    "collections.OrderedDict": _Dict,
    "__builtin__.set": set,
    "builtins.set": set,
    "torch.Size": tuple,
    "torch.Tensor": Record,
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch._utils._rebuild_tensor_v2": _Function(_tensor),
    "torch._utils._rebuild_parameter": _Function(lambda tensor, *_: tensor),
    "torch._tensor._rebuild_from_type_v2": _Function(_of_type),
    "deepspeed.runtime.zero.config.ZeroStageEnum": int,
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": Record,
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": Record,
    "deepspeed.utils.tensor_fragment.fragment_address": Record,
}
"""All that a pickle may name, and what stands for it."""
