"""What only a device can tell: the real peak of a big model's step, and jzero's overhead.

    python scripts/gpu_check.py                  # one GPU or TPU, under 8 minutes
    python scripts/gpu_check.py --preset tiny    # anywhere: whether the script itself works

Trains a language model that fills most of what JAX takes of the device's memory for a few steps:
the compiler's predicted peak must be within 3 % of the measured one, and that at least half of the
memory. Then `scripts/bench.py` on one device: a jzero step must take at most 2 % more than the one
written by hand, and less than 1 ms of host time beyond its compiled function. Each part runs in a
process of its own, since a device tells the peak of a whole process. Exit code 0 if all of it
holds; 1 if not. With `--preset tiny` nothing is judged.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.command import ended
from jzero.cli.parser import Parser, add_json, check_file, output, write_json
from jzero.console import say
from jzero.errors import JzeroError, RunFailed
from jzero.units import size

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "lm"
COMPARE_LIMIT, BENCH_LIMIT = 180, 280
"""Seconds for each part."""

FILL = 0.6
"""Of the device's memory: JAX takes 75 %."""

# A layer of Llama 7B, and the embeddings at both ends.
LAYER, ENDS = 202_383_360, 2 * 32_000 * 4096
BYTES = 14
"""A parameter's on one device in bf16 training: master, two moments, gradient."""

DEVICE = (
    "import json, sys; from jzero.compare.here import present; target, _ = present('here:1'); "
    "json.dump([target.description, target.kind, target.memory_bytes], sys.stdout)"
)
FACTORY = """
from model import LMConfig, workload

def filling():
    sizes = dict(width=4096, heads=32, kv_heads=32, mlp=11008)
    return workload(LMConfig(32000, 1024, layers={layers}, **sizes))
"""


@dataclass(frozen=True)
class Check:
    """One figure; `value` is None where the device does not tell.

    Attributes:
      name: what it is, in words.
      value: measured.
      least, most: what it must be; None for no bound.
    """

    name: str
    value: float | None
    least: float | None = None
    most: float | None = None

    @property
    def holds(self) -> bool | None:
        if self.value is None:
            return None
        return (self.least is None or self.value >= self.least) and (
            self.most is None or self.value <= self.most
        )

    @property
    def line(self) -> str:
        bound = f"at least {self.least}" if self.most is None else f"at most {self.most}"
        if self.value is None:
            return f"{self.name}: unknown here ({bound} where it is known)"
        return f"{self.name}: {self.value:.4f} ({bound}): {'holds' if self.holds else 'FAILS'}"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser("gpu_check.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    presets = ("fill", "tiny")
    parser.add_argument("--preset", choices=presets, default="fill", help="fill, tiny (fill)")
    add_json(parser)
    args = parser.parse_args(arguments)
    return ended("gpu_check.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Checks, prints, and writes."""
    check_file("--json", args.json)
    with output(args.json) as console:
        found = check(args)
        for line in found["said"]:
            say(console, line)
    write_json(args.json, found)
    return 1 if found["failed"] else 0


def check(args: argparse.Namespace) -> dict[str, Any]:
    """Runs both parts.

    Raises:
      JzeroError: a device that the preset cannot fill.
      RunFailed: a part that fails, or takes too long.
    """
    device, kind, memory = json.loads(start("-c", DEVICE, limit=60))
    tiny = args.preset == "tiny"
    with tempfile.TemporaryDirectory(prefix="jzero-gpu-check-") as folder:
        factory, bench = f"{EXAMPLE / 'model.py'}:tiny", ("--model", "tiny", "--steps", "1")
        rounds = "5"
        if not tiny:
            factory = filling(Path(folder), device, memory)
            bench, rounds = ("--model", "gpt2", "--rows", "8", "--steps", "10"), "20"
        compared = part(
            Path(folder) / "compare.json",
            ("-m", "jzero", "compare", "--model", factory, "--target", "here:1", "--stages", "3"),
            COMPARE_LIMIT,
        )
        raced = part(
            Path(folder) / "bench.json",
            (ROOT / "scripts" / "bench.py", "--devices", "1", *bench, "--rounds", rounds),
            BENCH_LIMIT,
        )
    checks = judge(compared["rows"][0], raced)
    row = compared["rows"][0]
    said = [
        f"{device} ({kind}), {'memory unknown' if memory is None else size(memory)}; JAX "
        f"{compared['jax']}; {compared['parameters']:,} parameters at stage 3 in bf16: predicted "
        f"peak {size(row['peak_bytes'])}, {1e3 * row['seconds_per_step']:.1f} ms a step",
        *(each.line for each in checks),
    ]
    if tiny:
        said.append("--preset tiny: so few steps of so small a model are not judged")
    return {
        "device": device,
        "said": said,
        "failed": not tiny and any(each.holds is not True for each in checks),
        "checks": [{**asdict(each), "holds": each.holds} for each in checks],
        "compare": compared,
        "bench": raced,
    }


def judge(row: dict[str, Any], raced: dict[str, Any]) -> list[Check]:
    """The figures against their bounds.

    Arguments:
      row: of `jzero compare --json`.
      raced: of `scripts/bench.py --json`.
    """
    predicted, measured, there = (
        row[name] for name in ("peak_bytes", "measured_peak_bytes", "capacity_bytes")
    )
    by_hand = next(each for each in raced["rows"] if each["name"] == "by hand")
    return [
        Check(
            "difference of predicted and measured peak, of the latter",
            None if measured is None else abs(predicted - measured) / measured,
            most=0.03,
        ),
        Check(
            "measured peak, of the device's memory",
            None if measured is None or there is None else measured / there,
            least=0.5,
        ),
        Check("jzero's time over the hand-written step's", by_hand["ratio"][1], most=1.02),
        Check("jzero's host time, ms a step", 1e3 * raced["host_seconds"][1], most=1.0),
    ]


def filling(folder: Path, device: str, memory: int | None) -> str:
    """A factory of a model that fills the device, in a file of its own.

    Raises:
      JzeroError: the device does not tell its memory, or has too little.
    """
    if memory is None:
        raise JzeroError(f"{device} does not tell its memory; try --preset tiny")
    layers = int((FILL * memory / BYTES - ENDS) / LAYER)
    if layers < 2:
        raise JzeroError(f"{device} has {size(memory)}, too little for --preset fill")
    path = folder / "filling.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLE)!r})\n{FACTORY}".replace(
            "{layers}", str(layers)
        )
    )
    return f"{path}:filling"


def part(out: Path, command: tuple[str | Path, ...], limit: int) -> dict[str, Any]:
    """The JSON that a command writes."""
    start(*command, "--json", out, limit=limit)
    return json.loads(out.read_text())


def start(*command: str | Path, limit: int) -> str:
    """Runs Python in a process of its own; its standard output.

    Raises:
      RunFailed: it takes too long, or fails; with its last line.
    """
    try:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, timeout=limit, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        raise RunFailed(f"{command[0]} {command[1]} took more than {limit} s") from error
    if done.returncode:
        last = done.stderr.strip().splitlines() or ["nothing said"]
        raise RunFailed(f"{command[0]} {command[1]}: {last[-1]}")
    return done.stdout
