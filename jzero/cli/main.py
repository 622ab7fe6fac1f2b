"""The command line: which subcommands there are, and how a failure is told."""

import os
import sys
from io import TextIOWrapper

from jzero.cli import checkpoint, compare, plan
from jzero.cli.parser import Parser
from jzero.errors import JzeroError, RunFailed

SUBCOMMANDS = (plan, compare, checkpoint)
"""Modules with a NAME, a SUMMARY, `add_arguments(parser)` and `run(args)`."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand.

    Arguments:
      arguments: the command line after `jzero`; by default this process's own.

    Returns:
      The exit code: 0; 2 for what the user can mend and 1 for what failed while running, each with
      one line on standard error.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # names have letters that not every terminal has
            stream.reconfigure(errors="backslashreplace")
    parser = Parser(
        prog="jzero", description="ZeRO for JAX: what each stage costs, and its checkpoints."
    )
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for module in SUBCOMMANDS:
        below = commands.add_parser(
            module.NAME, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False
        )
        module.add_arguments(below)
        below.set_defaults(run=module.run, name=module.NAME)
    args = parser.parse_args(arguments)
    if not hasattr(args, "run"):
        parser.error(f"no command given; there are: {', '.join(m.NAME for m in SUBCOMMANDS)}")
    try:
        args.run(args)
        sys.stdout.flush()
    except JzeroError as error:
        return _failed(args.name, error, 2)
    except KeyboardInterrupt:
        return _failed(args.name, "interrupted", 130)
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunFailed, OSError) as error:
        return _failed(args.name, error, 1)
    return 0


def _failed(name: str, error: object, code: int) -> int:
    print(f"jzero {name}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return code
