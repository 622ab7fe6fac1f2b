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

from jzero.checkpoint import folders, manifest, writer
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.stop import Stop
from jzero.errors import JzeroError, RunFailed

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
    stop.interrupt()  # it stands for both
    stop.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def fail(*args, **keywords):
    raise RunFailed("the disk is full")


def test_an_error_wins_over_an_interrupt(tmp_path, monkeypatch):
    """Which would hide it: in a save, at the end of the block, and where the program raises it."""
    loop = Loop(tmp_path, every=1)
    with pytest.raises(RunFailed, match="disk is full"), loop.checkpoints:
        loop.advance()
        loop.checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(writer, "save_step", fail)
            loop.advance()
            interrupt()
            loop.advance()
    last = loop.zero.checkpointer(tmp_path, every=50)
    monkeypatch.setattr(writer, "save_step", fail)
    with pytest.raises(RunFailed, match="disk is full"), last:
        last.save(loop.step(loop.state, next(loop.rows))[0])
        interrupt()
    monkeypatch.undo()
    loop = Loop(tmp_path, every=50)
    with pytest.raises(ValueError, match="mine"), loop.checkpoints:
        loop.advance()
        interrupt()
        raise ValueError("mine")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupts_of_the_end_leave_nothing_behind(tmp_path, signals, monkeypatch):
    """The lock, the signals and the save that is going on."""
    hold, loop = threading.Event(), Loop(tmp_path, every=1)
    save_step, mine = writer.save_step, signal.getsignal(signal.SIGTERM)

    def held(*args, **keywords):
        assert hold.wait(60)
        return save_step(*args, **keywords)

    def interrupted(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, "save_step", held)
    loop.advance()
    lock = loop.checkpoints._writer._lock
    release = lock.release
    # Later than the save is done: `close` has to wait for this as well.
    monkeypatch.setattr(lock, "release", lambda: (time.sleep(0.2), release()))
    terminate()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer.ThreadPoolExecutor, "shutdown", interrupted)
        patch.setattr(writer.Writer, "wait", interrupted)
        loop.checkpoints.close()
    assert signals == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine
    with pytest.raises(JzeroError, match="writes checkpoints here"):
        Lock(tmp_path)  # the thread still writes
    # Python 3.11 may take a thread for ended whose join was interrupted.
    monkeypatch.setattr(writer.ThreadPoolExecutor, "shutdown", lambda pool: None)
    hold.set()
    loop.checkpoints.close()
    Lock(tmp_path).release()
    assert loop.checkpoints.steps() == [1]


def test_signals_that_nobody_waits_for_do_what_they_did_before(signals):
    """Also where a thread, which cannot give them back, has closed the last one."""
    mine, stop = signal.getsignal(signal.SIGTERM), Stop(interrupts=True)
    thread = threading.Thread(target=stop.close)
    thread.start()
    thread.join()
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    terminate()
    assert signals == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is mine


def test_all_loops_hear_of_it(signals):
    one, two = Stop(), Stop()
    terminate()
    assert one.reached() and two.reached()
    two.close()
    assert signals == [] and one.reached()
    one.close()
    assert signals == [signal.SIGTERM]
    three = Stop()
    assert not three.reached(), "that was another time"
    three.close()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_ends_when_it_is_told_to(signals):
    """A loader's worker, which is forked after the first save, and terminated at the end."""
    stop = Stop(interrupts=True)
    ready = os.pipe()
    child = os.fork()
    if not child:
        caught = [signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)]
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        given_back = callable(caught[0]) and caught[1] is signal.default_int_handler
        caught[0](signal.SIGTERM, None)
        os.write(ready[1], b"yes" if given_back and signals == [signal.SIGTERM] else b"no")
        os._exit(0)
    try:
        assert os.read(ready[0], 3) == b"yes"
        assert signals == [] and signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    finally:
        os.waitpid(child, 0)
        for end in ready:
            os.close(end)
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
from jzero.errors import JzeroError, RunFailed
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
