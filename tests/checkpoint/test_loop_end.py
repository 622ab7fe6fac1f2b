"""However a training loop ends, its last state is saved, or said to be lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from loops import assert_same

PROGRAM = Path(__file__).with_name("program.py")


@pytest.mark.parametrize("end", [None, ValueError("bad row"), SystemExit(0), KeyboardInterrupt()])
def test_the_last_step_is_saved_whatever_ends_the_loop(steps, end):
    loop = steps(every=50)

    def train():
        with loop.checkpoints:
            loop.run(3)
            if end is not None:
                raise end

    if end is None:
        train()
    else:
        with pytest.raises(type(end)):
            train()
    assert loop.checkpoints.steps() == [3]
    assert_same(loop.checkpoints.restore().state, loop.state)


def test_a_state_that_was_given_away_is_said_to_be_lost(steps, caplog):
    loop = steps(every=2)
    with pytest.raises(ValueError, match="bad row"), loop.checkpoints:
        loop.run(3)
        loop.advance()
        raise ValueError("bad row")
    assert loop.checkpoints.steps() == [2]
    (said,) = [r.getMessage() for r in caplog.records]
    assert "whose state never came" in said and said.endswith("is 2")


def program(how: str, folder: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PROGRAM.parent), *sys.path])}
    return subprocess.run(
        [sys.executable, PROGRAM, how, folder],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "how, code, steps, said",
    [
        ("forget to close", 0, [2], ""),
        ("forget to close a full disk", 0, [], "step 2 was not saved"),
        ("exit at once", 3, [2], ""),
    ],
)
def test_programs_that_end_in_their_own_way(trained, tmp_path, how, code, steps, said):
    """A save that is going on is finished where Python ends, and lost where the process is."""
    done = program(how, tmp_path)
    assert done.returncode == code, done.stderr
    assert trained[0].checkpointer(tmp_path).steps() == steps
    assert said in done.stderr and "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(said)
