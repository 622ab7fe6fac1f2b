"""Whole numbers that a user gives."""

import operator
from typing import Any

from jzero.errors import JzeroError


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """The number, of whatever integer type.

    Arguments:
      name: of the argument, for the message.
      value: what was given.
      least: the smallest that makes sense.

    Raises:
      JzeroError: it is not whole, or less.

    Example:
      >>> import numpy as np
      >>> whole_number("every", np.int64(50), least=1)
      50
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise JzeroError(f"{name}={value!r}: give a whole number of at least {least}")
    return number
