"""A step folder is complete or not there, whatever else lies beside it."""

import logging

import pytest

from jzero.checkpoint import folders
from jzero.checkpoint.find import find
from jzero.checkpoint.folders import step_folder
from jzero.errors import JzeroError


def fill(folder, text="here"):
    folder.mkdir(parents=True)
    (folder / "file").write_text(text)
    return folder


def test_what_counts_as_a_step(tmp_path, caplog):
    for step in (50, 100, 123456789):
        fill(step_folder(tmp_path, step))
    for name in (
        "step_7",
        "step_",
        "step_00000050.bak",
        "xstep_00000001",
        "step_000000050",
        "step_\N{ARABIC-INDIC DIGIT THREE}0000000",
        ".unfinished-00000200-ab",
    ):
        fill(tmp_path / name)
    (tmp_path / "step_00000300").write_text("a file")
    assert folders.published(tmp_path) == [50, 100, 123456789]
    step_folder(tmp_path, 400).mkdir()
    with caplog.at_level(logging.WARNING, "jzero"):
        for _ in range(2):
            assert folders.published(tmp_path)[-1] == 123456789
    (said,) = caplog.messages  # once, however often a save looks
    assert "step_00000400 is empty" in said
    assert folders.published(tmp_path / "none") == []


def test_publishing(tmp_path):
    draft, place = folders.unfinished(tmp_path, 5, "ab"), step_folder(tmp_path, 5)
    fill(draft)
    assert folders.published(tmp_path) == []
    folders.publish(draft, place)
    assert folders.published(tmp_path) == [5] and not draft.exists()
    fill(draft, "new")
    with pytest.raises(FileExistsError):
        folders.publish(draft, place)
    assert (place / "file").read_text() == "here"
    folders.publish(draft, place, overwrite=True)
    assert (place / "file").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_publishing_over_an_empty_folder(tmp_path):
    draft, place = folders.unfinished(tmp_path, 5, "ab"), step_folder(tmp_path, 5)
    place.mkdir()
    folders.publish(fill(draft), place)
    assert folders.published(tmp_path) == [5]


def test_killed_between_the_two_names_of_an_overwrite(tmp_path, monkeypatch):
    """The old step comes back: at no moment are both lost."""
    draft, place = folders.unfinished(tmp_path, 5, "ab"), step_folder(tmp_path, 5)
    fill(place, "old")
    fill(draft, "new")
    rename = folders.os.rename

    def killed(source, target):
        if source == draft:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(folders.os, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.publish(draft, place, overwrite=True)
    monkeypatch.undo()
    fill(step_folder(tmp_path, 4))
    assert folders.published(tmp_path) == [4]
    for step in (None, 5):  # nothing goes back to step 4 by itself
        with pytest.raises(
            JzeroError, match=r"step 5 .* being replaced, .* in \.replaced-00000005"
        ):
            find(tmp_path, step)
    assert find(tmp_path, 4) == step_folder(tmp_path, 4)
    folders.delete(step_folder(tmp_path, 4))
    folders.sweep(tmp_path)
    assert find(tmp_path) == place
    assert (place / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000005"]


def test_an_overwrite_that_fails_leaves_the_old_step(tmp_path, monkeypatch):
    draft, place = folders.unfinished(tmp_path, 5, "ab"), step_folder(tmp_path, 5)
    fill(place, "old")
    fill(draft, "new")
    rename = folders.os.rename

    def failing(source, target):
        if source == draft:
            raise OSError(5, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(folders.os, "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        folders.publish(draft, place, overwrite=True)
    assert (place / "file").read_text() == "old"


def test_a_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    elsewhere, root = fill(tmp_path / "elsewhere"), tmp_path / "run"
    root.mkdir()
    for link in (step_folder(root, 5), folders.unfinished(root, 6, "ab")):
        link.symlink_to(elsewhere)
    folders.delete(step_folder(root, 5))
    folders.sweep(root)
    assert list(root.iterdir()) == [] and (elsewhere / "file").exists()


def test_a_step_that_is_deleted_while_somebody_looks(tmp_path, monkeypatch, caplog):
    fill(step_folder(tmp_path, 5))
    fill(step_folder(tmp_path, 6))
    step_of = folders.step_of

    def meanwhile(folder):
        if step_of(folder) == 5:
            folders.shutil.rmtree(folder)
        return step_of(folder)

    monkeypatch.setattr(folders, "step_of", meanwhile)
    assert folders.published(tmp_path) == [6] and caplog.messages == []
    assert folders.published(tmp_path / "none") == []


def test_killed_while_deleting(tmp_path, monkeypatch):
    place = fill(step_folder(tmp_path, 5))

    def killed(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr(folders.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        folders.delete(place)
    monkeypatch.undo()
    assert folders.published(tmp_path) == []  # not half a step
    folders.sweep(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sweeping_leaves_the_rest_alone(tmp_path):
    fill(step_folder(tmp_path, 5))
    fill(tmp_path / ".git")
    fill(tmp_path / "unfinished-00000200-ab")
    fill(folders.unfinished(tmp_path, 6, "ab"))
    fill(tmp_path / ".failed-00000006-ab")
    folders.sweep(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".git", "step_00000005", "unfinished-00000200-ab",
    ]  # fmt: skip
