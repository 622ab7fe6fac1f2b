"""When a training loop's state is saved, what is kept, and that nothing of it gets lost."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from loops import Net, Rows, assert_same, leaves, loss_fn, make_zero

import jzero
from jzero.checkpoint import Reader, manifest, writer
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.checkpoint.due import Due
from jzero.checkpoint.folders import step_folder
from jzero.errors import JzeroError

PROGRAM = Path(__file__).with_name("program.py")


@pytest.fixture(scope="module")
def trained():
    """One compiled step for all tests: states are made anew, the setup is shared."""
    zero = make_zero(2, stage=3)
    tx = optax.adam(1e-2)
    zero.setup_for(Net, tx)
    return zero, tx, zero.train_step(loss_fn)


class Steps:
    """A loop over the shared step."""

    def __init__(self, trained, folder, **keywords):
        self.zero, tx, self.step = trained
        setup = self.zero.setup
        self.state = self.zero.init(Net, tx)
        self.zero.setup = setup  # the same as before, for which the step is compiled
        self.rows = Rows()
        self.checkpoints = Checkpointer(self.zero, folder, **keywords)

    def advance(self) -> jzero.State:
        self.state, _ = self.step(self.state, next(self.rows))
        return self.state

    def save(self, **keywords) -> bool:
        return self.checkpoints.save(self.state, self.rows.position, **keywords)

    def run(self, count, **keywords) -> list[bool]:
        said = []
        for _ in range(count):
            self.advance()
            said.append(self.save(**keywords))
        return said


@pytest.fixture
def steps(trained, tmp_path):
    made = []

    def make(folder="run", **keywords):
        made.append(Steps(trained, tmp_path / folder, **keywords))
        return made[-1]

    yield make
    for loop in made:
        loop.checkpoints.close()


class Gate:
    """Holds a save in the background until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        save_step = writer.save_step

        def held(*args, **keywords):
            assert self.open.wait(60)
            return save_step(*args, **keywords)

        monkeypatch.setattr(writer, "save_step", held)


# --- when


def test_multiples_are_saved_and_the_last_step_at_the_end(steps):
    loop = steps(every=2)
    with loop.checkpoints:
        assert loop.run(5) == [False, True, False, True, False]
    assert loop.checkpoints.steps() == [2, 4, 5]


def test_a_multiple_that_was_passed_over_is_saved_at_the_next_call(steps):
    """A loop that calls save after every third step."""
    loop = steps(every=5, keep_last=None)
    said = []
    with loop.checkpoints:
        for _ in range(4):
            for _ in range(3):
                loop.advance()
            said.append(loop.save())
    assert said == [False, True, False, True]
    assert loop.checkpoints.steps() == [6, 12]


def test_the_step_is_not_read_while_it_runs():
    class Step:
        reads = 0

        def __init__(self, value):
            self.value = value

        def __int__(self):
            Step.reads += 1
            return self.value

    def follow(numbers):
        due, Step.reads, said = Due(10), 0, set()
        for number in numbers:
            state = SimpleNamespace(step=Step(number))
            for _ in range(2):  # a state counts once
                said |= {number} if due.is_due(state) else set()
            due.done(number)
        return said, Step.reads

    # The first two, and at each of the two calls for a state that is due.
    assert follow(range(51, 70)) == ({60}, 2 + 2)
    assert follow([3, 6, 9, 12, 13, 14, 15]) == ({12}, 5 + 2)


def test_a_save_can_be_forced_and_is_not_made_twice(steps):
    loop = steps(every=50)
    loop.advance()
    assert loop.save(force=True) is True
    assert loop.save(force=True) is False
    loop.checkpoints.close()
    assert loop.checkpoints.steps() == [1]


def test_what_was_restored_is_not_saved_again(steps):
    loop = steps(every=2)
    with loop.checkpoints:
        loop.run(2)
    again = steps(every=2)
    restored = again.checkpoints.restore()
    assert (restored.step, restored.data) == (2, 2)
    assert_same(restored.state, loop.state)
    again.state = restored.state
    assert again.save() is False
    again.checkpoints.close()
    assert again.checkpoints.steps() == [2]


def test_before_is_called_before_a_save_alone(steps, tmp_path):
    loop, seen = steps(every=2), []

    def note():
        seen.append((loop.rows.position, loop.checkpoints.latest()))

    with loop.checkpoints:
        loop.run(3, before=note)
        loop.checkpoints.wait()
    assert seen == [(2, None), (3, 2)]


# --- in the background


def test_files_hold_the_state_as_it_was_given_whatever_the_next_steps_do(steps, monkeypatch):
    """The buffers are donated and overwritten while the files are still to be written."""
    gate, loop = Gate(monkeypatch), steps(every=50)
    given = loop.advance()
    want = leaves(given)
    assert loop.save(force=True) is True
    assert loop.checkpoints.steps() == [], "save returned before anything was written"
    for _ in range(4):
        loop.advance()
    # A view would keep the buffers, and the step would have to copy the state.
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    changed = leaves(loop.state)
    gate.open.set()
    loop.checkpoints.wait()
    found = leaves(loop.checkpoints.restore(1).state)
    assert {path: found[path].tobytes() for path in want} == {
        path: want[path].tobytes() for path in want
    }
    assert any(not np.array_equal(changed[path], want[path]) for path in want)


def test_a_save_waits_for_the_one_before(steps, monkeypatch):
    gate, loop = Gate(monkeypatch), steps(every=1)
    loop.run(1)
    threading.Timer(0.2, gate.open.set).start()
    loop.run(1)
    assert 1 in loop.checkpoints.steps()
    loop.checkpoints.close()
    assert loop.checkpoints.steps() == [1, 2]


def test_arrays_and_facts_are_on_the_disk(steps):
    loop = steps(every=2)
    with loop.checkpoints:
        loop.run(2)
    folder = step_folder(loop.checkpoints.folder, 2)
    found = loop.checkpoints.manifest()
    reader = Reader(folder, manifest.read(folder))
    kernel = np.asarray(loop.zero.params(loop.state)["up"]["kernel"])
    assert np.array_equal(reader.region("params/up/kernel"), kernel)
    assert (found.step, found.facts.stage, found.facts.devices) == (2, 3, 2)
    assert found.facts.data == (2,)


# --- what is kept


def test_the_last_steps_and_every_so_many_are_kept(steps):
    loop = steps(every=1, keep_last=2, keep_every=4)
    with loop.checkpoints:
        loop.run(7)
    assert loop.checkpoints.steps() == [4, 6, 7]


def test_all_are_kept_on_request(steps):
    loop = steps(every=1, keep_last=None)
    with loop.checkpoints:
        loop.run(5)
    assert loop.checkpoints.steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({"every": 0}, "every=0"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"every": 50, "keep_every": 120}, "keep_every=120 is not a multiple of every=50"),
    ],
)
def test_intervals_that_make_no_sense_are_refused(tmp_path, keywords, said):
    with pytest.raises(JzeroError, match=said):
        Checkpointer(make_zero(2), tmp_path, **keywords)


def test_the_latest_step_is_found_whatever_lies_beside_it(steps):
    loop = steps(every=2)
    with loop.checkpoints:
        loop.run(4)
    root = loop.checkpoints.folder
    (root / "step_00000099").mkdir()
    (root / "step_99").mkdir()
    (root / "step_99" / "manifest.json").write_text("{}")
    (root / "step_00000098").write_text("a file")
    (root / "notes.txt").write_text("hello")
    (root / "best" / "step_00000500").mkdir(parents=True)
    (root / ".unfinished-00000006-0123456789ab").mkdir()
    (root / ".unfinished-00000006-0123456789ab" / "manifest.json").write_text("{")
    found = Checkpointer(loop.zero, root)
    assert (found.steps(), found.latest()) == ([2, 4], 4)
    assert_same(found.restore().state, loop.state)
    assert not (root / ".lock").read_bytes() == b"" and (root / "notes.txt").exists()


def test_the_next_run_clears_what_dead_saves_left(steps):
    root = steps().checkpoints.folder
    (root / ".unfinished-00000006-0123456789ab" / "arrays").mkdir(parents=True)
    loop = steps(every=2)
    with loop.checkpoints:
        assert not list(root.glob(".unfinished-*"))
        loop.run(1)


# --- a step that is there already


def test_a_step_is_replaced_only_on_request(steps):
    first = steps(every=2)
    with first.checkpoints:
        first.run(4)
    second = steps(every=2)
    with second.checkpoints:
        second.advance()
        with pytest.raises(JzeroError, match=r"step 2 is in .* already: .*overwrite=True"):
            second.run(1)
        kept = Checkpointer(second.zero, second.checkpoints.folder).restore(2)
        assert kept.data == 2
        second.rows.position = 70
        second.save(force=True, overwrite=True)
        assert second.checkpoints.restore(2).data == 70


def test_later_steps_are_set_aside(steps):
    loop = steps(every=1, keep_last=None)
    with loop.checkpoints:
        loop.run(4)
        assert loop.checkpoints.set_aside(after=4) is None
        aside = loop.checkpoints.set_aside(after=2)
        assert aside == loop.checkpoints.folder / "after_00000002"
        assert loop.checkpoints.steps() == [1, 2]
        assert Checkpointer(loop.zero, aside).steps() == [3, 4]
        loop.run(1)
        again = loop.checkpoints.set_aside(after=2)
        assert again is None or again.name == "after_00000002-2"


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


# --- asking for what is not there


def test_restoring_nothing(steps):
    loop = steps()
    assert loop.checkpoints.restore() is None and loop.checkpoints.manifest() is None
    assert not loop.checkpoints.folder.exists()
    with pytest.raises(JzeroError, match="no such folder"):
        loop.checkpoints.restore(5)
    with loop.checkpoints:
        loop.run(1)
    with pytest.raises(JzeroError, match="has no step 5; there are 1"):
        loop.checkpoints.restore(5)


def test_a_position_that_json_does_not_have(steps):
    loop = steps(every=1)
    loop.advance()
    with pytest.raises(JzeroError, match="position in the data"):
        loop.checkpoints.save(loop.state, {"rows": object()})
    assert loop.save() is True
    loop.checkpoints.close()


def test_a_used_state_and_a_closed_checkpointer(steps):
    loop = steps(every=50)
    used = loop.state
    loop.advance()
    with pytest.raises(JzeroError, match="given to an earlier step"):
        loop.checkpoints.save(used)
    loop.save()
    loop.checkpoints.close()
    loop.checkpoints.close()
    with pytest.raises(JzeroError, match="this checkpointer is closed"):
        loop.save()


# --- the end


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
    assert Checkpointer(trained[0], tmp_path).steps() == steps
    assert said in done.stderr and "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(said)


# --- what is saved


def test_frozen_parameters_can_be_left_out(tmp_path):
    zero = make_zero(2, stage=3)
    init = {"trainable": lambda path: path.startswith("down")}
    state = zero.init(Net, optax.adam(1e-2), **init)
    with Checkpointer(zero, tmp_path, trainable_only=True) as checkpoints:
        state, _ = zero.train_step(loss_fn)(state, next(Rows()))
        checkpoints.save(state, force=True)
        checkpoints.wait()
        names = checkpoints.manifest().leaves
    assert {name for name in names if name.startswith("params/")} == {
        "params/down/bias",
        "params/down/kernel",
    }
