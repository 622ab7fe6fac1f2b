"""Runs `jzero compare` in this process; its workers are processes of their own."""

import pytest
from commands import Run

from jzero.cli import main


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """(arguments after `jzero compare`) -> (exit code, standard output, standard error)."""

    def one(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(["compare", *arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        out, err = capfd.readouterr()
        return code, out, err

    return one
