"""The wish that a program ends: SIGTERM, a preemption notice to any of its processes, Ctrl-C."""

import itertools
import logging
import os
import signal
import threading
import weakref
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

log = logging.getLogger("jzero")

# Signals are the process's: all loops that run in it hear of one that came.
_open: "weakref.WeakSet[Stop]" = weakref.WeakSet()
_previous: dict[int, Any] = {}  # signal that is caught here -> what it did before
_came: set[int] = set()
_calls = itertools.count(1)


class Stop:
    """Tells whether the program was asked to end, at the same call in every process.

    In one process SIGTERM is noted, and nothing else; a second one ends the program at once, as it
    would have without this. When the last one is closed, the signal gets its former meaning back,
    and a handler that the program had itself is called if the signal came. Ctrl-C is put off in the
    same way, where it would raise a KeyboardInterrupt: inside of a step that would lose the state.

    Where `jax.distributed` runs, JAX catches SIGTERM itself: its preemption service makes all
    processes agree on a call that none of them has passed yet. A handler here would hide the signal
    from it.

    Arguments:
      interrupts: whether Ctrl-C is put off too, until `interrupt`.
    """

    def __init__(self, interrupts: bool = False):
        self.signals: set[int] = set()
        self._agreed = _service_runs()
        if not _open:
            _came.clear()
        _open.add(self)
        if self._agreed:
            return
        if jax.process_count() > 1:
            log.warning("SIGTERM saves nothing: jax_enable_preemption_service is switched off")
        elif not _in_main_thread():
            log.warning("SIGTERM saves nothing: only the main thread can catch it")
        else:
            self._watch(signal.SIGTERM)
            handler = signal.getsignal(signal.SIGINT)
            if interrupts and handler in (signal.default_int_handler, _catch):
                self._watch(signal.SIGINT)

    def reached(self) -> bool:
        """Whether to save and end now. Every process makes every call."""
        # Calls, not steps: the point that the service sets is the next number after the largest.
        if (
            self._agreed
            and signal.SIGTERM not in _came
            and multihost_utils.reached_preemption_sync_point(next(_calls))
        ):
            _came.add(signal.SIGTERM)
            if _in_main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return signal.SIGTERM in _came

    def interrupt(self) -> None:
        """Raises the KeyboardInterrupt that was put off, once; also after `close`."""
        if signal.SIGINT in self.signals & _came:
            _came.remove(signal.SIGINT)
            raise KeyboardInterrupt

    def close(self) -> bool:
        """Gives the signals that no other waits for their meaning back; whether SIGTERM came."""
        _open.discard(self)
        came = signal.SIGTERM in _came
        if _in_main_thread():  # otherwise they are passed on when they come
            given_back = {x: _give_back(x) for x in list(_previous) if not _is_awaited(x)}
            handler = given_back.get(signal.SIGTERM)
            if came and callable(handler):
                handler(signal.SIGTERM, None)
        return came

    def _watch(self, number: int) -> None:
        self.signals.add(number)
        if signal.getsignal(number) is not _catch:
            _previous[number] = signal.getsignal(number) or signal.SIG_DFL
            signal.signal(number, _catch)


def _catch(number: int, frame: FrameType | None) -> None:
    if _is_awaited(number) and number not in _came:
        _came.add(number)
        if number == signal.SIGINT:
            log.warning("Ctrl-C: ends once this step's state is saved; a second one ends at once")
        return
    if number == signal.SIGINT:
        _came.discard(number)  # the second stands for both
    handler = _give_back(number)
    if callable(handler):
        handler(number, frame)
    elif handler == signal.SIG_DFL:
        signal.signal(number, handler)
        signal.raise_signal(number)


def _is_awaited(number: int) -> bool:
    return any(number in stop.signals for stop in _open)


def _give_back(number: int) -> Any:
    """Puts back what a signal did before, where no one else has changed it, and returns that."""
    default = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    handler = _previous.get(number, default)
    if signal.getsignal(number) is _catch:
        signal.signal(number, handler)
        _previous.pop(number, None)
    return handler


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _leave_to_parent() -> None:
    """In a forked process, a loader's worker say, which is to end when it is told to."""
    for number in list(_previous):
        _give_back(number)
    _open.clear()
    _came.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def _service_runs() -> bool:
    """Whether JAX's preemption service watches this process."""
    if not jax.distributed.is_initialized():
        return False
    try:
        multihost_utils.reached_preemption_sync_point(0)
    except RuntimeError:  # jax_enable_preemption_service is off
        return False
    return True
