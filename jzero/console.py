"""Lines for people."""

from rich.console import Console
from rich.text import Text


def say(console: Console, text: str) -> None:
    """Prints a line as it is: however wide, and without markup."""
    console.print(Text(text), soft_wrap=True)
