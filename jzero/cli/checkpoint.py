"""`jzero checkpoint`: what is in checkpoints, whether they are whole, and other formats."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import jax
from rich.console import Console
from rich.text import Text

from jzero import factory
from jzero.checkpoint import manifest, report, steps
from jzero.checkpoint.folders import delete, step_folder, sweep
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.retention import superseded
from jzero.checkpoint.safetensors import export_safetensors, import_safetensors
from jzero.checkpoint.safetensors.name_map import load
from jzero.cli import checkpoint_deepspeed
from jzero.cli.parser import (
    add_json,
    check_file,
    output,
    whole_number,
    whole_number_or_0,
    write_json,
)
from jzero.errors import JzeroError
from jzero.plan.leaves import lay_out
from jzero.plan.rows import size

NAME = "checkpoint"
SUMMARY = "look into checkpoints, verify and prune them, and exchange weights as safetensors"

DTYPES = {"as-saved": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "b": 1} | {f"{p}b": 10 ** (3 * n) for n, p in enumerate("kmgt", start=1)}
_UNITS |= {f"{p}ib": 2 ** (10 * n) for n, p in enumerate("kmgt", start=1)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", required=True)

    def verb(name: str, do: Callable[..., None], summary: str) -> argparse.ArgumentParser:
        below = verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        below.add_argument("directory", metavar="DIR", type=Path, help="a folder of step folders")
        below.set_defaults(verb=do, name=f"{NAME} {name}")
        return below

    one = verb("inspect", inspect, "the steps, and all that one of them holds")
    one.add_argument("step", metavar="STEP", nargs="?", type=whole_number_or_0, help="(the last)")
    add_json(one)

    one = verb("verify", verify, "read every file of all steps, or of one")
    one.add_argument("step", metavar="STEP", nargs="?", type=whole_number_or_0, help="(all)")

    one = verb("prune", prune, "delete old steps and what dead saves left behind")
    add = one.add_argument
    add("--keep-last", metavar="N", type=whole_number, required=True, help="steps to keep")
    add("--keep-every", metavar="K", type=whole_number, help="multiples of K are kept too")
    add("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")

    one = verb("export", export, "write the parameters as safetensors files")
    add = one.add_argument
    add("out", metavar="OUT", type=Path, help="a new folder")
    add("--step", metavar="S", type=whole_number_or_0, help="the step (the last)")
    add("--dtype", choices=DTYPES, default="as-saved", help="of floats (as saved)")
    add("--max-shard-size", type=byte_count, default="5GB", metavar="SIZE", help="of a file (5GB)")
    _add_name_map(one)

    one = verb("import", import_, "make a checkpoint of parameters alone from safetensors files")
    add = one.add_argument
    add("sources", metavar="SOURCE", nargs="+", help="a folder, an index, or files")
    add("--model", required=True, metavar="FILE.py:FACTORY", help="a factory of a jzero.Workload")
    _add_name_map(one)

    one = verb(
        checkpoint_deepspeed.NAME, checkpoint_deepspeed.run_import, checkpoint_deepspeed.SUMMARY
    )
    checkpoint_deepspeed.add_arguments(one)
    _add_name_map(one)


def run(args: argparse.Namespace) -> None:
    """Does what the verb says.

    Raises:
      JzeroError: input that is wrong, checkpoints that are damaged.
      RunFailed: a checkpoint that cannot be written.
    """
    args.verb(args)


def inspect(args: argparse.Namespace) -> None:
    """Prints what a folder of checkpoints holds."""
    check_file("--json", args.json)
    steps.choose(args.directory, args.step)
    found = steps.survey(args.directory)
    shown = [step for step in found if step.state == "complete"] or found
    if args.step is not None:
        shown = [step for step in found if step.step == args.step]
    unfinished = steps.hidden(args.directory)
    with output(args.json) as console:
        report.show_steps(found, unfinished, console)
        try:
            held = manifest.read(shown[-1].folder)
        except JzeroError as error:
            raise shown[-1].problem or error from None
        report.show(held, console)
    write_json(args.json, report.as_dict(args.directory, found, unfinished, held))


def verify(args: argparse.Namespace) -> None:
    """Reads every file of the steps asked for.

    Raises:
      JzeroError: a step is damaged.
    """
    wanted = [args.step] if args.step is not None else steps.steps_in(args.directory)
    steps.choose(args.directory, args.step)
    problems = []
    with output(None) as console:
        for number in wanted:
            step = steps.check(args.directory, number, quick=False)
            said = f"step {number}: {step.state}"
            if step.problem is None:
                held = manifest.read(step.folder)
                said += f", {len(held.files) + 1} files, {size(held.bytes)} of arrays"
            else:
                problems.append(step.problem)
                said += f": {step.problem}"
            _say(console, said)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise JzeroError(f"{problems[-1]}{more}")


def prune(args: argparse.Namespace) -> None:
    """Deletes the steps that are not to be kept, and what dead saves left behind.

    Raises:
      JzeroError: a run is saving there, which prunes by itself.
    """
    steps.steps_in(args.directory)
    lock = None if args.dry_run else Lock(args.directory)
    try:
        with output(None) as console:
            _sweep(args, console)  # first: a step that was being replaced gets its name back
            _delete_steps(args, console)
    finally:
        if lock is not None:
            lock.release()


def _sweep(args: argparse.Namespace, console: Console) -> None:
    there = steps.hidden(args.directory)
    names = ", ".join(folder.name for folder in there)
    # Where a file system has no locks, only its age tells whether a save is dead.
    if any(steps.quiet_seconds(folder) < steps.QUIET_SECONDS for folder in there):
        minutes = steps.QUIET_SECONDS // 60
        why = f"written to in the last {minutes} minutes, so a save may be going on"
        _say(console, f"left {names} alone: {why}")
    elif there:
        if not args.dry_run:
            sweep(args.directory)
        _say(console, f"{'would sweep' if args.dry_run else 'swept'} {names}")


def _delete_steps(args: argparse.Namespace, console: Console) -> None:
    found = steps.survey(args.directory)
    for step in found:
        if step.problem is not None:
            _say(console, f"left step {step.step} alone, which is {step.state}: {step.problem}")
    whole = [step.step for step in found if step.state == "complete"]
    for number in superseded(whole, args.keep_last, args.keep_every):
        if not args.dry_run:
            delete(step_folder(args.directory, number))
        _say(console, f"{'would delete' if args.dry_run else 'deleted'} step {number}")


def export(args: argparse.Namespace) -> None:
    """Writes a step's parameters as safetensors files."""
    done = export_safetensors(
        args.directory,
        args.out,
        step=args.step,
        dtype=DTYPES[args.dtype],
        max_shard_bytes=args.max_shard_size,
        name_map=None if args.name_map is None else load(args.name_map),
    )
    with output(None) as console:
        files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
        said = f"{done.tensors:,} tensors, {size(done.bytes)}, in {done.folder}: {files}"
        _say(console, f"step {done.step}: {said}")
        if done.trainable_only:
            _say(console, "The checkpoint has the trained parameters alone; so has the export.")


def import_(args: argparse.Namespace) -> None:
    """Makes a checkpoint from safetensors files."""
    # Specs need no devices: not even the plugins of those that are there are loaded.
    jax.config.update("jax_platforms", "cpu")
    name_map = None if args.name_map is None else load(args.name_map)
    setup = lay_out(factory.load(args.model), devices=1).setup
    done = import_safetensors(args.sources, args.directory, setup, name_map=name_map)
    with output(None) as console:
        _say(console, f"{done.folder}: {done.leaves:,} parameters")
        for (before, after), count in done.cast.items():
            _say(console, f"{count:,} tensors were {before} and are {after}")
        if done.left_out:
            _say(console, f"left out, as the name map says: {len(done.left_out):,} tensors")


def byte_count(text: str) -> int:
    """Bytes: "5GB", "512MiB", "1000000".

    >>> byte_count("5GB"), byte_count("512MiB")
    (5000000000, 536870912)
    """
    match = re.fullmatch(r"([1-9][0-9]{0,14}) ?(([kmgt]i?)?b|)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: bytes, as in 5GB or 512MiB")
    return int(match[1]) * _UNITS[match[2]]


def _add_name_map(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name-map", metavar="MAP", help="FILE.json or FILE.py:FUNCTION: what tensors are called"
    )


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
