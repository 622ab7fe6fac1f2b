"""The command `jzero`."""

from jzero.cli.main import main as main
