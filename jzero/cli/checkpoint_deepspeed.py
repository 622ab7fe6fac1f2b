"""`jzero checkpoint import-deepspeed`: a checkpoint out of one that DeepSpeed wrote."""

import argparse
from pathlib import Path

import jax

from jzero import factory
from jzero.checkpoint.deepspeed import import_deepspeed
from jzero.checkpoint.safetensors.name_map import load
from jzero.checkpoint.safetensors.pieces import some
from jzero.cli.parser import output, whole_number_or_0
from jzero.plan.leaves import lay_out

NAME = "import-deepspeed"
SUMMARY = "make a checkpoint from DeepSpeed's of ZeRO stage 1, 2 or 3, moments included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", metavar="FOLDER", type=Path, help="of a tag, universal, or above with `latest`")
    add("--model", required=True, metavar="FILE.py:FACTORY", help="a factory of a jzero.Workload")
    add("--parameters-only", action="store_true", help="no moments, steps or loss scale")
    add(
        "--first-values",
        action="store_true",
        help="what DeepSpeed has no counterpart of is as in a new run, and not an error",
    )
    add("--seed", type=whole_number_or_0, default=0, metavar="S", help="of a new run (0)")


def run_import(args: argparse.Namespace) -> None:
    """Makes a checkpoint, and says what it is made of.

    Raises:
      JzeroError: files that cannot be read or do not belong together, or a model that they do not
        fit.
    """
    # Specs need no devices: not even the plugins of those that are there are loaded.
    jax.config.update("jax_platforms", "cpu")
    name_map = None if args.name_map is None else load(args.name_map)
    setup = lay_out(factory.load(args.model), devices=1).setup
    done = import_deepspeed(
        args.source,
        args.directory,
        setup,
        name_map=name_map,
        parameters_only=args.parameters_only,
        strict=not args.first_values,
        seed=args.seed,
    )
    what = "parameters alone" if args.parameters_only else "parameters, moments and steps"
    lines = [f"{done.folder}: step {done.step}, {done.parameters:,} leaves: {what}"]
    lines += [
        f"{count:,} leaves were {before} and are {after}"
        for (before, after), count in done.cast.items()
    ]
    if done.first_values:
        lines.append(f"as in a new run: {some(done.first_values)}")
    if done.left_out:
        lines.append(f"left out, as the name map says: {some(done.left_out)}")
    if done.moments_left_out and not args.parameters_only:
        lines.append(f"moments without a place in the optimizer: {some(done.moments_left_out)}")
    with output(None) as console:
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)
