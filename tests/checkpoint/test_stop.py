"""SIGTERM, a preemption notice, Ctrl-C: the running step is saved, and the program ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from loops import Loop
from processes import finish, started

from jzero.checkpoint import folders, manifest
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.stop import Stop

HERE = Path(__file__).parent


@pytest.fixture
def signals():
    """The signals that a handler of the program's own has seen, in the place of ending pytest."""
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGTERM, before)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_next_save_saves_whatever_the_step(tmp_path, signals):
    loop = Loop(tmp_path, every=50)
    with loop.checkpoints:
        assert loop.advance() is False and not loop.checkpoints.stopping
        terminate()
        assert not loop.checkpoints.stopping, "the handler sets a flag, and nothing else"
        assert loop.advance() is True and loop.checkpoints.stopping
        loop.checkpoints.wait()
        assert loop.checkpoints.steps() == [2]
        assert signals == []
    assert signals == [signal.SIGTERM], "the program's own handler hears of it in the end"
    with loop.zero.checkpointer(tmp_path) as later:
        later.save(loop.state, force=True, overwrite=True)
        terminate()
    assert later.stopping, "also where it came after the last step"


def test_a_second_one_does_what_it_did_before(signals):
    stop = Stop()
    terminate()
    assert stop.reached() and signals == []
    terminate()
    assert signals == [signal.SIGTERM]
    stop.close()


def test_the_former_handler_is_back_after_the_end(signals):
    mine = signal.getsignal(signal.SIGTERM)
    stop = Stop()
    assert signal.getsignal(signal.SIGTERM) != mine and not stop.reached()
    assert stop.close() is False
    assert signal.getsignal(signal.SIGTERM) is mine and signals == []


def test_a_handler_that_came_later_stays(signals):
    stop = Stop()

    def later(number, frame): ...

    signal.signal(signal.SIGTERM, later)
    stop.close()
    assert signal.getsignal(signal.SIGTERM) is later


def test_other_threads_cannot_catch_it_and_say_so(signals, caplog):
    mine = signal.getsignal(signal.SIGTERM)
    stops = []
    thread = threading.Thread(target=lambda: stops.append(Stop()))
    thread.start()
    thread.join()
    assert "only the main thread can catch it" in caplog.text
    assert signal.getsignal(signal.SIGTERM) is mine
    assert not stops[0].reached()
    stops[0].close()


# --- Ctrl-C


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_waits_for_the_next_save(tmp_path):
    """Within a step it would lose the state, which the step was given."""
    loop = Loop(tmp_path, every=50)
    with pytest.raises(KeyboardInterrupt), loop.checkpoints:
        loop.advance()
        assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
        loop.state, _ = loop.step(loop.state, next(loop.rows))
        interrupt()
        loop.checkpoints.save(loop.state)
        loop.advance()  # save raises it: not come to
    assert loop.checkpoints.steps() == [2] and not loop.checkpoints.stopping
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_after_the_last_save_is_raised_at_the_end(tmp_path):
    loop = Loop(tmp_path, every=50)
    with pytest.raises(KeyboardInterrupt), loop.checkpoints:
        loop.advance()
        interrupt()
    assert loop.checkpoints.steps() == [1]


def test_a_second_interrupt_acts_at_once(caplog):
    stop = Stop(interrupts=True)
    interrupt()
    assert not stop.reached() and "a second one ends at once" in caplog.text
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    with pytest.raises(KeyboardInterrupt):
        stop.interrupt()
    stop.interrupt()
    stop.close()


def test_interrupts_are_left_alone_outside_of_a_block_and_where_they_are_handled(tmp_path):
    loop = Loop(tmp_path, every=50)
    loop.advance()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    loop.checkpoints.close()

    def mine(number, frame): ...

    before = signal.signal(signal.SIGINT, mine)
    try:
        stop = Stop(interrupts=True)
        assert signal.getsignal(signal.SIGINT) is mine
        stop.close()
    finally:
        signal.signal(signal.SIGINT, before)


SECOND = """
import os, signal
from jzero.checkpoint.stop import Stop
stop = Stop()
for _ in range(2):
    os.kill(os.getpid(), signal.SIGTERM)
    print(stop.reached(), flush=True)
"""


def test_a_second_one_ends_the_program_at_once():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-c", SECOND], env=environment, capture_output=True, text=True, timeout=100
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n"), done.stderr


@pytest.mark.slow
def test_all_processes_save_the_same_step(tmp_path):
    """One of two gets the signal; JAX's preemption service tells the other."""
    (tmp_path / "taken").mkdir()
    taken = Lock(tmp_path / "taken")
    with started(HERE / "stop_worker.py", [[tmp_path]] * 2, devices=1) as both:
        end = time.monotonic() + 200
        while not folders.published(tmp_path) and time.monotonic() < end:
            if any(process.poll() is not None for process in both):
                break
            time.sleep(0.05)
        both[1].send_signal(signal.SIGTERM)
        printed = finish(both)
    taken.release()
    for number, out in enumerate(printed):
        told = [line.removeprefix("refused: ") for line in out.splitlines() if "refused" in line]
        first, second = "writes checkpoints here", "process 0 could not take"
        assert len(told) == 1 and (second if number else first) in told[0]
    assert folders.published(tmp_path / "back") == [1]
    reached = {out.splitlines()[-1] for out in printed}  # gloo speaks before
    assert len(reached) == 1, printed
    last = int(reached.pop().removeprefix("stopped after "))
    assert folders.published(tmp_path)[-1] == last
    facts = manifest.read(folders.step_folder(tmp_path, last)).facts
    assert facts.data == (0, 1), "each process has a position of its own"
