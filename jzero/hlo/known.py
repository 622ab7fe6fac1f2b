"""Arithmetic with figures of which some are not known: None stays None."""

from collections.abc import Iterable


def added_up(values: Iterable[int | None]) -> int | None:
    """The sum; None where one is not known."""
    found = list(values)
    known = [value for value in found if value is not None]
    return sum(known) if len(known) == len(found) else None


def product(left: int | None, right: int | None) -> int | None:
    """The product; None where one is not known."""
    return None if left is None or right is None else left * right
