"""`jzero checkpoint export`, `import` and `import-deepspeed`: weights in other formats."""

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import jax

from jzero import factory
from jzero.checkpoint.counterparts import some
from jzero.checkpoint.deepspeed import import_deepspeed
from jzero.checkpoint.name_map import NameMap, load
from jzero.checkpoint.safetensors import export_safetensors, import_safetensors
from jzero.cli.parser import output, whole_number_or_0
from jzero.console import say
from jzero.plan.leaves import lay_out
from jzero.setup import Setup
from jzero.units import size

Do = Callable[[argparse.Namespace], None]
"""What a verb does with its arguments."""

DTYPES = {"as-saved": None, "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_UNITS = {"": 1, "b": 1} | {f"{p}b": 10 ** (3 * n) for n, p in enumerate("kmgt", start=1)}
_UNITS |= {f"{p}ib": 2 ** (10 * n) for n, p in enumerate("kmgt", start=1)}


def add_verbs(verb: Callable[[str, Do, str], argparse.ArgumentParser]) -> None:
    """Adds the verbs.

    Arguments:
      verb: adds one, by its name, what it does and its summary, and returns its parser.
    """
    one = verb("export", export, "write the parameters as safetensors files")
    add = one.add_argument
    add("out", metavar="OUT", type=Path, help="a new folder")
    add("--step", metavar="S", type=whole_number_or_0, help="the step (the last)")
    add("--dtype", choices=DTYPES, default="as-saved", help="of floats (as saved)")
    add("--max-shard-size", type=byte_count, default="5GB", metavar="SIZE", help="of a file (5GB)")
    _add_name_map(one)

    one = verb("import", import_, "make a checkpoint of parameters alone from safetensors files")
    one.add_argument("sources", metavar="SOURCE", nargs="+", help="a folder, an index, or files")
    _add_model(one)
    _add_name_map(one)

    summary = "make a checkpoint from DeepSpeed's of ZeRO stage 1, 2 or 3, moments included"
    one = verb("import-deepspeed", import_from_deepspeed, summary)
    add = one.add_argument
    add("source", metavar="FOLDER", type=Path, help="of a tag, universal, or above with `latest`")
    _add_model(one)
    add("--parameters-only", action="store_true", help="no moments, steps or loss scale")
    add(
        "--first-values",
        action="store_true",
        help="what DeepSpeed has no counterpart of is as in a new run, and not an error",
    )
    add("--seed", type=whole_number_or_0, default=0, metavar="S", help="of a new run (0)")
    _add_name_map(one)


def export(args: argparse.Namespace) -> None:
    """Writes a step's parameters as safetensors files."""
    done = export_safetensors(
        args.directory,
        args.out,
        step=args.step,
        dtype=DTYPES[args.dtype],
        max_shard_bytes=args.max_shard_size,
        name_map=_name_map(args),
    )
    files = done.files[0] if len(done.files) == 1 else f"{len(done.files)} files"
    lines = [
        f"step {done.step}: {done.tensors:,} tensors, {size(done.bytes)}, in {done.folder}: {files}"
    ]
    if done.trainable_only:
        lines.append("The checkpoint has the trained parameters alone; so has the export.")
    if done.statistics:
        lines.append(f"not in it, since they are no parameters: {some(done.statistics)}")
    _say_all(lines)


def import_(args: argparse.Namespace) -> None:
    """Makes a checkpoint from safetensors files."""
    setup, name_map = _model(args)
    done = import_safetensors(args.sources, args.directory, setup, name_map=name_map)
    lines = [f"{done.folder}: {done.leaves:,} parameters"]
    lines += _casts("tensors", done.cast)
    if done.left_out:
        lines.append(f"left out, as the name map says: {len(done.left_out):,} tensors")
    if done.statistics:
        lines.append(f"a fresh state's, since they are no parameters: {some(done.statistics)}")
    _say_all(lines)


def import_from_deepspeed(args: argparse.Namespace) -> None:
    """Makes a checkpoint from one of DeepSpeed's, and says what it is made of."""
    setup, name_map = _model(args)
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
    lines += _casts("leaves", done.cast)
    if done.first_values:
        lines.append(f"as in a new run: {some(done.first_values)}")
    if done.left_out:
        lines.append(f"left out, as the name map says: {some(done.left_out)}")
    if done.moments_left_out and not args.parameters_only:
        lines.append(f"moments without a place in the optimizer: {some(done.moments_left_out)}")
    _say_all(lines)


def byte_count(text: str) -> int:
    """Bytes: "5GB", "512MiB", "1000000".

    >>> byte_count("5GB"), byte_count("512MiB")
    (5000000000, 536870912)
    """
    match = re.fullmatch(r"([1-9][0-9]{0,14}) ?(([kmgt]i?)?b|)", text.strip().lower())
    if match is None:
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: bytes, as in 5GB or 512MiB")
    return int(match[1]) * _UNITS[match[2]]


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="FILE.py:FACTORY", help="a factory of a jzero.Workload"
    )


def _add_name_map(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name-map", metavar="MAP", help="FILE.json or FILE.py:FUNCTION: what tensors are called"
    )


def _name_map(args: argparse.Namespace) -> NameMap | None:
    return None if args.name_map is None else load(args.name_map)


def _model(args: argparse.Namespace) -> tuple[Setup, NameMap | None]:
    """What an import fills, and whose names are whose."""
    # Specs need no devices: not even the plugins of those that are there are loaded.
    jax.config.update("jax_platforms", "cpu")
    name_map = _name_map(args)
    return lay_out(factory.load(args.model), devices=1).setup, name_map


def _casts(what: str, cast: Mapping[tuple[str, str], int]) -> list[str]:
    return [f"{n:,} {what} were {before} and are {now}" for (before, now), n in cast.items()]


def _say_all(lines: list[str]) -> None:
    with output(None) as console:
        for line in lines:
            say(console, line)
