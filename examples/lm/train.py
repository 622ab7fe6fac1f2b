"""Train a language model at the ZeRO stage that a DeepSpeed-style configuration names.

    python examples/lm/train.py --config examples/lm/stage3.json --devices 8

Read it from top to bottom: the command line, and the run. All that knows of ZeRO is in `train`:
`Zero`, `init`, `train_step`, `batches`, `checkpointer`. What comes before a run is in `launch.py`,
what is said of it in `results.py`, with `eval_step`.

Checkpoints go to DIR/checkpoints. SIGTERM saves the step that is running and ends the run with exit
code 143; the same command with --resume goes on from there, as it does after a crash.

In several processes: start the same command in each, under `srun` or `mpirun`, or with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set. Files and progress come from
process 0.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
from data import prepare, train_batches
from grain import DatasetIterator
from launch import check_out, join_processes, make_mesh, read_config
from model import LM, PRESETS, loss_fn
from record import Record, write_json
from results import describe, report
from resume import LAST, identity, resume
from rich.console import Console
from rich.text import Text

import jzero
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.cli.parser import Parser, whole_number
from jzero.errors import JzeroError, RunFailed
from jzero.watch import ScaleError

STOPPED = 143  # exit code of a run that SIGTERM ended early: what a shell gives for that signal


# --- the command line ----------------------------------------------------------------------------


class Failure(Exception):
    """Something that went wrong in a run whose input was right."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = Parser("train.py", description="Train a language model.", allow_abbrev=False)
    add = parser.add_argument
    add("--config", required=True, metavar="FILE.json", help="a DeepSpeed-style configuration")
    add("--steps", type=whole_number, default=600, metavar="N", help="optimizer steps (600)")
    add(
        "--data",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files, folders or globs of text or JSONL; the Python standard library by default",
    )
    add("--model", choices=list(PRESETS), default="tiny", metavar="PRESET", help=", ".join(PRESETS))
    add("--out", type=Path, metavar="DIR", help="a new folder for results (runs/lm-DATE-TIME)")
    add(
        "--resume",
        type=whole_number,
        nargs="?",
        const=LAST,
        metavar="STEP",
        help="go on in DIR from its last checkpoint, or from that of STEP",
    )
    add("--save-every", type=whole_number, default=50, metavar="K", help="steps (50)")
    add("--devices", type=whole_number, metavar="N", help="use the first N; virtual ones on a CPU")
    args = parser.parse_args(arguments)
    if args.out is None and args.resume is not None:
        parser.error("argument --resume: say which run with --out DIR")
    if args.out is None:
        args.out = Path("runs") / time.strftime("lm-%Y%m%d-%H%M%S")
    return args


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0; 2 for bad usage or input, 1 for a failure while running, with one line each.

    143 where SIGTERM or a preemption notice ended the run, with its last step saved.
    """
    args = parse(arguments)
    try:
        return train(args)
    except KeyboardInterrupt:
        kept = (args.out / "checkpoints").is_dir()
        return failed(f"interrupted{': go on with --resume' if kept else ''}", 130)
    except (Failure, RunFailed, ScaleError, OSError) as error:
        return failed(error, 1)
    except jax.errors.JaxRuntimeError as error:  # such as no memory; the rest is XLA's own account
        return failed(str(error).partition("\n")[0], 1)
    except JzeroError as error:
        return failed(error, 2)


def failed(error: object, code: int) -> int:
    print(f"train.py: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


# --- the run -------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> int:
    config = read_config(args.config, args.steps)
    # In every process, before process 0 can have written to it.
    check_out(args.out, resumed=args.resume is not None)
    join_processes()
    zero = jzero.Zero(config, mesh=make_mesh(args.devices))
    first, batch = jax.process_index() == 0, zero.batch
    if batch.train is None:
        raise JzeroError(f"{args.config}: train_micro_batch_size_per_gpu: missing; give a number")
    out = Console(quiet=not first, width=None if sys.stdout.isatty() else 120, highlight=False)
    out.print(Text("Configuration:"))
    for key, value in config.resolved().items():
        out.print(Text(f"  {key}: {json.dumps(value)}"), soft_wrap=True)

    size = PRESETS[args.model]
    corpus = prepare(args.data, size.vocabulary)
    processes = (jax.process_index(), jax.process_count())
    source = train_batches(corpus, size.context, batch.train, 0, *processes)
    rows = zero.batches(source)
    run = identity(args.model, corpus, batch.train)
    with zero.checkpointer(args.out / "checkpoints", every=args.save_every) as checkpoints:
        state, done = begin(args, zero, checkpoints, source, run, out)
        describe(args.model, zero, corpus, out)
        monitor = zero.monitor(args.out)
        step = zero.train_step(loss_fn, monitor=monitor)
        if first:
            write_json(args.out / "config.json", config.resolved())
            (args.out / "summary.json").unlink(missing_ok=True)  # it told of fewer steps
        began = time.perf_counter()
        with Record(args.out, args.steps, done, batch.train, size.context, first) as record:
            for number in range(done + 1, args.steps + 1):
                state, metrics = step(state, next(rows))
                if number == done + 1:
                    record.compiled(time.perf_counter() - began)
                record.add(metrics)
                position = {"run": run, "batches": source.get_state()}
                checkpoints.save(state, position, before=record.sync)
                if checkpoints.stopping:
                    break
            step.finish()
        monitor.close()
    seconds = time.perf_counter() - began
    if checkpoints.stopping:
        if first:
            text = f"stopped after step {record.number} of {args.steps}, which is saved"
            print(f"train.py: {text}: go on with --resume", file=sys.stderr)
        return STOPPED
    summary = report(args, zero, state, record, corpus, seconds, out)
    if first:
        write_json(args.out / "summary.json", summary)
    out.print(Text(f"Results: {args.out}"), soft_wrap=True)
    for row in summary["stages"]:
        found = row["measured"]
        if found is not None and any(row[kind] != count for kind, count in found.items()):
            raise Failure(f"stage {row['stage']}: the shards hold {found}, the specs say {row}")
    return 0


def begin(
    args: argparse.Namespace,
    zero: jzero.Zero,
    checkpoints: Checkpointer,
    source: DatasetIterator,
    run: dict[str, Any],
    out: Console,
) -> tuple[jzero.State, int]:
    """A new state or a checkpoint's, and the steps that are done; `source` is put at its place."""

    def init(rngs):
        return LM(PRESETS[args.model], rngs=rngs)

    zero.setup_for(init, seed=0)
    restored = None
    if args.resume is not None:

        def say(line: str) -> None:
            out.print(Text(line), soft_wrap=True)

        restored = resume(checkpoints, args.resume, run, zero.config, args.steps, say)
    if restored is None:
        return zero.init(init, seed=0), 0
    source.set_state(restored.data["batches"])
    return restored.state, restored.step


if __name__ == "__main__":
    sys.exit(main())
