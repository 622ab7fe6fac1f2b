"""Which steps are kept, which is the latest, and what becomes of steps that come again."""

import shutil

import jax
import jax.numpy as jnp
import pytest
from loops import assert_same, make_zero

from jzero.checkpoint import retention
from jzero.checkpoint.folders import step_folder
from jzero.errors import JzeroError, RunFailed


def test_the_last_steps_and_every_so_many_are_kept(steps):
    loop = steps(every=1, keep_last=2, keep_every=4)
    with loop.checkpoints:
        loop.run(7)
    assert loop.checkpoints.steps() == [4, 6, 7]


def test_the_first_step_after_a_multiple_stands_for_it(steps):
    """A loop that calls save after every third step."""
    loop = steps(every=4, keep_last=1, keep_every=4)
    with loop.checkpoints:
        for _ in range(5):
            loop.advance()
            loop.advance()
            loop.run(1)
    assert loop.checkpoints.steps() == [6, 9, 12, 15]


def test_all_are_kept_on_request(steps):
    loop = steps(every=1, keep_last=None)
    with loop.checkpoints:
        loop.run(5)
    assert loop.checkpoints.steps() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "keywords, said",
    [
        ({"every": 0}, "every=0"),
        ({"every": None}, "every=None: give a whole number of at least 1"),
        ({"every": 2.5}, "every=2.5"),
        ({"every": "5"}, "every='5'"),
        ({"keep_every": 50.0}, "keep_every=50.0"),
        ({"keep_last": 0}, "keep_last=0"),
        ({"keep_last": True}, "keep_last=True: give a whole number"),
        ({"every": 50, "keep_every": 120}, "keep_every=120 is not a multiple of every=50"),
    ],
)
def test_intervals_that_make_no_sense_are_refused(tmp_path, keywords, said):
    with pytest.raises(JzeroError, match=said):
        make_zero(2).checkpointer(tmp_path, **keywords)


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
    found = loop.zero.checkpointer(root)
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
        first.run(2)
    second = steps(every=2)
    with second.checkpoints:
        second.advance()
        with pytest.raises(JzeroError, match=r"step 2 is in .* already: .*overwrite=True"):
            second.run(1)
        kept = second.zero.checkpointer(second.checkpoints.folder).restore(2)
        assert kept.data == 2
        second.rows.position = 70
        second.save(force=True, overwrite=True)
        assert second.checkpoints.restore(2).data == 70


def test_going_back_is_refused_until_later_steps_are_set_aside(steps):
    """They would be the latest ones for ever, and the run's own would be deleted as old."""
    loop = steps(every=50)
    loop.run(3, force=True)
    loop.state, loop.rows.position = loop.checkpoints.restore(1).state, 70
    loop.advance()
    (step_folder(loop.checkpoints.folder, 3) / "manifest.json").unlink()  # which is the reason
    for keywords in ({}, {"force": True}, {"force": True, "overwrite": True}):
        with pytest.raises(JzeroError, match=r"step 2 comes before 3, .*set_aside\(after=1\)"):
            loop.save(**keywords)
    assert loop.checkpoints.steps() == [1, 2, 3]
    loop.checkpoints.set_aside(after=1)
    assert loop.save(force=True) is True
    loop.checkpoints.close()
    assert loop.checkpoints.steps() == [1, 2]
    assert loop.checkpoints.restore().data == 71


def test_the_step_just_saved_is_not_an_old_one(steps):
    loop = steps(every=50, keep_last=1)
    loop.run(1, force=True)
    loop.checkpoints.wait()
    root = loop.checkpoints.folder

    def another():  # after save has looked
        shutil.copytree(step_folder(root, 1), step_folder(root, 99))

    loop.run(1, force=True, before=another)
    loop.checkpoints.wait()
    assert loop.checkpoints.steps() == [2, 99]
    loop.checkpoints.set_aside(after=2)


def test_a_step_that_comes_again_is_saved(steps):
    loop = steps(every=50)
    loop.run(2, force=True)
    loop.state, loop.rows.position = loop.checkpoints.restore(1).state, 70
    loop.checkpoints.set_aside(after=1)
    assert loop.run(1, force=True) == [True]
    loop.state, loop.rows.position = loop.checkpoints.restore(1).state, 80
    loop.advance()
    with pytest.raises(JzeroError, match="step 2 is in .* already"):
        loop.save(force=True)
    assert loop.save(force=True, overwrite=True) is True
    assert loop.checkpoints.restore(2).data == 81


@pytest.mark.parametrize("restored", [False, True])
def test_what_is_on_the_disk_no_more_is_saved_again(steps, restored):
    loop = steps(every=50)
    loop.run(2, force=True)
    if restored:
        loop.state = loop.checkpoints.restore(2).state
    assert loop.save(force=True) is False
    loop.checkpoints.set_aside(after=1)
    assert loop.save(force=True) is True
    loop.checkpoints.wait()
    shutil.rmtree(step_folder(loop.checkpoints.folder, 2))
    assert loop.save(force=True) is True
    loop.checkpoints.close()
    assert loop.checkpoints.steps() == [1, 2]


def test_later_steps_are_set_aside(steps):
    loop = steps(every=1, keep_last=None)
    with loop.checkpoints:
        loop.run(4)
        assert loop.checkpoints.set_aside(after=4) is None
        aside = loop.checkpoints.set_aside(after=2)
        assert aside == loop.checkpoints.folder / "after_00000002"
        assert loop.checkpoints.steps() == [1, 2]
        assert loop.zero.checkpointer(aside).steps() == [3, 4]
        loop.run(1)
        again = loop.checkpoints.set_aside(after=2)
        assert again is None or again.name == "after_00000002-2"


def test_saving_goes_on_after_the_steps_that_are_left(steps):
    """Also where the program has its own copy of a state, and restores nothing."""
    loop = steps(every=2, keep_last=None)
    start = jax.tree.map(jnp.copy, loop.state)
    with loop.checkpoints:
        loop.run(6)
        loop.checkpoints.set_aside(after=0)
        loop.state = start
        assert loop.run(3) == [False, True, False]
    assert loop.checkpoints.steps() == [2, 3]


def test_steps_that_cannot_be_set_aside(steps, monkeypatch):
    loop = steps(every=1)

    def refuse(*args):
        raise OSError(30, "Read-only file system")

    with loop.checkpoints:
        loop.run(2)
        loop.checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(retention.os, "rename", refuse)
            with pytest.raises(RunFailed, match="after 1 cannot be moved away: Read-only file"):
                loop.checkpoints.set_aside(after=1)
    assert loop.checkpoints.steps() == [1, 2]


def test_before_step_0_nothing_can_be_set_aside(steps):
    """What the message tells to do can be done."""
    loop, again = steps(every=1), steps(every=1)
    with loop.checkpoints:
        loop.save(force=True)
    there = "delete the folder, or give this run one of its own"
    with pytest.raises(JzeroError, match=f"step 0 is in .* already: .*{there}"):
        again.save(force=True)
    again.save(force=True, overwrite=True)
    again.run(2)
    again.checkpoints.close()
    with pytest.raises(JzeroError, match=f"step 0 comes before 2, .*: {there}"):
        steps(every=1).save()
