"""A comparison that works, and where its factories are."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jzero.cli import main

Run = Callable[..., tuple[int, str, str]]
"""(arguments after `jzero compare`) -> (exit code, standard output, standard error)"""

FACTORIES = str(Path(__file__).with_name("factories.py"))


def compare(out: Path, factory: str, target: str, *more: str) -> dict[str, Any]:
    """The JSON of a comparison that works."""
    where = ["--model", f"{FACTORIES}:{factory}", "--target", target, "--json", str(out)]
    assert main(["compare", *where, *more]) == 0
    return json.loads(out.read_text())
