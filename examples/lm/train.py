"""Train a language model at the ZeRO stage that a DeepSpeed-style configuration names.

    python examples/lm/train.py --config examples/lm/stage3.json --devices 8

Read it from top to bottom: the command line, the devices, the run, and what is said of it. All that
knows of ZeRO is in `train`: `Zero`, `init`, `train_step`, `eval_step`, `batches`, `checkpointer`.

Checkpoints go to DIR/checkpoints. SIGTERM saves the step that is running and ends the run with exit
code 143; the same command with --resume goes on from there, as it does after a crash.

In several processes: start the same command in each, under `srun` or `mpirun`, or with
JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID set. Files and progress come from
process 0.
"""

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from data import Corpus, held_out_batches, prepare, train_batches
from grain import DatasetIterator
from jax.sharding import Mesh
from model import LM, PRESETS, LMConfig, loss_fn
from record import Record, finite, hbm_table, write_json
from resume import LAST, identity, resume
from rich.console import Console
from rich.text import Text
from sample import generate

import jzero
from jzero import config as configs
from jzero.birth import born
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.config.source import read
from jzero.errors import JzeroError, RunFailed
from jzero.explain import stage_table
from jzero.measure import real_bytes
from jzero.watch import ScaleError

STOPPED = 143  # exit code of a run that SIGTERM ended early: what a shell gives for that signal
STOPPED = 143  # exit code of a run that SIGTERM ended early: what a shell gives for that signal
SAMPLE_TOKENS = 96
SMALL_STATE = (
    64 << 20
)  # bytes per device up to which the other stages' states are made and measured


# --- the command line ----------------------------------------------------------------------------


class Failure(Exception):
    """Something that went wrong in a run whose input was right."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str):
        self.exit(2, f"{self.prog}: error: {message} (--help shows the usage)\n")


def whole_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number of at least 1")
    return int(text)


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
        return failed("interrupted", 130)
    except (Failure, RunFailed, ScaleError, OSError) as error:
        return failed(error, 1)
    except jax.errors.JaxRuntimeError as error:  # such as no memory; the rest is XLA's own account
        return failed(str(error).partition("\n")[0], 1)
    except JzeroError as error:
        return failed(error, 2)


def failed(error: object, code: int) -> int:
    print(f"train.py: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


# --- the configuration and the devices -----------------------------------------------------------


def read_config(path: str, steps: int) -> configs.Config:
    """The configuration in a file; a schedule whose length is "auto" ends with the run."""
    given = read(path)
    scheduler = given.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    length = params.get("total_num_steps") if isinstance(params, dict) else None
    config = configs.load(given, total_num_steps=steps if length == "auto" else None)
    if config.optimizer is None:
        raise JzeroError('optimizer: missing; add one, such as {"type": "AdamW"}')
    return config


def check_out(folder: Path, resumed: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise JzeroError(f"--out {folder}: is a file; give a folder")
    if folder.exists() and any(folder.iterdir()) and not resumed:
        raise JzeroError(
            f"--out {folder}: is not empty; give a new folder, or go on in this one with --resume"
        )


def join_processes() -> None:
    """Makes this process one of several, where the environment says so."""
    env = os.environ
    given = "JAX_COORDINATOR_ADDRESS" in env
    counts = (env.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if not given and all(count == "1" for count in counts):
        return

    def number(name: str) -> int | None:
        return int(env[name]) if given and name in env else None

    try:
        jax.distributed.initialize(
            num_processes=number("JAX_NUM_PROCESSES"), process_id=number("JAX_PROCESS_ID")
        )
    except (RuntimeError, ValueError) as error:
        raise JzeroError(f"this process cannot join the others: {error}") from error


def make_mesh(count: int | None) -> Mesh | None:
    """One axis `data` over the first `count` devices; None, for all of them."""
    # Without accelerators JAX makes as many CPU devices as it is told before it looks for any. They
    # take turns on few cores, so one may wait long for the others: do not take that for a hang.
    flags = os.environ.get("XLA_FLAGS", "")
    for name, seconds in (("warn_stuck", 120), ("terminate", 600)):
        flag = f"--xla_cpu_collective_call_{name}_timeout_seconds"
        if flag not in flags:
            flags = f"{flags} {flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if count is not None and "xla_force_host_platform_device_count" not in flags:
        if "JAX_NUM_CPU_DEVICES" not in os.environ and "JAX_COORDINATOR_ADDRESS" not in os.environ:
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise JzeroError(f"JAX finds no devices: {error}") from error
    if count is None:
        return None
    if count > len(devices):
        raise JzeroError(f"--devices {count}: there are {len(devices)} ({devices[0].platform})")
    if count < len(devices) and jax.process_count() > 1:
        raise JzeroError(f"--devices {count}: several processes use all their {len(devices)}")
    return Mesh(np.array(devices[:count]), ("data",))


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


def describe(name: str, zero: jzero.Zero, corpus: Corpus, out: Console) -> None:
    """What is about to be trained, and what each device keeps."""
    explanation, batch = zero.explain(), zero.batch
    out.print(
        f"\n{name}: {count_parameters(zero):,} parameters, stage {zero.config.stage}, "
        f"{zero.mesh.data_size} devices, {zero.config.compute_dtype}, {batch.train} rows of "
        f"{PRESETS[name].context} tokens a step in {batch.accumulation} micro-batches"
    )
    kept = ", ".join(f"{kind} {count:,}" for kind, count in explanation.bytes_per_device.items())
    out.print(f"Bytes on each device: {kept}; {explanation.sharded_share:.2%} of all are sharded")
    out.print(
        f"Corpus: {len(corpus.train):,} tokens to train on, {len(corpus.held_out):,} held out\n"
    )


def report(
    args: argparse.Namespace,
    zero: jzero.Zero,
    state: jzero.State,
    record: Record,
    corpus: Corpus,
    seconds: float,
    out: Console,
) -> dict[str, Any]:
    """Evaluates what was trained, prints it, and gives what `summary.json` holds."""
    size, stage = PRESETS[args.model], zero.config.stage
    nats = validate(zero, state, corpus, size)
    reached, unigram = corpus.bits_per_byte(nats), corpus.unigram_bits_per_byte()
    table, measured = stage_table(zero.setup, zero.batch.accumulation), measure_stages(zero, state)
    skipped = int(state.skipped)
    out.print(f"\n{args.steps} steps in {seconds:.0f} s, {skipped} of them skipped")
    out.print(f"Held-out loss {nats:.4f} nats per token = {reached:.4f} bits per byte of text")
    below = 1 - reached / unigram
    out.print(f"Unigram entropy {unigram:.4f} bits per byte; the model is {below:.1%} below it\n")
    out.print(hbm_table(table, measured, stage))
    text = continuation(zero, state, corpus, size)
    out.print(Text(f"\nA sample of the model's text:\n\n{text}\n"), soft_wrap=True)
    return {
        "parameters": count_parameters(zero),
        "stage": stage,
        "devices": zero.mesh.data_size,
        "steps": args.steps,
        "train_loss": record.loss,
        "validation_loss": finite(nats),
        "bits_per_byte": finite(reached),
        "unigram_bits_per_byte": unigram,
        "bytes_per_device": measured[stage],
        "model": args.model,
        "seconds": seconds,
        "compile_seconds": record.compile_seconds,
        "skipped_steps": skipped,
        "stages": [row | {"measured": measured.get(row["stage"])} for row in table],
    }


def count_parameters(zero: jzero.Zero) -> int:
    return sum(math.prod(x.shape) for x in jax.tree.leaves(zero.setup.params))


def validate(zero: jzero.Zero, state: jzero.State, corpus: Corpus, size: LMConfig) -> float:
    """The mean loss over the held-out tokens, in nats; every token counts once."""
    evaluate = zero.eval_step(loss_fn)
    rows = (zero.batch.micro or 1) * zero.mesh.data_size
    batches = held_out_batches(corpus, size.context, rows, jax.process_index(), jax.process_count())
    total = 0.0
    for index, batch in enumerate(zero.batches(batches)):
        predicted = min(rows * size.context, corpus.held_out_tokens - index * rows * size.context)
        total += float(evaluate(state, batch)["loss"]) * predicted
    return total / corpus.held_out_tokens


def continuation(zero: jzero.Zero, state: jzero.State, corpus: Corpus, size: LMConfig) -> str:
    """A document that the model begins by itself."""

    @jax.jit
    def draw(state: jzero.State) -> jax.Array:
        prompt = jax.numpy.zeros((1, 1), jax.numpy.int32)  # token 0 comes before each document
        key = jax.random.key(0)
        return generate(zero.model(state), prompt, SAMPLE_TOKENS, key, context=size.context)

    return corpus.tokenizer.decode(np.asarray(draw(state))[0].tolist())


def measure_stages(zero: jzero.Zero, state: jzero.State) -> dict[int, dict[str, int]]:
    """Bytes per device from the arrays that are there: of this stage, and of all if they fit."""
    running, setup = zero.config.stage, zero.setup
    found = {running: real_bytes(state)}
    if max(row["state"] for row in stage_table(setup)) <= SMALL_STATE:
        for stage in {0, 1, 2, 3} - {running}:
            at = setup.at_stage(stage)
            other = born(at.model, at.update, at.scaling, 0, at.abstract_state())
            found[stage] = real_bytes(other)
    return found


if __name__ == "__main__":
    sys.exit(main())
