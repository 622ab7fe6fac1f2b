"""A model in one safetensors file or in several with an index, as Hugging Face lays them out."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jzero.checkpoint.safetensors.file import Spec, Tensor, check, create, read_header
from jzero.errors import JzeroError

ONE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PICKLED = {".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"}


def create_files(folder: Path, specs: Mapping[str, Spec], most: int) -> dict[str, Tensor]:
    """Makes the files of a model, with room for every tensor.

    Arguments:
      folder: an empty folder.
      specs: name -> shape and dtype.
      most: bytes of tensors in one file; a larger tensor has a file of its own.

    Returns:
      Name -> the tensor's place.

    Raises:
      JzeroError: a name or a dtype that the format does not have.
    """
    check(specs)  # of all files, before the first is made
    shards = split(specs, most)
    if len(shards) == 1:
        return create(folder / ONE, specs)
    places: dict[str, Tensor] = {}
    for number, names in enumerate(shards, start=1):
        path = folder / f"model-{number:05}-of-{len(shards):05}.safetensors"
        places |= create(path, {name: specs[name] for name in names})
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs.values())},
        "weight_map": {name: places[name].file.name for name in sorted(places, key=_natural)},
    }
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return places


def split(specs: Mapping[str, Spec], most: int) -> list[list[str]]:
    """Names by file: a layer's tensors together, the layers in their order.

    Example:
      >>> one = Spec((10,), "float32")
      >>> split({"layers.10.w": one, "layers.9.w": one, "head": one}, most=80)
      [['head', 'layers.9.w'], ['layers.10.w']]
    """
    shards: list[list[str]] = [[]]
    room = most
    for name in sorted(specs, key=_natural):
        if shards[-1] and specs[name].nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(name)
        room -= specs[name].nbytes
    return shards


def find(sources: Iterable[Path]) -> dict[str, Tensor]:
    """Every tensor of files and folders.

    Arguments:
      sources: safetensors files, indexes of several, or folders with either.

    Returns:
      Name -> the tensor's place.

    Raises:
      JzeroError: what is not there, is damaged, is pickled, or holds a name twice.
    """
    found: dict[str, Tensor] = {}
    for path in (path for source in sources for path in _files(source)):
        for name, tensor in read_header(path).items():
            if name in found:
                raise JzeroError(f"{name} is in both {found[name].file} and {path}")
            found[name] = tensor
    return found


def _files(source: Path) -> list[Path]:
    if source.is_dir():
        return _of_folder(source)
    if not source.is_file():
        raise JzeroError(f"{source}: no such file or folder")
    if source.suffix == ".json":
        return _of_index(source)
    if source.suffix in _PICKLED:
        raise JzeroError(_pickled(source))
    return [source]


def _of_folder(folder: Path) -> list[Path]:
    index, one = folder / INDEX, folder / ONE
    if index.is_file() and one.is_file():
        raise JzeroError(f"{folder}: has both {ONE} and {INDEX}; name the one that is meant")
    if index.is_file():
        return _of_index(index)
    there = [one] if one.is_file() else sorted(folder.glob("*.safetensors"))
    if len(there) == 1:
        return there
    if there:
        raise JzeroError(f"{folder}: {len(there)} .safetensors files, but no {INDEX}; name them")
    for path in sorted(folder.iterdir()):
        if path.suffix in _PICKLED:
            raise JzeroError(_pickled(path))
    raise JzeroError(f"{folder}: has no .safetensors files")


def _of_index(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = {name: str(file) for name, file in weight_map.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise JzeroError(f"{index}: is not an index: no object `weight_map` in JSON") from None
    paths = {}
    for file in sorted(set(names.values())):
        path = index.parent / file
        if path.name != file:
            raise JzeroError(f"{index}: names {file!r}, which is not a file beside it")
        if path.suffix in _PICKLED:
            raise JzeroError(_pickled(path))
        if not os.path.isfile(path):  # also where its name is too long for one
            raise JzeroError(f"{index}: names {file}, which is missing")
        paths[file] = path
    for file, path in paths.items():
        there = read_header(path)
        for name in (name for name, at in names.items() if at == file):
            if name not in there:
                raise JzeroError(f"{index}: says that {name} is in {file}, but it is not")
    return list(paths.values())


def _pickled(path: Path) -> str:
    return (
        f"{path}: is a pickle, which can run code when it is read; convert it to safetensors "
        f"where you trust it, and give that"
    )


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 9 before layer 10."""
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
