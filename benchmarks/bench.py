"""How fast a jzero step is, beside the same step written otherwise.

    python scripts/bench.py --stage 3 --devices 8
    python scripts/bench.py --model gpt2 --stage 2 --json bench.json

In one process, in turn, on the devices present (virtual ones on a CPU): jzero; the same ZeRO stage
written by hand for this one model; data parallel in plain JAX; Flax's recipe for FSDP. Same model,
weights, batch, precision, AdamW and clipping: their losses must agree, or nothing is measured.
Where torch and deepspeed are installed, DeepSpeed trains the same in processes of its own.
"""

import argparse
import os
import statistics
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from model import PRESETS

from benchmarks import beside, figures, handwritten, ours, usual
from benchmarks.command import ended
from benchmarks.job import Job
from benchmarks.lm import operations
from benchmarks.race import Runner, check, losses_of, quartiles, race
from jzero import hlo, targets, xla_options
from jzero.cli.parser import (
    Parser,
    add_json,
    check_file,
    output,
    whole_number,
    write_json,
)
from jzero.compare.here import peak
from jzero.errors import JzeroError


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser("bench.py", description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    add = parser.add_argument
    models = [name for name, config in PRESETS.items() if config.scan]
    add("--model", choices=models, help="a preset of examples/lm (tiny on a CPU, else gpt2)")
    add("--stage", type=int, choices=range(4), default=3, help="of ZeRO (3)")
    add("--precision", choices=("fp32", "bf16"), help="to compute in (fp32 on a CPU, else bf16)")
    add("--rows", type=whole_number, default=1, metavar="B", help="of the batch, a device (1)")
    add("--devices", type=whole_number, metavar="N", help="use the first N; virtual ones on a CPU")
    add("--steps", type=whole_number, default=5, metavar="N", help="in a round, each (5)")
    add("--rounds", type=whole_number, default=20, metavar="N", help="of all in turn (20)")
    add_json(parser)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 for bad usage, 1 for a failure while running, with one line each."""
    args = parse(arguments)
    return ended("bench.py", lambda: run(args))


def run(args: argparse.Namespace) -> int:
    """Measures, prints, and writes."""
    check_file("--json", args.json)
    with output(args.json) as console:
        found = bench(args)
        figures.show(found, console)
    write_json(args.json, found.as_dict())
    return 0


def devices(count: int | None) -> list[Any]:
    """The first `count` devices, or all; on a CPU as many are made.

    Raises:
      JzeroError: there are none, or fewer.
    """
    flags = targets.environment(targets.parse(f"cpu:{count or 1}"))["XLA_FLAGS"]
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = flags  # read when JAX looks for devices; accelerators ignore it
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise JzeroError(f"JAX finds no devices: {str(error).splitlines()[0]}") from error
    if count is not None and count > len(found):
        raise JzeroError(f"--devices {count}: there are {len(found)} ({found[0].platform})")
    return found[:count]


def bench(args: argparse.Namespace) -> figures.Figures:
    """Runs everything that the arguments ask for."""
    there = devices(args.devices)
    on_cpu = there[0].platform == "cpu"
    model = args.model or ("tiny" if on_cpu else "gpt2")
    precision = args.precision or ("fp32" if on_cpu else "bf16")
    mesh = Mesh(np.array(there), ("data",))
    job = Job(PRESETS[model], mesh, args.stage, precision, args.rows)

    zero, step, first = ours.contender(job)
    weights = jax.tree.map(np.asarray, zero.params(first.state))
    options = xla_options.compiler_options(zero.mesh.platform, zero.setup.prefetched)
    contenders = [
        first,
        handwritten.contender(job, weights, options),
        usual.data_parallel(job, weights),
        usual.flax_fsdp(job, weights),
    ]
    peaks = {each.name: hlo.memory(each.lower().compile()).peak_bytes for each in contenders}
    runners = [Runner(each, job.batch, on_cpu and len(there) > 1) for each in contenders]
    losses = losses_of(runners, precision)
    load = os.getloadavg()[0]
    runners[0].state, host = ours.host_seconds(step, runners[0].state, job.batch, 50)
    taken = race(runners, args.steps, args.rounds)

    best = figures.peak_flops(there[0].device_kind)
    work = operations(job.config, weights, len(there) * args.rows)

    def row(name: str, seconds: list[float], **more: Any) -> figures.Row:
        median = statistics.median(seconds)
        return figures.Row(
            name=name,
            seconds=tuple(seconds),
            tokens_per_second=job.tokens / median,
            flop_utilisation=best and work / median / len(there) / best,
            losses=tuple(losses[name]),
            **more,
        )

    wall = {name: [each.seconds for each in its] for name, its in taken.items()}
    cpu = {name: [each.cpu_seconds for each in its] for name, its in taken.items()}
    rows = [
        row(
            name,
            wall[name],
            ratio=figures.paired(wall[first.name], wall[name]),
            cpu_ratio=figures.paired(cpu[first.name], cpu[name]) if on_cpu else None,
            peak_bytes=peaks[name],
        )
        for name in taken
    ]
    notes = []
    if beside.is_installed():
        name = f"DeepSpeed, {beside.ranks_for(job)} processes"
        found = beside.train(job, weights, args.steps, args.rounds)
        losses[name] = found["losses"]
        check({first.name: losses[first.name], name: losses[name]}, precision)
        rows.append(
            row(name, found["seconds"], ratio=None, cpu_ratio=None, peak_bytes=found["peak_bytes"])
        )
        notes.append("DeepSpeed ran after the others, not in turn with them")
    else:
        notes.append("DeepSpeed: left out, since torch and deepspeed are not installed")
    return figures.Figures(
        model=model,
        stage=args.stage,
        precision=precision,
        parameters=sum(x.size for x in jax.tree.leaves(weights)),
        devices=len(there),
        device_kind=there[0].device_kind,
        platform=there[0].platform,
        rows_per_device=args.rows,
        tokens_per_step=job.tokens,
        steps=args.steps,
        rounds=args.rounds,
        versions={name: version(name) for name in ("jax", "flax", "optax")},
        load=load,
        host_seconds=quartiles(host),
        process_peak_bytes=peak(there),
        notes=tuple(notes),
        rows=tuple(rows),
    )
