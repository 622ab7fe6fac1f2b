"""Files that are on the disk for good, and what is known of them by a glance."""

import os
import zlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class FileEntry:
    """One file of a step folder.

    Attributes:
      bytes: its length.
      crc: of a chunk the CRC-32C of its data, its last four bytes; of other files `zlib.crc32`.
    """

    bytes: int
    crc: int


def write_text(path: Path, text: bytes) -> FileEntry:
    """Writes a new file and waits until it is on the disk; its folder must be there."""
    with open(path, "wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(len(text), zlib.crc32(text))


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def text_entry(path: Path) -> FileEntry:
    """A file as it is now."""
    text = path.read_bytes()
    return FileEntry(len(text), zlib.crc32(text))


def chunk_entry(path: Path) -> FileEntry:
    """A chunk's file as it is now; its data are not read."""
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 4, 0))
        return FileEntry(size, int.from_bytes(file.read(4), "little"))
