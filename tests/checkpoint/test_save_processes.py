"""Two processes of two devices save what one process of four restores, and the other way."""

import json
from pathlib import Path

import pytest
from processes import finish, started
from states import assert_same, files_of, random_step, save, setup_of, whole

from jzero import checkpoint
from jzero.checkpoint import processes, restore, verify
from jzero.errors import RunFailed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("save_processes")]
WORKER = Path(__file__).with_name("save_worker.py")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(folder, the bits of its step 5, what each process has to tell)."""
    root = tmp_path_factory.mktemp("checkpoints")
    zero = setup_of(devices=4, stage=1)
    state = restore(random_step(root / "host", zero)[0], zero.setup).state
    bits = whole(zero, state)
    save(root, zero, state, data={"row": 7})
    with started(WORKER, [[root]] * 2, devices=2) as running:
        finish(running)
    return root, bits, [json.loads((root / f"told-{i}.json").read_text()) for i in range(2)]


def test_what_two_processes_restored_and_saved(told):
    root, bits, _ = told
    folder = root / "step_00000006"
    verify(folder)
    zero = setup_of(devices=4, stage=2)
    restored = restore(folder, zero.setup)
    assert_same(whole(zero, restored.state), bits)
    assert restored.positions == ({"process": 0}, {"process": 1})
    # A small leaf has a file of each process; none of the processes' own files is left.
    files = files_of(folder)
    assert [f for f in files if f.startswith("arrays/optimizer%2F0%2Fmu%2Fw/c")] == [
        "arrays/optimizer%2F0%2Fmu%2Fw/c.0.0",
        "arrays/optimizer%2F0%2Fmu%2Fw/c.1.0",
    ]
    assert not any("part-" in file for file in files)


def test_each_process_reads_its_own_half_and_has_its_own_position(told):
    for number, found in enumerate(told[2]):
        assert found["read"] == 8 * 2**15 // 2
        # Of what every device has, the first process alone keeps a copy.
        assert found["pieces"] == ([1, 1, 2] if number == 0 else [0, 0, 2])
        assert found["positions"] == [{"row": 7}]
        assert found["data"] == {"process": number}


def test_a_save_that_fails_in_one_process_fails_in_all(told):
    root, _, (first, second) = told
    for step in (7, 8, 9):
        assert str(first[str(step)]).startswith(f"step {step} was not saved below {root}: ")
    assert first["7"].endswith("process 1: No space left on device")
    assert second["7"].endswith("No space left on device")
    assert first["8"].endswith("No space left on device")
    assert second["8"].endswith("process 0 gave this step up, and says why")
    assert "nothing from process 1 of 2 in 0.5 s" in first["9"]
    assert checkpoint.folders.published(root) == [5, 6]
    assert not list(root.glob(".unfinished-*"))


def test_a_restore_that_fails_in_one_process_fails_in_all(told):
    first, second = (found["restore"] for found in told[2])
    assert first == "RunFailed: process 1 could not read the step, and says why"
    assert second.startswith("DamagedCheckpoint: ") and "c.3.0 is missing" in second
    assert "the last complete step before it is 5" in second


def test_all_missing_processes_are_named(tmp_path):
    draft = checkpoint.folders.unfinished(tmp_path, 5, "ab")
    draft.mkdir()
    processes.hand_in(draft, 2, processes.Written())
    with pytest.raises(RunFailed, match="nothing from process 1, 3 of 4 in 0 s"):
        processes.collect(draft, 4, timeout=0)
    with pytest.raises(RunFailed, match="process 0 did not publish it in 0 s"):
        processes.await_publication(draft, tmp_path / "step_00000005", timeout=0)
