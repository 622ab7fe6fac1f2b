"""What is in a step folder: every leaf, every file with its checksum, and the run it came from."""

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint.chunks import chunks_of
from jzero.checkpoint.damage import DamagedCheckpoint, step_of
from jzero.checkpoint.files import FileEntry, write_text
from jzero.checkpoint.sizes import is_size
from jzero.errors import JzeroError

FORMAT = "jzero checkpoint"
VERSION = 1
NAME = "manifest.json"
_MOST_DIMS = 32  # TensorStore's
_PACKAGES = ("jzero", "jax", "flax", "optax", "tensorstore", "numpy")


@dataclass(frozen=True)
class LeafEntry:
    """One array of the state.

    Attributes:
      shape: true global shape, without padding.
      dtype: its dtype's name; `key<fry>` of a PRNG key.
      chunk: shape of a chunk file's array. A key is stored whole as the uint32 of its key data, so
        that its chunk has their shape.
      bytes: of its elements, without padding.
    """

    shape: tuple[int, ...]
    dtype: str
    chunk: tuple[int, ...]
    bytes: int

    @property
    def is_key(self) -> bool:
        return self.dtype.startswith("key<")

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array in the files: a key's is that of its data."""
        return self.chunk if self.is_key else self.shape

    @property
    def array_dtype(self) -> str:
        return "uint32" if self.is_key else self.dtype


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of the run that wrote it; none of it is needed to read the arrays.

    Attributes:
      stage, devices, mesh: ZeRO stage, number of devices, mesh axis -> size; None outside of a run.
      config: the resolved configuration, or None.
      dynamic_loss_scale: whether the loss scale follows overflows, and so is part of the state.
      applied_steps: steps that were not skipped: the position of a learning rate schedule.
      trainable_only: whether parameters that are not trained were left out.
      data: the user's position in the data, JSON: one if all processes are at the same, otherwise
        one per process.
      source: what wrote it, in words.
      versions: package -> version.
    """

    stage: int | None = None
    devices: int | None = None
    mesh: Mapping[str, int] | None = None
    config: Mapping[str, Any] | None = None
    dynamic_loss_scale: bool = False
    applied_steps: int | None = None
    trainable_only: bool = False
    data: tuple[Any, ...] = (None,)
    source: str = "training"
    versions: Mapping[str, str] = field(default_factory=lambda: _versions())


@dataclass(frozen=True)
class Manifest:
    """All that a step folder holds.

    Attributes:
      step: the optimizer step.
      leaves: name -> array, in the state's order; names begin with a part, as `params/`.
      files: path within the folder -> file, the manifest itself left out.
      facts: the run it came from.
    """

    step: int
    leaves: Mapping[str, LeafEntry]
    files: Mapping[str, FileEntry]
    facts: Facts

    @property
    def bytes(self) -> int:
        """Of all leaves, without padding."""
        return sum(leaf.bytes for leaf in self.leaves.values())


def write(folder: Path, manifest: Manifest) -> None:
    """Writes a step folder's manifest: the last of its files.

    Raises:
      JzeroError: a data position or a configuration that JSON does not have.
      OSError: it cannot be written.
    """
    try:
        rest = json.loads(json.dumps(_plain(manifest), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise JzeroError(
            f"step {manifest.step}: the data position or the configuration is not JSON ({error}); "
            f"give save(data=...) numbers, texts, lists and dicts with texts as keys"
        ) from None
    write_text(folder / NAME, _text({**rest, "checksum": _checksum(rest)}))


def read(folder: Path) -> Manifest:
    """A step folder's manifest.

    Raises:
      DamagedCheckpoint: it is missing, cut short or changed, or belongs to another step.
      JzeroError: a later jzero wrote it.
    """
    path = folder / NAME
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(folder, NAME, "is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(folder, NAME, f"cannot be read: {error.strerror}") from None
    try:
        whole = json.loads(text)
        rest = {key: value for key, value in whole.items() if key != "checksum"}
        sound = whole["checksum"] == _checksum(rest) and text == _text(whole)
    except (ValueError, KeyError, AttributeError, RecursionError):
        raise DamagedCheckpoint(folder, NAME, "is cut short or changed") from None
    if not sound:
        raise DamagedCheckpoint(folder, NAME, "was changed: its checksum is another")
    # Only now: a flipped bit in the version must not pass for a later one.
    if whole.get("format") != FORMAT:
        raise JzeroError(f"{path} is not of a {FORMAT}: its format is {whole.get('format')!r}")
    version = whole.get("version")
    if is_size(version) and version > VERSION:
        raise JzeroError(
            f"{path} has version {version} of the format, and this jzero reads up to {VERSION}: "
            f"update jzero"
        )
    try:
        manifest = _parse(rest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        problem = f"has a checksum that fits, but says what cannot be: {error}"
        raise DamagedCheckpoint(folder, NAME, problem) from None
    if step_of(folder) not in (None, manifest.step):
        raise DamagedCheckpoint(folder, NAME, f"belongs to step {manifest.step}")
    return manifest


def _plain(manifest: Manifest) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "facts": asdict(manifest.facts),
        "leaves": {name: asdict(leaf) for name, leaf in manifest.leaves.items()},
        "files": {path: asdict(file) for path, file in manifest.files.items()},
    }


# What of JSON each of the facts is.
_FACTS: dict[str, type | UnionType] = {
    **dict.fromkeys(("stage", "devices", "applied_steps"), int | None),
    **dict.fromkeys(("mesh", "config"), dict | None),
    **dict.fromkeys(("dynamic_loss_scale", "trainable_only"), bool),
    **{"data": list, "source": str, "versions": dict},
}


def _parse(data: Mapping[str, Any]) -> Manifest:
    """A manifest from JSON.

    Raises:
      KeyError, TypeError, ValueError, AttributeError: it says what no manifest does.
    """
    if not is_size(data["version"]) or not is_size(data["step"]):
        raise ValueError(f"version {data['version']!r}, step {data['step']!r}")
    files = {path: FileEntry(**x) for path, x in data["files"].items()}
    for path, file in files.items():
        if not is_size(file.bytes) or not is_size(file.crc):
            raise ValueError(f"{path} is {file}")
    leaves = {
        name: LeafEntry(tuple(x["shape"]), x["dtype"], tuple(x["chunk"]), x["bytes"])
        for name, x in data["leaves"].items()
    }
    room = sum(file.bytes for file in files.values())
    for name, leaf in leaves.items():
        if not _can_be(leaf, len(files), room):
            raise ValueError(f"{name} is {leaf}")
    facts = data["facts"]
    for name, x in facts.items():
        if not isinstance(x, _FACTS[name]):
            raise ValueError(f"{name} is {x!r:.200}")
    if not facts["data"]:
        raise ValueError("it has no process's position in the data")
    return Manifest(data["step"], leaves, files, Facts(**{**facts, "data": tuple(facts["data"])}))


def _can_be(leaf: LeafEntry, files: int, room: int) -> bool:
    """Whether there can be such a leaf, in this many files and bytes at most."""
    if not all(map(is_size, [*leaf.shape, *leaf.chunk, leaf.bytes])):
        return False
    dtype, shape = jnp.dtype(leaf.array_dtype), leaf.array_shape
    is_number = dtype == np.bool_ or jnp.issubdtype(dtype, np.number)
    if not is_number or dtype.name != leaf.array_dtype:
        return False
    if len(shape) > _MOST_DIMS or shape[: len(leaf.shape)] != leaf.shape:
        return False
    if len(leaf.chunk) != len(shape) or leaf.bytes != math.prod(shape) * dtype.itemsize:
        return False
    if not leaf.bytes:
        return leaf.chunk == shape
    fits = 0 not in leaf.chunk and math.prod(chunks_of(shape, leaf.chunk)) <= files
    return fits and leaf.bytes <= room


# These two stay the same in every version of the format, so that damage is told from age.


def _text(whole: Any) -> bytes:
    return json.dumps(whole, allow_nan=False).encode()


def _checksum(rest: Any) -> str:
    """SHA-256 of the manifest without its checksum."""
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from its sources
            continue
    return found
