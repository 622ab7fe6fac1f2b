"""Sizes in what others have written."""

from typing import Any


def is_size(value: Any) -> bool:
    """Whether it is a whole number of at least 0.

    Example:
      >>> is_size(3), is_size(-1), is_size(3.0), is_size(True)
      (True, False, False, False)
    """
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
