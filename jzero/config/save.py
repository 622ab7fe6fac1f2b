"""Writing a JSON file so that whoever reads it finds all of it or none."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jzero.errors import JzeroError


def write_json(path: str | os.PathLike[str], data: dict[str, Any]) -> None:
    """Write data to a new file beside `path`, then move that in its place.

    Raises: `JzeroError` naming the path, if a folder or the file cannot be written.
    """
    target = Path(path)
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A folder of its own: processes may write the same path, and the file gets usual rights.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            draft = Path(folder) / target.name
            draft.write_text(text, encoding="utf-8")
            os.replace(draft, target)
    except OSError as error:
        raise JzeroError(f"{target}: cannot be written: {error.strerror or error}") from None
