"""Damaged step folders are named and never read as whole; disks that fail lose nothing."""

import errno
import os
import resource
import shutil
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from loops import Loop, assert_same, make_zero

from jzero.checkpoint import DamagedCheckpoint, files, folders
from jzero.checkpoint.folders import step_folder
from jzero.errors import JzeroError, RunFailed

# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A loop that has saved steps 2 and 4, in a folder that tests copy."""
    loop = Loop(tmp_path_factory.mktemp("saved"), make_zero(2, stage=3), every=2)
    return loop.run(4)


@pytest.fixture
def copied(saved, tmp_path):
    root = tmp_path / "checkpoints"
    shutil.copytree(saved.checkpoints.folder, root)
    return root


def every_file(root: Path) -> list[str]:
    folder = step_folder(root, 4)
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def flip(path: Path, place: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << (len(data) % 8)
    path.write_bytes(data)


DAMAGE = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "first byte flipped": lambda path: flip(path, 0),
    "a byte in the middle flipped": lambda path: flip(path, 0.4),
    "last byte flipped": lambda path: flip(path, 1),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "of the step before": lambda path: shutil.copy(
        str(path).replace("step_00000004", "step_00000002"), path
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_to_any_file_is_named(saved, copied, damage):
    """On every kind of file: the manifest, the arrays' metadata, and every leaf's chunks."""
    checkpoints = saved.zero.checkpointer(copied)
    names = every_file(copied)
    kinds = {Path(name).name.split(".")[0] for name in names}
    assert kinds == {"manifest", "zarr", "c"}, "chunks are named c, c.0, c.0.1 and so on"
    for name in names:
        path = step_folder(copied, 4) / name
        whole = path.read_bytes()
        DAMAGE[damage](path)
        if path.exists() and path.read_bytes() == whole:
            assert damage == "of the step before"
            continue
        with pytest.raises(DamagedCheckpoint) as caught:
            checkpoints.restore()
        error = caught.value
        assert (error.step, error.file, error.before) == (4, name, 2)
        assert f"step_00000004 is damaged: {name} " in str(error)
        assert "the last complete step before it is 2" in str(error)
        path.write_bytes(whole)
    assert_same(checkpoints.restore().state, saved.state)


def test_every_bit_counts(saved, copied):
    """Flips at many places of the manifest and of one chunk."""
    checkpoints = saved.zero.checkpointer(copied)
    chunk = next(name for name in every_file(copied) if "up" in name and "/c." in name)
    for name in ("manifest.json", chunk):
        path = step_folder(copied, 4) / name
        whole = path.read_bytes()
        for place in np.linspace(0, 1, 60):
            flip(path, place)
            with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
                checkpoints.restore()
            path.write_bytes(whole)


def test_the_step_before_can_be_restored(saved, copied):
    (step_folder(copied, 4) / "manifest.json").unlink()
    checkpoints = saved.zero.checkpointer(copied)
    restored = checkpoints.restore(2)
    assert (restored.step, restored.data["position"]) == (2, 2)


def test_a_half_copied_folder_is_named(saved, copied):
    """As an interrupted copy leaves it: the first of its files alone."""
    for name in every_file(copied)[len(every_file(copied)) // 2 :]:
        (step_folder(copied, 4) / name).unlink()
    with pytest.raises(DamagedCheckpoint, match="manifest.json is missing.* before it is 2"):
        saved.zero.checkpointer(copied).restore()


def test_only_complete_steps_are_offered(saved, copied):
    for step in (2, 4):
        (step_folder(copied, step) / "manifest.json").write_bytes(b"{")
    with pytest.raises(DamagedCheckpoint, match="no complete step is before it"):
        saved.zero.checkpointer(copied).manifest()


# --- disks that fail -----------------------------------------------------------------------------


def refuse(number: int):
    def failing(*args, **keywords):
        raise OSError(number, os.strerror(number))

    return failing


@contextmanager
def small_disk():
    """No file can grow beyond a size: to TensorStore and to Python, the disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def patched(monkeypatch, target, name, number):
    with monkeypatch.context() as patch:
        patch.setattr(target, name, refuse(number))
        yield


@contextmanager
def gone(root):
    shutil.move(root, root.with_name("elsewhere"))
    yield
    shutil.move(root.with_name("elsewhere"), root)


@contextmanager
def a_file_instead(root):
    with gone(root):
        root.write_text("")
        yield
        root.unlink()


FAILURES = {
    "files too large": (lambda root, patch: small_disk(), "File too large"),
    "no space": (
        lambda root, patch: patched(patch, files.os, "fsync", errno.ENOSPC),
        "No space left on device",
    ),
    "read-only": (
        lambda root, patch: patched(patch, os, "mkdir", errno.EROFS),
        "Read-only file system",
    ),
    "no rename": (lambda root, patch: patched(patch, folders.os, "rename", errno.EIO), "error"),
    "folder gone": (lambda root, patch: gone(root), "the folder is gone"),
    "a file in its place": (lambda root, patch: a_file_instead(root), "Not a directory"),
}


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """One compiled loop, for tests that each go on with it."""
    loop = Loop(tmp_path_factory.mktemp("failing") / "run", make_zero(2, stage=3), every=50)
    loop.advance(force=True)
    yield loop
    loop.checkpoints.close()


@pytest.mark.parametrize("name", FAILURES)
def test_a_save_that_fails_is_told_once_and_loses_nothing(loop, monkeypatch, name):
    failure, reason = FAILURES[name]
    root, checkpoints = loop.checkpoints.folder, loop.checkpoints
    checkpoints.wait()
    last = checkpoints.latest()
    with failure(root, monkeypatch):
        assert loop.advance(force=True) is True, "the snapshot is taken, the files fail later"
        with pytest.raises(RunFailed) as caught:
            checkpoints.wait()
    said = str(caught.value)
    assert said.startswith(f"step {last + 1} was not saved below {root}: ") and reason in said
    assert "\n" not in said
    assert checkpoints.latest() == last and not list(root.glob(".unfinished-*"))
    # Told once; the state is there, and the same save works once the disk does.
    assert checkpoints.save(loop.state, force=True) is True
    checkpoints.wait()
    assert checkpoints.latest() == last + 1
    assert_same(checkpoints.restore().state, loop.state)


def test_the_next_call_tells_it(tmp_path, loop, monkeypatch):
    root = loop.checkpoints.folder
    with gone(root):
        loop.advance(force=True)
        loop.checkpoints._writer._running[0].exception()  # it has ended, and nobody was told
        with pytest.raises(RunFailed, match="the folder is gone"):
            loop.advance()
    assert loop.advance(force=True) is True


def failing_end(folder, monkeypatch, end=None):
    loop = Loop(folder, make_zero(2, stage=0), every=50)
    with patched(monkeypatch, files.os, "fsync", errno.ENOSPC), loop.checkpoints:
        loop.checkpoints.save(loop.state)
        if end is not None:
            raise end


def test_closing_tells_it(tmp_path, monkeypatch):
    with pytest.raises(RunFailed, match="step 0 was not saved .*No space left"):
        failing_end(tmp_path, monkeypatch)
    assert folders.published(tmp_path) == []


def test_sys_exit_does_not_hide_it(tmp_path, monkeypatch):
    with pytest.raises(RunFailed, match="step 0 was not saved"):
        failing_end(tmp_path, monkeypatch, SystemExit(0))


def test_another_error_stays_the_one_that_is_raised(tmp_path, monkeypatch, caplog):
    with pytest.raises(ValueError, match="bad row"):
        failing_end(tmp_path, monkeypatch, ValueError("bad row"))
    assert "step 0 was not saved" in caplog.text


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    loop = Loop(tmp_path / "file" / "run", make_zero(2, stage=0))
    with pytest.raises(RunFailed, match=r"file/run: cannot be written to: Not a directory"):
        loop.checkpoints.__enter__()
    with pytest.raises(JzeroError, match="no such folder"):
        loop.checkpoints.restore(3)
