"""One run at a time writes in a folder, and only in the folder that it took."""

import os
import shutil

import pytest

from jzero.checkpoint.lock import Lock
from jzero.errors import JzeroError, RunFailed


def test_one_run_at_a_time_writes_in_a_folder(steps):
    one, two = steps(every=1), steps(every=1)
    with one.checkpoints:
        one.run(1)
        one.checkpoints.wait()
        two.advance()
        with pytest.raises(JzeroError, match=rf"process {os.getpid()} on .* writes checkpoints"):
            two.save()
        assert two.checkpoints.restore().step == 1, "reading is free"
        one.run(1)
    assert two.checkpoints.steps() == [1, 2]
    with two.checkpoints:
        two.state = two.checkpoints.restore().state
        two.run(1)
    assert two.checkpoints.steps() == [1, 2, 3]


def test_a_folder_that_was_replaced_is_another_runs(steps):
    old, new = steps(every=1, keep_last=1), steps(every=1)
    old.run(1)
    old.checkpoints.wait()
    shutil.rmtree(old.checkpoints.folder)
    new.run(1)
    new.checkpoints.wait()
    said = r"may be another run's now: nothing is saved there"
    with pytest.raises(JzeroError, match="writes checkpoints here"):
        old.run(1)
    with pytest.raises(JzeroError, match="writes checkpoints here"):
        old.checkpoints.set_aside(after=0)
    assert new.checkpoints.steps() == [1]
    new.run(1)  # whose lock it still is
    new.checkpoints.close()
    assert new.checkpoints.steps() == [1, 2]
    with pytest.raises(RunFailed, match=said):
        old.checkpoints.close()


def test_a_lock_that_a_cleaner_deleted_is_taken_anew(steps, caplog):
    loop = steps(every=1)
    with loop.checkpoints:
        loop.run(1)
        loop.checkpoints.wait()
        (loop.checkpoints.folder / ".lock").unlink()
        loop.run(1)
        with pytest.raises(JzeroError, match="writes checkpoints here"):
            Lock(loop.checkpoints.folder)
    assert loop.checkpoints.steps() == [1, 2]
    (said,) = [r.getMessage() for r in caplog.records]
    assert "its .lock was deleted, and is made anew" in said
    Lock(loop.checkpoints.folder).release()


def test_whatever_is_written_in_it(tmp_path):
    """By a host whose name is in another encoding."""
    lock = Lock(tmp_path)
    (tmp_path / ".lock").write_bytes(b"\xff host")
    with pytest.raises(JzeroError, match="\ufffd host writes checkpoints here"):
        Lock(tmp_path)
    lock.release()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_does_not_hold_it(tmp_path):
    """A loader's worker, say, which outlives the run."""
    lock = Lock(tmp_path)
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"x")
        os.read(go[0], 1)
        os._exit(0)
    try:
        os.read(ready[0], 1)
        with pytest.raises(JzeroError, match="writes checkpoints here"):
            Lock(tmp_path)
        lock.release()
        Lock(tmp_path).release()
    finally:
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        for end in (*ready, *go):
            os.close(end)
