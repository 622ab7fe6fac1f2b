"""When a training loop's state is saved, and that it is saved as it was given."""

import dataclasses
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops import Net, Rows, assert_same, leaves, loss_fn, make_zero

from jzero.checkpoint import Reader, checkpointer, manifest, writer
from jzero.checkpoint.due import Due
from jzero.checkpoint.folders import step_folder
from jzero.errors import JzeroError

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

    class Given:
        def __init__(self, step):
            self.step = step

    def follow(numbers):
        due, Step.reads, said = Due(10), 0, set()
        for number in numbers:
            state = Given(Step(number))
            for _ in range(2):  # a state counts once
                said |= {number} if due.is_due(state) else set()
            due.done(number)
        return said, Step.reads

    # The first two, after one more, two more and so on, and twice for the state that is due.
    assert follow(range(51, 70)) == ({60}, 2 + 3 + 2)
    assert follow([3, 6, 9, 12, 13, 14, 15]) == ({12}, 6 + 2)
    assert follow(range(21, 30))[1] == 4
    # A loop that passes steps over after all is found out.
    assert follow([1, 2, *range(9, 50, 7)])[0] == {16, 23, 30, 44}


def test_a_save_can_be_forced_and_is_not_made_twice(steps):
    loop = steps(every=50)
    loop.advance()
    assert loop.save(force=True) is True
    assert loop.save(force=True) is False
    loop.checkpoints.close()
    assert loop.checkpoints.steps() == [1]


def test_the_step_just_saved_is_replaced_on_request(steps):
    """By another state or position; the same ones are there already."""
    loop = steps(every=50)
    loop.run(1, force=True)
    assert loop.save(force=True, overwrite=True) is False
    loop.rows.position = 70
    assert loop.save(force=True, overwrite=True) is True
    assert loop.save(force=True, overwrite=True) is False
    loop.state = dataclasses.replace(loop.state, skipped=loop.state.skipped + 1)
    assert loop.save(force=True, overwrite=True) is True
    loop.checkpoints.close()
    restored = loop.checkpoints.restore()
    assert (restored.data, int(restored.state.skipped)) == (70, 1)


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


class Gate:
    """Holds a save in the background until it is opened."""

    def __init__(self, monkeypatch):
        self.open = threading.Event()
        save_step = writer.save_step

        def held(*args, **keywords):
            assert self.open.wait(60)
            return save_step(*args, **keywords)

        monkeypatch.setattr(writer, "save_step", held)


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


def test_the_position_is_that_of_the_call(steps):
    """The loop may change it while the files are written, or keep it until the end."""
    loop, position = steps(every=50), {"rows": [1]}
    with loop.checkpoints:
        loop.advance()
        loop.checkpoints.save(loop.state, position)
        position["rows"][0] = 2
    assert loop.checkpoints.restore().data == {"rows": [1]}


def test_a_state_of_another_model_is_refused(tmp_path):
    """It would be cut at the other model's shapes, and lose what that does not have."""
    zero = make_zero(2, stage=3)

    def init(rows):
        return lambda key: {"w": jax.random.normal(key, (rows, 4))}

    state = zero.init(init(16), optax.adam(1e-2))
    zero.setup_for(init(8), optax.adam(1e-2))
    checkpoints = zero.checkpointer(tmp_path)
    with pytest.raises(JzeroError, match=r"w is float32 \(16, 4\), expected float32 \(8, 4\)"):
        checkpoints.save(state)
    checkpoints.close()
    assert checkpoints.steps() == []


def test_another_model_may_be_set_up_before_the_end(steps):
    """To size it, say: the last state is still saved as its own setup lays it out."""
    loop = steps(every=50)
    setup = loop.zero.setup
    try:
        with loop.checkpoints:
            loop.run(3)
            loop.zero.setup_for(lambda key: {"w": jnp.zeros((4, 4))}, optax.sgd(0.1))
    finally:
        loop.zero.setup = setup
    assert loop.checkpoints.steps() == [3]
    assert_same(loop.checkpoints.restore().state, loop.state)


def test_a_state_of_another_dtype_is_refused(tmp_path):
    """It would be written in that, and no run with this setup could read it."""
    zero = make_zero(2, stage=1, precision="bf16")
    state = make_zero(2, stage=1).init(init_w, optax.sgd(0.1))
    zero.setup_for(init_w, optax.sgd(0.1))
    checkpoints = zero.checkpointer(tmp_path)
    with pytest.raises(JzeroError, match=r"is not one of the model"):
        checkpoints.save(state)
    state = zero.init(init_w, optax.sgd(0.1))
    params = {path: x.astype(np.float32) for path, x in state.params.items()}
    with pytest.raises(JzeroError, match=r"w is float32 \(8, 4\), expected bfloat16 \(8, 4\)"):
        checkpoints.save(dataclasses.replace(state, params=params))
    checkpoints.close()


def init_w(key):
    return {"w": jax.random.normal(key, (8, 4))}


def test_restoring_lets_go_of_the_last_state_first(steps, monkeypatch):
    """Devices may not have room for two."""
    loop = steps(every=50)
    loop.run(1, force=True)
    last, seen = weakref.ref(loop.state), []
    loop.state, restore = None, checkpointer.restore

    def watched(*args, **keywords):
        seen.append(last())
        return restore(*args, **keywords)

    monkeypatch.setattr(checkpointer, "restore", watched)
    assert loop.checkpoints.restore().step == 1
    assert seen == [None]


def test_frozen_parameters_can_be_left_out(tmp_path):
    zero = make_zero(2, stage=3)
    init = {"trainable": lambda path: path.startswith("down")}
    state = zero.init(Net, optax.adam(1e-2), **init)
    with zero.checkpointer(tmp_path, trainable_only=True) as checkpoints:
        state, _ = zero.train_step(loss_fn)(state, next(Rows()))
        checkpoints.save(state, force=True)
        checkpoints.wait()
        names = checkpoints.manifest().leaves
    assert {name for name in names if name.startswith("params/")} == {
        "params/down/bias",
        "params/down/kernel",
    }


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
    with pytest.raises(JzeroError, match=r"step=1\.0: give a whole number"):
        loop.checkpoints.restore(1.0)


def test_a_position_that_json_does_not_have(steps):
    loop = steps(every=1)
    loop.advance()
    for every in (1, 50):  # due or not
        with pytest.raises(JzeroError, match="position in the data"):
            steps(every=every, folder=f"{every}").checkpoints.save(loop.state, {"rows": object()})
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
