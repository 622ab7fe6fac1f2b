"""The peak memory of compiled steps of several shapes, against a sum that no compiler is asked for.

    python scripts/bench_memory.py                               # h100:8: every shape and stage
    python scripts/bench_memory.py --shapes deep,experts --stages 3 --target b200:64

Each step is compiled as `jzero compare` does it; nothing runs. Of the sum, state and gradients come
from the specs, the rest from shapes and from an abstract trace of the loss on one device's rows.
Exit code 0 if every peak is at most 1.05 of its sum; 1 if not.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from benchmarks import shapes
from benchmarks.bound import Bound, bounds
from benchmarks.command import ended
from benchmarks.shapes import SHAPES
from jzero import targets
from jzero.cli.compare import stages
from jzero.cli.parser import Parser, add_json, check_file, output, write_json
from jzero.cli.progress import Progress
from jzero.compare.request import Request
from jzero.compare.runner import compare
from jzero.console import say
from jzero.errors import RunFailed
from jzero.hlo.large import Large
from jzero.partition import STAGES
from jzero.units import size

LIMIT = 1.05
"""A peak is at most so much of the sum of the terms."""


_HEADS = ("state", "grads", "acts", "logits", "layers", "inside", "leaf")
_CAPTION = (
    f"sum: of the terms to the right; ratio: peak over sum, which holds up to {LIMIT}. acts: saved "
    "activations; logits: in fp32, with their gradient; layers: two, gathered; inside: one layer's "
    "intermediates; leaf: the largest gathered one with its full gradient."
)


@dataclass(frozen=True)
class Row:
    """A shape at a stage; `largest` are the heap's largest buffers at the peak, where known."""

    shape: str
    stage: int
    peak_bytes: int
    bound: Bound
    largest: tuple[Large, ...]

    @property
    def ratio(self) -> float:
        return self.peak_bytes / self.bound.total

    @property
    def holds(self) -> bool:
        return self.ratio <= LIMIT

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON."""
        own = {"bound_bytes": self.bound.total, "ratio": self.ratio, "holds": self.holds}
        return {**asdict(self), **own}


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 1 where a bound is broken or something fails, 2 for bad usage; one line each."""
    args = parse(arguments)
    return ended("bench_memory.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Compiles, prints, and writes."""
    check_file("--json", args.json)
    target = targets.parse(args.target)
    with output(args.json) as console:
        rows = [row for name in args.shapes for row in measure(name, args.stages, target)]
        show(rows, target, console)
    data = {"target": target.name, "jax": jax.__version__, "limit": LIMIT}
    write_json(args.json, {**data, "rows": [row.as_dict() for row in rows]})
    return 0 if all(row.holds for row in rows) else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    summary = "Peak memory of compiled steps against a bound, for several shapes."
    parser = Parser("bench_memory.py", description=summary, allow_abbrev=False)
    add = parser.add_argument
    add("--shapes", type=names, default=tuple(SHAPES), metavar="NAME,...", help=", ".join(SHAPES))
    add("--stages", type=stages, default=tuple(STAGES), metavar="S,S", help="stages (0,1,2,3)")
    add("--target", default="h100:8", metavar="T", help="devices to compile for (h100:8)")
    add_json(parser)
    return parser.parse_args(arguments)


def names(text: str) -> tuple[str, ...]:
    """Names of shapes with commas between them."""
    found = tuple(name.strip() for name in text.split(","))
    if not set(found) <= SHAPES.keys() or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: names from {','.join(SHAPES)}, each once"
        )
    return found


def measure(name: str, at: Sequence[int], target: targets.Target) -> list[Row]:
    """Compiles a shape's steps, each in its own process.

    Raises:
      RunFailed: a step does not compile.
    """
    request = Request(f"{shapes.__file__}:{name}", target.name, at[0])
    with Progress(len(at), f"compiling {name},") as progress:
        found = compare(request, at, progress.done, progress.begin)
    expected = bounds(SHAPES[name], target.count)
    rows = []
    for row in found.rows:
        if row.peak_bytes is None:
            raise RunFailed(f"{name}, stage {row.stage}: {row.error}")
        bound = expected[row.stage]
        rows.append(Row(name, row.stage, row.peak_bytes, bound, row.largest or ()))
    return rows


def show(rows: Sequence[Row], target: targets.Target, console: Console) -> None:
    """Prints the figures; of a step that takes too much also its largest buffers."""
    title = f"GB of one device of {target.name}, JAX {jax.__version__}"
    table = Table(title=title, caption=_CAPTION, title_justify="left", caption_justify="left")
    table.add_column("shape", no_wrap=True)
    for column in ("stage", "peak", "sum", "ratio", "holds", *_HEADS):
        table.add_column(column, justify="right", no_wrap=True)
    for number, row in enumerate(rows):
        again = number and rows[number - 1].shape == row.shape
        counts = (row.peak_bytes, row.bound.total, *asdict(row.bound).values())
        peak, total, *each = (f"{count / 1e9:,.2f}" for count in counts)
        name, holds = "" if again else row.shape, "yes" if row.holds else "NO"
        table.add_row(name, str(row.stage), peak, total, f"{row.ratio:.3f}", holds, *each)
    console.print(table)
    for row in rows:
        for large in () if row.holds else row.largest[:5]:
            said = f"{row.shape}, stage {row.stage}: {size(large.bytes)} {large.shape or ''}"
            say(console, f"{said} {large.opcode} {large.source}")
