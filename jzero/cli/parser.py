"""What the subcommands' arguments have in common."""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console

from jzero.errors import JzeroError

_SUFFIXES = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}
_MOST = 10**18


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())} (--help shows the usage)\n")


def count(text: str) -> int:
    """A number of parameters: "13e9", "13B", "7.5e9", "125M".

    >>> count("7.5B"), count("13e9"), count("350k")
    (7500000000, 13000000000, 350000)
    """
    match = re.fullmatch(r"([0-9_,.]+(?:e[+-]?[0-9]{1,3})?)([kmbgt]?)", text.strip().lower())
    try:
        if match is None:
            raise InvalidOperation
        number = Decimal(match[1].replace(",", "").replace("_", ""))
    except InvalidOperation:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: a number such as 13e9, 13B or 125M"
        ) from None
    number = number.scaleb(_SUFFIXES[match[2]])
    if number < 1 or number > _MOST or number != int(number):
        raise argparse.ArgumentTypeError(f"found {text!r}; allowed: a whole number from 1 to 1e18")
    return int(number)


def whole_number(text: str) -> int:
    """A whole number of at least 1."""
    return _whole_number(text, 1)


def whole_number_or_0(text: str) -> int:
    """A whole number of at least 0."""
    return _whole_number(text, 0)


def _whole_number(text: str, least: int) -> int:
    digits = text.isascii() and text.isdigit() and len(text) <= len(str(_MOST))
    if not digits or not least <= int(text) <= _MOST:
        raise argparse.ArgumentTypeError(
            f"found {text!r}; allowed: a whole number of at least {least}, at most 1e18"
        )
    return int(text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--json", metavar="OUT", help="write the figures to this file; - is standard output alone"
    )


def check_file(option: str, out: str | None) -> None:
    """Before anything is computed.

    Arguments:
      option: what named the file.
      out: the file; None and "-" are none.

    Raises:
      JzeroError: the file cannot be there.
    """
    if out in (None, "-"):
        return
    if not out:
        raise JzeroError(f"{option}: give a file")
    path = Path(out)
    if path.is_dir():
        raise JzeroError(f"{option} {out}: is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise JzeroError(f"{option} {out}: there is no folder {path.parent}")
    if not os.access(path.absolute().parent, os.W_OK):
        raise JzeroError(f"{option} {out}: the folder {path.parent} cannot be written to")


@contextmanager
def output(out: str | None) -> Iterator[Console]:
    """Where people read: standard output, or standard error where JSON has the former to itself."""
    if out == "-":
        with redirect_stdout(sys.stderr):  # what a user's own file prints goes there too
            yield _console(stderr=True)
    else:
        yield _console(stderr=False)


def write_json(out: str | None, data: Any) -> None:
    if out is None:
        return
    text = json.dumps(data, indent=2, allow_nan=False) + "\n"
    if out == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(out), text.encode())


def write_file(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all."""
    if path.exists() and not path.is_file():  # a pipe or a device
        path.write_bytes(content)
        return
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def _console(stderr: bool) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 120
    return Console(stderr=stderr, width=width, highlight=False)
