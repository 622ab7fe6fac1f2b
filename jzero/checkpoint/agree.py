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


def from_first(look: Callable[[], int], what: str) -> int:
    """What process 0 finds, in every process: another may see a shared folder as it was before.

    Arguments:
      look: gives a number that an int32 holds; called in process 0.
      what: that, in words, as in "could not ...".

    Raises:
      RunFailed: process 0 could not, in the others.
    """
    first = jax.process_index() == 0
    found = all_or_none(lambda: look() if first else 0, what)
    if jax.process_count() == 1:
        return found
    return int(multihost_utils.broadcast_one_to_all(np.int32(found)))
