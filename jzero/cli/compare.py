"""`jzero compare`: the real train step of each stage, compiled for a target or run here."""

import argparse
import re
import shlex
import sys
from pathlib import Path

from jzero import factory, targets
from jzero.cli.parser import (
    add_json,
    check_file,
    output,
    whole_number,
    whole_number_or_0,
    write_file,
    write_json,
)
from jzero.cli.progress import Progress
from jzero.compare import report
from jzero.compare.here import is_here
from jzero.compare.page import page, picture, require_extra
from jzero.compare.request import Axes, Request
from jzero.compare.runner import compare
from jzero.errors import JzeroError
from jzero.partition import STAGES

NAME = "compare"
SUMMARY = "compile the train step of each stage for a target: memory, traffic, what fits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="FILE.py:FACTORY", help="a factory of a jzero.Workload")
    add(
        "--target",
        required=True,
        metavar="T",
        help="devices, such as h100:8, v5p:2x2x1 or cpu:8; here: those present, where it also runs",
    )
    add("--stages", type=stages, default=tuple(STAGES), metavar="S,S", help="stages (0,1,2,3)")
    add("--micro-batch", type=whole_number, metavar="B", help="samples of a device (1)")
    add("--accumulate", type=whole_number, metavar="A", help="micro-batches in a step (1)")
    add("--prefetch", type=whole_number_or_0, metavar="E", help="elements stage 3 gathers ahead")
    add("--mesh", type=axes, metavar="AXIS=N,...", help="the mesh's axes (data=all devices)")
    add("--replicas", type=whole_number, metavar="R", help="groups of devices that repeat shards")
    add("--offload", metavar="WHAT", help="optimizer, params: to the host (not yet)")
    add("--dump-hlo", metavar="DIR", help="write each compiled module to DIR/stageS.hlo.txt")
    add("--html", metavar="FILE", help="write a page to look at: memory, traffic, what overlaps")
    add("--png", metavar="FILE", help="write the charts of memory and traffic as a picture")
    add_json(parser)


def run(args: argparse.Namespace) -> None:
    """Prints the comparison that the arguments ask for.

    Raises:
      JzeroError: arguments, a model or a mesh that jzero cannot use; no compiler or devices.
      RunFailed: a program that does not compile or run, for another reason than memory.
    """
    files = {option: getattr(args, option[2:]) for option in ("--json", "--html", "--png")}
    for option, name in files.items():
        check_file(option, name)
        if option != "--json" and name == "-":
            raise JzeroError(f"{option} -: give a file; only --json goes to standard output")
    given = [Path(name).absolute() for name in files.values() if name not in (None, "-")]
    if len(set(given)) < len(given):
        raise JzeroError("--json, --html, --png: two of them name the same file; give each its own")
    if args.png is not None:
        require_extra()
    if args.offload is not None:
        raise JzeroError("argument --offload: not yet; leave it out")
    if args.dump_hlo is not None and Path(args.dump_hlo).exists():
        if not Path(args.dump_hlo).is_dir():
            raise JzeroError(f"--dump-hlo {args.dump_hlo}: is not a folder")
    factory.split(args.model)
    request = Request(
        model=args.model,
        target=args.target,
        stage=args.stages[0],
        mesh=args.mesh,
        replicas=args.replicas,
        micro_batch=args.micro_batch,
        accumulate=args.accumulate,
        prefetch=args.prefetch,
        dump=args.dump_hlo,
    )
    doing = "compiling and running" if is_here(args.target) else "compiling"
    with output(args.json) as console:
        with Progress(len(args.stages), doing) as progress:
            found = compare(request, args.stages, progress.done, progress.begin)
        for notice in found.notices:
            print(f"jzero {NAME}: {notice}", file=sys.stderr)
        report.show(found, console)
    write_json(args.json, found.as_dict())
    if args.html is not None:
        target = None if is_here(args.target) else targets.parse(args.target)
        command = shlex.join(["jzero", *sys.argv[1:]])
        write_file(Path(args.html), page(found, target, command).encode())
    if args.png is not None:
        write_file(Path(args.png), picture(found))


def stages(text: str) -> tuple[int, ...]:
    """Stages with commas between them: "0,2,3".

    >>> stages("3,1")
    (3, 1)
    """
    names = [name.strip() for name in text.split(",")]
    if not all(name in map(str, STAGES) for name in names) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: stages from 0,1,2,3, each once")
    return tuple(map(int, names))


def axes(text: str) -> Axes:
    """A mesh's axes and sizes.

    >>> axes("data=4,tensor=2")
    (('data', 4), ('tensor', 2))
    """
    found = [re.fullmatch(r"\s*([A-Za-z_]\w*)\s*=\s*([1-9]\d{0,8})\s*", p) for p in text.split(",")]
    names = [match[1] for match in found if match]
    if len(names) < len(found) or len(set(names)) < len(names):
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: axes and their sizes, as in data=4,tensor=2"
        )
    return tuple((match[1], int(match[2])) for match in found if match)
