"""Asynchronous work with a bound on the memory that it holds at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

IN_FLIGHT = 32 * 2**20  # bytes


def windowed(
    jobs: Iterable[tuple[int, Callable[[], Any]]], limit: int = IN_FLIGHT
) -> Iterator[Any]:
    """Starts jobs ahead of time and yields their results in order.

    Arguments:
      jobs: (bytes that it holds until its result is taken, a function that starts it and returns
        a future).
      limit: bytes that may be held at once; a job that is larger runs alone.
    """
    running: deque[tuple[int, Any]] = deque()
    held = 0
    try:
        for size, start in jobs:
            while running and held + size > limit:
                yield running[0][1].result()
                held -= running.popleft()[0]
            running.append((size, start()))
            held += size
        while running:
            yield running[0][1].result()
            running.popleft()
    finally:  # after an error or an interrupt too, nothing goes on in the background
        for _, future in running:
            with suppress(Exception):
                future.result()
