"""The wish that a program ends: SIGTERM, or a preemption notice to any of its processes."""

import logging
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

log = logging.getLogger("jzero")


class Stop:
    """Tells whether the program was asked to end, at the same call in every process.

    In one process SIGTERM sets a flag, and nothing else; a second one ends the program at once, as
    it would have without this. `close` gives the signal its former meaning back, and calls a
    handler that the program had itself if the signal came.

    Where `jax.distributed` runs, JAX catches SIGTERM itself: its preemption service makes all
    processes agree on a call that none of them has passed yet. A handler here would hide the signal
    from it.
    """

    def __init__(self):
        self._asked = False
        self._calls = 0
        self._previous: Any = None  # what SIGTERM did before, where it is caught here
        self._agreed = _service_runs()
        if self._agreed:
            return
        if jax.process_count() > 1:
            log.warning("SIGTERM saves nothing: jax_enable_preemption_service is switched off")
        elif threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM saves nothing: only the main thread can catch it")
        else:
            self._previous = signal.getsignal(signal.SIGTERM) or signal.SIG_DFL
            signal.signal(signal.SIGTERM, self._catch)

    def reached(self) -> bool:
        """Whether to save and end now. Every process makes every call."""
        if self._agreed and not self._asked:
            # Calls, not steps: the point that it sets is the next number after the largest.
            self._calls += 1
            self._asked = multihost_utils.reached_preemption_sync_point(self._calls)
            if self._asked and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return self._asked

    def close(self) -> bool:
        """Gives SIGTERM its former meaning back; whether it came."""
        previous, self._previous = self._previous, None
        if previous is not None and threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGTERM) == self._catch:
                signal.signal(signal.SIGTERM, previous)
            if self._asked and callable(previous):
                previous(signal.SIGTERM, None)
        return self._asked

    def _catch(self, number: int, frame: Any) -> None:
        self._asked = True
        signal.signal(signal.SIGTERM, self._previous)  # the next one ends the program


def _service_runs() -> bool:
    """Whether JAX's preemption service watches this process."""
    if not jax.distributed.is_initialized():
        return False
    try:
        multihost_utils.reached_preemption_sync_point(0)
    except RuntimeError:  # jax_enable_preemption_service is off
        return False
    return True
