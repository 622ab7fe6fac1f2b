"""The wish that a program ends: SIGTERM, a preemption notice to any of its processes, Ctrl-C."""

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
    handler that the program had itself if the signal came. Ctrl-C is put off in the same way, where
    it would raise a KeyboardInterrupt: inside of a step that would lose the state.

    Where `jax.distributed` runs, JAX catches SIGTERM itself: its preemption service makes all
    processes agree on a call that none of them has passed yet. A handler here would hide the signal
    from it.

    Arguments:
      interrupts: whether Ctrl-C is put off too, until `interrupt` or `close`.
    """

    def __init__(self, interrupts: bool = False):
        self._came: set[int] = set()
        self._calls = 0
        self._previous: dict[int, Any] = {}  # signal that is caught here -> what it did before
        self._agreed = _service_runs()
        if self._agreed:
            return
        if jax.process_count() > 1:
            log.warning("SIGTERM saves nothing: jax_enable_preemption_service is switched off")
        elif threading.current_thread() is not threading.main_thread():
            log.warning("SIGTERM saves nothing: only the main thread can catch it")
        else:
            self._watch(signal.SIGTERM)
            if interrupts and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._watch(signal.SIGINT)

    def reached(self) -> bool:
        """Whether to save and end now. Every process makes every call."""
        if self._agreed and not self._came:
            # Calls, not steps: the point that it sets is the next number after the largest.
            self._calls += 1
            if multihost_utils.reached_preemption_sync_point(self._calls):
                self._came.add(signal.SIGTERM)
                if threading.current_thread() is threading.main_thread():
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return signal.SIGTERM in self._came

    def interrupt(self) -> None:
        """Raises the KeyboardInterrupt that was put off, once."""
        if signal.SIGINT in self._came:
            self._came.remove(signal.SIGINT)
            raise KeyboardInterrupt

    def close(self) -> bool:
        """Gives the signals their former meaning back; whether SIGTERM came."""
        previous, self._previous = self._previous, {}
        if threading.current_thread() is threading.main_thread():
            for number, handler in previous.items():
                if signal.getsignal(number) == self._catch:
                    signal.signal(number, handler)
            for number, handler in previous.items():
                if number in self._came and callable(handler):
                    handler(number, None)
        return signal.SIGTERM in self._came

    def _watch(self, number: int) -> None:
        self._previous[number] = signal.getsignal(number) or signal.SIG_DFL
        signal.signal(number, self._catch)

    def _catch(self, number: int, frame: Any) -> None:
        self._came.add(number)
        signal.signal(number, self._previous[number])  # the next one ends the program
        if number == signal.SIGINT:
            log.warning("Ctrl-C: ends once this step's state is saved; a second one ends at once")


def _service_runs() -> bool:
    """Whether JAX's preemption service watches this process."""
    if not jax.distributed.is_initialized():
        return False
    try:
        multihost_utils.reached_preemption_sync_point(0)
    except RuntimeError:  # jax_enable_preemption_service is off
        return False
    return True
