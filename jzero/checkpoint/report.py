"""Checkpoints as tables for people, and as data."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from jzero.checkpoint.entries import PARTS
from jzero.checkpoint.manifest import VERSION, Manifest
from jzero.checkpoint.steps import StepStatus
from jzero.console import say
from jzero.units import size


def show_steps(steps: Iterable[StepStatus], unfinished: Iterable[Path], console: Console) -> None:
    """Prints a line for every step, and the folders of saves that are not finished."""
    table = Table(box=None, pad_edge=False)
    for name in ("step", "state", ""):
        table.add_column(name, justify="right" if name == "step" else "left", overflow="fold")
    for step in steps:
        table.add_row(
            str(step.step), step.state, Text("" if step.problem is None else str(step.problem))
        )
    console.print(table)
    say(console, "complete: at a glance; jzero checkpoint verify reads the data too")
    for folder in unfinished:
        replaced = folder.name.startswith(".replaced-")
        what = "is being replaced, or was when its run ended" if replaced else "not finished"
        say(console, f"{folder.name}: {what}")


def show(manifest: Manifest, console: Console) -> None:
    """Prints all that a step's manifest says."""
    facts = manifest.facts
    lines = {
        "step": f"{manifest.step:,}",
        "source": facts.source,
        "stage": facts.stage,
        "devices": facts.devices,
        "mesh": facts.mesh and " x ".join(f"{axis}={n}" for axis, n in facts.mesh.items()),
        "applied steps": facts.applied_steps,
        "data position": _position(facts.data),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.versions.items()),
        "parameters": "those that are trained alone" if facts.trainable_only else None,
    }
    for name, value in lines.items():
        if value is not None:
            say(console, f"{name}: {value}")
    console.print(_leaves(manifest))
    if facts.config is not None:
        say(console, f"config: {json.dumps(facts.config)}")


def _leaves(manifest: Manifest) -> Table:
    table = Table(title=Text(f"{len(manifest.leaves):,} arrays"), title_justify="left")
    table.add_column("array", overflow="fold")
    table.add_column("shape")
    table.add_column("dtype")
    table.add_column("bytes", justify="right")
    for name, leaf in manifest.leaves.items():
        table.add_row(Text(name), Text(str(list(leaf.shape))), leaf.dtype, f"{leaf.bytes:,}")
    table.add_section()
    for part, total in totals(manifest).items():
        table.add_row(Text(part), f"{total['leaves']:,} arrays", "", f"{total['bytes']:,}")
    table.add_row(
        "all", f"{len(manifest.leaves):,} arrays", size(manifest.bytes), f"{manifest.bytes:,}"
    )
    return table


def totals(manifest: Manifest) -> dict[str, dict[str, int]]:
    """Part -> number of leaves, and their bytes."""
    found = {}
    for part in PARTS:
        leaves = [x for name, x in manifest.leaves.items() if name.startswith(f"{part}/")]
        if leaves:
            found[part] = {"leaves": len(leaves), "bytes": sum(leaf.bytes for leaf in leaves)}
    return found


def as_dict(
    directory: Path, steps: Iterable[StepStatus], unfinished: Iterable[Path], manifest: Manifest
) -> dict[str, Any]:
    """The same as data for JSON."""
    facts = manifest.facts
    return {
        "directory": str(directory),
        "steps": [
            {
                "step": step.step,
                "state": step.state,
                "problem": None if step.problem is None else str(step.problem),
            }
            for step in steps
        ],
        "unfinished": [folder.name for folder in unfinished],
        "step": manifest.step,
        "format": VERSION,
        "source": facts.source,
        "stage": facts.stage,
        "devices": facts.devices,
        "mesh": facts.mesh,
        "versions": facts.versions,
        "config": facts.config,
        "applied_steps": facts.applied_steps,
        "trainable_only": facts.trainable_only,
        "data": list(facts.data),
        "parts": totals(manifest),
        "leaves": {
            name: {"shape": list(x.shape), "dtype": x.dtype, "bytes": x.bytes}
            for name, x in manifest.leaves.items()
        },
    }


def _position(data: tuple[Any, ...]) -> str | None:
    if data == (None,):
        return None
    return json.dumps(data[0]) if len(data) == 1 else f"of each process: {json.dumps(list(data))}"
