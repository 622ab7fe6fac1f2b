"""Reading arrays of a step folder, each file compared with the manifest first.

TensorStore alone takes a missing chunk for zeros, and does not know one chunk from another.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tensorstore as ts

from jzero.checkpoint.damage import DamagedCheckpoint
from jzero.checkpoint.files import FileEntry, chunk_entry, text_entry
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.zarr import METADATA, array_folder, chunk_files, open_array, stored_dtype


class Reader:
    """Reads the arrays of a step folder, any region of each; needs no device.

    Arguments:
      folder: the step folder.
      manifest: as `manifest.read(folder)` gives it.
    """

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder = Path(folder)
        self.manifest = manifest
        self._sound: set[str] = set()  # leaves whose metadata was checked

    def region(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """A region of a leaf, by default all of it, as a new array.

        Of a PRNG key, its key data (uint32).

        Raises:
          DamagedCheckpoint: a file that it needs is missing, cut short or changed.
        """
        entry = self.manifest.leaves[name]
        index = index or tuple(slice(0, n) for n in entry.array_shape)
        out = np.empty([i.stop - i.start for i in index], jnp.dtype(entry.array_dtype))
        self.start(name, index, out).result()
        return out

    def start(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> "Reading":
        """Begins to read a region into an array; the result of what it returns waits for it.

        Arguments:
          name: the leaf's.
          index: the region's bounds in each dim.
          out: an array of the region's shape and the leaf's dtype.

        Raises:
          DamagedCheckpoint: as `region`.
        """
        entry = self.manifest.leaves[name]
        if not out.size:
            return Reading(self.folder, None)
        self.check_files(name, index)
        source = open_array(self.folder, name, entry)[index]
        target = ts.array(out.view(stored_dtype(entry)))
        return Reading(self.folder, target.write(source))

    def check_files(self, name: str, index: tuple[slice, ...] | None = None) -> None:
        """Compares the files of a region with the manifest: presence, lengths, checksums.

        The data's own checksums are compared when they are read.

        Raises:
          DamagedCheckpoint: naming the file.
        """
        entry = self.manifest.leaves[name]
        index = index or tuple(slice(0, n) for n in entry.array_shape)
        if not entry.bytes:
            return
        if name not in self._sound:
            path = f"{array_folder(name)}/{METADATA}"
            self._compare(path, lambda: text_entry(self.folder / path))
            self._sound.add(name)
        start = tuple(i.start for i in index)
        for path in chunk_files(name, entry, start, tuple(i.stop - i.start for i in index)):
            self._compare(path, lambda path=path: chunk_entry(self.folder / path))

    def _compare(self, path: str, look: Callable[[], FileEntry]) -> None:
        want = self.manifest.files.get(path)
        if want is None:
            raise DamagedCheckpoint(self.folder, "manifest.json", f"does not list {path}")
        try:
            found = look()
        except FileNotFoundError:
            raise DamagedCheckpoint(self.folder, path, "is missing") from None
        except OSError as error:
            raise DamagedCheckpoint(self.folder, path, f"cannot be read: {error}") from None
        if found.bytes != want.bytes:
            problem = f"has {found.bytes} bytes, {want.bytes} were written"
            raise DamagedCheckpoint(self.folder, path, problem)
        if found.crc != want.crc:
            raise DamagedCheckpoint(self.folder, path, "is not what was written there")


@dataclass(frozen=True)
class Reading:
    """A read that is under way."""

    folder: Path
    future: Any

    def result(self) -> None:
        """Waits for it.

        Raises:
          DamagedCheckpoint: data that do not fit their checksum.
        """
        if self.future is None:
            return
        try:
            self.future.result()
        except (ValueError, OSError) as error:
            named = re.search(r'"([^"]*/(arrays/[^"]*))"', str(error))
            file = named[2] if named else "arrays"
            problem = f"cannot be read: {str(error).splitlines()[0]}"
            if "DATA_LOSS" in str(error):
                problem = "was changed: its data do not fit their checksum"
            raise DamagedCheckpoint(self.folder, file, problem) from None
