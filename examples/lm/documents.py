"""Documents: read from files, or the Python standard library's own source; some held out.

Whole documents are held out, so no window of them is ever trained on.
"""

import glob
import json
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from jzero.errors import JzeroError

HELD_OUT = 0.02  # of the corpus's text
LONGEST = 50  # no document is longer than 1/50 of the corpus: longer ones are cut at a line break
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".jsonl")  # what is read from a folder


def read_documents(paths: Sequence[str | Path] = ()) -> list[str]:
    """The texts of all documents, without repetitions, in a fixed order.

    Arguments:
        paths: files (`.jsonl`: one object with a "text" field a line; anything else: text), folders
            (searched for `TEXT_SUFFIXES`), or globs; none for the Python standard library.

    Raises:
        JzeroError: for a path that is not there, or a file without readable text.
    """
    if not paths:
        texts = standard_library()
    else:
        texts = [text for path in expand(paths) for text in read_file(path)]
    return list(dict.fromkeys(text for text in texts if text.strip()))


def standard_library() -> list[str]:
    """The source files of the running Python's library, without what is installed beside it."""
    root = Path(sysconfig.get_path("stdlib"))
    # Tests, and the tables of character encodings, are hardly text.
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
    texts = []
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            try:
                texts.append(path.read_bytes().decode())
            except (OSError, UnicodeDecodeError):
                continue  # a handful of files are in another encoding on purpose
    if not texts:
        raise JzeroError(f"no source of the Python standard library under {root}: give --data")
    return texts


def expand(paths: Sequence[str | Path]) -> list[Path]:
    """Files named by `paths`: themselves, those in a folder, or those that a glob matches."""
    files: list[Path] = []
    for name in map(str, paths):
        path = Path(name).expanduser()
        if path.is_dir():
            found = sorted(f for f in path.rglob("*") if f.suffix in TEXT_SUFFIXES and f.is_file())
            if not found:
                raise JzeroError(f"{name}: the folder holds no {', '.join(TEXT_SUFFIXES)} file")
        elif path.exists():
            found = [path]
        elif glob.has_magic(name):
            matches = sorted(glob.glob(str(path), recursive=True))
            found = [match for match in map(Path, matches) if match.is_file()]
            if not found:
                raise JzeroError(f"{name}: the pattern matches no file")
        else:
            raise JzeroError(f"{name}: no such file or folder")
        files += found
    return list(dict.fromkeys(files))


def read_file(path: Path) -> list[str]:
    """The documents in one file: its text, or the "text" of each line of a `.jsonl`."""
    try:
        whole = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise JzeroError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise JzeroError(
            f"{path}: not UTF-8 at byte {error.start}: convert it first (iconv -t utf-8)"
        ) from error
    if not whole.strip():
        raise JzeroError(f"{path}: the file is empty")
    if path.suffix != ".jsonl":
        return [whole]
    return [
        read_line(f"{path}:{number}", line)
        for number, line in enumerate(whole.split("\n"), start=1)
        if line.strip()
    ]


def read_line(place: str, line: str) -> str:
    """The "text" of one line of JSONL."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise JzeroError(f"{place}: not JSON: {error.msg} at column {error.colno}") from error
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str):
        found = ", ".join(map(str, record)) if isinstance(record, dict) else type(record).__name__
        raise JzeroError(f'{place}: no "text" field that is a string (found: {found or "nothing"})')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JzeroError(f"{place}: the text holds half a surrogate pair") from error
    return text


def split_documents(documents: Sequence[str]) -> tuple[list[str], list[str]]:
    """Documents to train on, and documents held out (about `HELD_OUT` of the text).

    The choice depends on the documents alone, so that runs with different seeds compare.
    """
    limit = max(sum(map(len, documents)) // LONGEST, 1024)
    # Cutting may make equal pieces; equal pieces must not stand on both sides of the split.
    pieces = list(dict.fromkeys(piece for text in documents for piece in cut(text, limit)))
    wanted = HELD_OUT * sum(map(len, pieces))
    if len(pieces) < 2:
        raise JzeroError("the corpus is too small for a held-out part: give --data more text")
    order = [int(index) for index in np.random.default_rng(0).permutation(len(pieces))]
    order.sort(key=lambda index: len(pieces[index]) > wanted / 10)  # rather many than few
    held_out: set[int] = set()
    size = 0
    for index in order:
        if size >= wanted:
            break
        held_out.add(index)
        size += len(pieces[index])
    return (
        [piece for index, piece in enumerate(pieces) if index not in held_out],
        [piece for index, piece in enumerate(pieces) if index in held_out],
    )


def cut(text: str, limit: int) -> Iterator[str]:
    """Pieces of at most `limit` characters that join to `text`, each ending a line if it can."""
    start = 0
    while len(text) - start > limit:
        end = text.rfind("\n", start + limit // 2, start + limit) + 1 or start + limit
        yield text[start:end]
        start = end
    yield text[start:]
