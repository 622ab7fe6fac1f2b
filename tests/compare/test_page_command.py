"""`jzero compare --html` and `--png`: the files, and what is refused before it compiles."""

import re
import sys
from pathlib import Path

import pytest
from commands import FACTORIES, Run, compare


def test_a_page_of_a_real_comparison(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file = tmp_path / "page.html"
    found = compare(tmp_path / "out.json", "small", "cpu:8", "--stages", "3", "--html", str(file))
    capfd.readouterr()
    written = file.read_text(encoding="utf-8")
    (row,) = found["rows"]
    assert f'<data value="{row["peak_bytes"]}">' in written
    sent = [each["bytes"] for part in row["schedule"]["parts"] for each in part["transfers"]]
    assert sent and "reduce-scatter" in written
    # Loops multiplied out, the schedule sends what the collectives are counted to send.
    assert total(row["schedule"]["parts"], 0) == sum(each["bytes"] for each in row["collectives"])
    assert re.search(r"one of \d+ iterations of the backward loop", written)


def total(parts: list[dict], number: int) -> int:
    """Bytes that a part and the loops in it send, in all of its iterations."""
    part = parts[number]
    own = sum(each["bytes"] for each in part["transfers"])
    loops = sum(total(parts, s.get("index", 0)) for s in part["steps"] if s["kind"] == "loop")
    return part["trips"] * (own + loops)


def test_files_that_go_to_one_place_or_nowhere_are_refused(run: Run, tmp_path: Path):
    page = str(tmp_path / "page")
    for options, said in (
        (("--html", page, "--json", page), "two of them name the same file"),
        (("--html", "-"), "--html -: give a file"),
        (("--html", ""), "--html: give a file"),
    ):
        code, _, err = run(*WHERE, *options)
        assert code == 2 and said in err and len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


WHERE = ("--model", f"{FACTORIES}:small", "--target", "cpu:8")


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_file_that_cannot_be_is_refused_at_once(run: Run, tmp_path: Path, option: str):
    if option == "--png":
        pytest.importorskip("resvg_py", reason="the extra jzero[png] is not installed")
    code, _, err = run(*WHERE, option, str(tmp_path))
    assert (code, err) == (
        2,
        f"jzero compare: error: {option} {tmp_path}: is a folder; give a file\n",
    )
    code, _, err = run(*WHERE, option, str(tmp_path / "no" / "file"))
    assert code == 2 and f"{option} {tmp_path}/no/file: there is no folder {tmp_path}/no" in err


def test_a_picture_without_its_extra_is_refused_at_once(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    code, _, err = run(*WHERE, "--png", str(tmp_path / "picture.png"))
    said = 'jzero compare: error: --png needs an extra: pip install ".[png]" in a clone of jzero\n'
    assert (code, err) == (2, said)
