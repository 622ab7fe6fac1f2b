"""What all processes do, or none of them; collectives, for the main thread."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jzero.errors import RunFailed

T = TypeVar("T")


def all_or_none(act: Callable[[], T], what: str) -> T:
    """Does something in every process, and returns once all have: one alone would wait for ever.

    Arguments:
      act: what to do; its own result is returned.
      what: that, in words, as in "could not ...".

    Raises:
      RunFailed: another process could not.
    """
    if jax.process_count() == 1:
        return act()
    result: Any = None
    failure: Exception | None = None
    try:
        result = act()
    except Exception as error:
        failure = error
    failed = multihost_utils.process_allgather(np.bool_(failure is not None))
    if failure is not None:
        raise failure
    if failed.any():
        numbers = ", ".join(map(str, np.flatnonzero(failed)))
        raise RunFailed(f"process {numbers} could not {what}, and says why")
    return result
