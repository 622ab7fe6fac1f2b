"""Which steps are kept, which is the latest, and who may write beside them."""

import os

import pytest
from loops import assert_same, make_zero

from jzero.errors import JzeroError


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
        first.run(4)
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
