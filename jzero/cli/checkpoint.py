"""`jzero checkpoint`: what is in checkpoints, whether they are whole, and which are kept."""

import argparse
from pathlib import Path

from rich.console import Console

from jzero.checkpoint import manifest, report, steps
from jzero.checkpoint.folders import delete, half_replaced, hidden, step_folder, sweep
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.retention import superseded
from jzero.cli import checkpoint_formats
from jzero.cli.checkpoint_formats import Do
from jzero.cli.parser import (
    add_json,
    check_file,
    output,
    whole_number,
    whole_number_or_0,
    write_json,
)
from jzero.console import say
from jzero.errors import JzeroError
from jzero.units import size

NAME = "checkpoint"
SUMMARY = "look into checkpoints, verify and prune them, and exchange weights as safetensors"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(metavar="VERB", title="verbs", required=True)

    def verb(name: str, do: Do, summary: str) -> argparse.ArgumentParser:
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
    add(
        "--keep-every",
        metavar="K",
        type=whole_number,
        help="keep multiples of K too, or the first steps after them",
    )
    add("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")

    checkpoint_formats.add_verbs(verb)


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
    steps.choose_step(args.directory, args.step)
    found = steps.survey(args.directory)
    shown = [step for step in found if step.state == "complete"] or found
    if args.step is not None:
        shown = [step for step in found if step.step == args.step]
    unfinished = hidden(args.directory)
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
    steps.choose_step(args.directory, args.step)
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
            say(console, said)
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise JzeroError(f"{problems[-1]}{more}")


def prune(args: argparse.Namespace) -> None:
    """Deletes the steps that are not to be kept, and what dead saves left behind.

    Raises:
      JzeroError: a run is saving there, which prunes by itself.
    """
    if not half_replaced(args.directory):
        steps.steps_in(args.directory)  # nothing is made in a folder without any
    lock = None if args.dry_run else Lock(args.directory)
    try:
        with output(None) as console:
            _sweep(args, console)  # first: a step that was being replaced gets its name back
            _delete_steps(args, console)
    finally:
        if lock is not None:
            lock.release()


def _sweep(args: argparse.Namespace, console: Console) -> None:
    there = hidden(args.directory)
    names = ", ".join(folder.name for folder in there)
    # Where a file system has no locks, only its age tells whether a save is dead.
    if any(steps.quiet_seconds(folder) < steps.QUIET_SECONDS for folder in there):
        minutes = steps.QUIET_SECONDS // 60
        why = f"written to in the last {minutes} minutes, so a save may be going on"
        say(console, f"left {names} alone: {why}")
    elif there:
        if not args.dry_run:
            sweep(args.directory)
        say(console, f"{'would sweep' if args.dry_run else 'swept'} {names}")


def _delete_steps(args: argparse.Namespace, console: Console) -> None:
    whole = _without_damaged(steps.survey(args.directory), console)
    read: set[int] = set()
    while True:
        old = superseded(whole, args.keep_last, args.keep_every)
        unread = [step for step in whole if step not in old and step not in read]
        if not unread:
            break
        # What stays instead of the others is read whole; where it is damaged, another one stays.
        looked = [steps.check(args.directory, step, quick=False) for step in unread]
        sound = _without_damaged(looked, console)
        read.update(sound)
        whole = [step for step in whole if step in sound or step not in unread]
    for number in old:
        if not args.dry_run:
            delete(step_folder(args.directory, number))
        say(console, f"{'would delete' if args.dry_run else 'deleted'} step {number}")


def _without_damaged(found: list[steps.StepStatus], console: Console) -> list[int]:
    """The steps that are whole; says which are not."""
    for step in found:
        if step.problem is not None:
            say(console, f"left step {step.step} alone, which is {step.state}: {step.problem}")
    return [step.step for step in found if step.problem is None]
