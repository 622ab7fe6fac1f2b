"""`jzero checkpoint`: what is said, what is deleted, and how errors are told."""

import io
import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from jzero.checkpoint import Facts, write_leaves
from jzero.checkpoint.lock import Lock
from jzero.checkpoint.safetensors.folder import find
from jzero.cli import main
from jzero.cli.checkpoint_formats import byte_count

W, MOMENT = np.arange(12, dtype=np.float32).reshape(3, 4), np.zeros((3, 4), np.float32)


def save(root, step, **facts):
    leaves = {"params/w": W, "params/b": W[0], "optimizer/0/mu/w": MOMENT}
    arrays = [(name, x.shape, x.dtype.name, x) for name, x in leaves.items()]
    return write_leaves(root, step, arrays, Facts(**facts))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    at = tmp_path_factory.mktemp("made")
    for step in range(50, 300, 50):
        save(at, step, stage=3, devices=8, mesh={"data": 8}, config={"a": 1}, data=({"row": 7},))
    break_step(at, 200)
    return at


@pytest.fixture
def root(made, tmp_path):
    """Steps 50 to 250, of which 200 is damaged, and what a dead save left behind."""
    at = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    (at / ".unfinished-00000300-abcdef").mkdir()
    return at


def break_step(root, step):
    file = next((root / f"step_{step:08}" / "arrays" / "params%2Fw").glob("c*"))
    file.write_bytes(file.read_bytes()[:-9])
    return file


def flip(root, step):
    """Damage that only reading shows."""
    file = next((root / f"step_{step:08}" / "arrays" / "params%2Fw").glob("c*"))
    data = bytearray(file.read_bytes())
    data[3] ^= 4
    file.write_bytes(data)


@pytest.fixture
def run(capsys):
    """(arguments) -> (exit code, standard output, standard error)"""

    def run(*arguments):
        try:
            code = main(["checkpoint", *map(str, arguments)])
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return code, out, err

    return run


def refused(run, *arguments):
    """Standard error of a command that ends with exit code 2 and one line."""
    code, _, err = run(*arguments)
    assert code == 2 and err.count("\n") == 1, err
    return err


def steps(root):
    return sorted(int(path.name[5:]) for path in root.glob("step_*"))


# --- inspect and verify


def test_inspect_shows_the_steps_and_the_last_whole_one(run, root, tmp_path):
    code, out, err = run("inspect", root, "--json", tmp_path / "out.json")
    assert (code, err) == (0, "")
    for text in ("200 damaged", ".unfinished-00000300-abcdef: not finished", "step: 250"):
        assert text in " ".join(out.split())
    for text in ("stage: 3", "mesh: data=8", 'data position: {"row": 7}', "params/w", "[3, 4]"):
        assert text in out
    data = json.loads((tmp_path / "out.json").read_text())
    assert [step["state"] for step in data["steps"]] == [*["complete"] * 3, "damaged", "complete"]
    assert "arrays/params%2Fw" in data["steps"][3]["problem"]
    assert data["step"] == 250 and data["unfinished"] == [".unfinished-00000300-abcdef"]
    assert data["leaves"]["params/b"] == {"shape": [4], "dtype": "float32", "bytes": 16}
    assert data["parts"]["params"] == {"leaves": 2, "bytes": 64}
    assert data["config"] == {"a": 1} and data["versions"]["python"]


def test_inspect_shows_the_step_asked_for(run, root):
    code, out, err = run("inspect", root, "50", "--json", "-")
    assert code == 0 and json.loads(out)["step"] == 50 and "params/w" in err


def test_inspect_of_a_step_without_a_manifest_names_the_step_before(run, root):
    (root / "step_00000250" / "manifest.json").unlink()
    assert run("inspect", root)[0] == 0
    err = refused(run, "inspect", root, 250)
    assert "manifest.json is missing" in err and "before it is 150" in err


def test_verify_reads_every_step(run, root):
    err = refused(run, "verify", root)
    assert "step_00000200 is damaged: arrays/params%2Fw/c" in err
    assert "the last complete step before it is 150" in err
    assert run("verify", root, 150)[0] == 0
    flip(root, 50)
    assert "complete: at a glance; jzero checkpoint verify reads" in run("inspect", root)[1]
    code, out, err = run("verify", root)
    assert code == 2 and "(and 1 more)" in err
    assert [line.split(",")[0].split(": ")[1] for line in out.splitlines()] == [
        "damaged", "complete", "complete", "damaged", "complete",
    ]  # fmt: skip


def test_inspect_shows_any_name_on_any_terminal(tmp_path, monkeypatch):
    write_leaves(tmp_path, 1, [("params/größe\ud800", (3, 4), "float32", W)], Facts())
    shown = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(shown, encoding="ascii"))
    assert main(["checkpoint", "inspect", str(tmp_path)]) == 0
    assert b"params/gr\\xf6\\xdfe\\ud800" in shown.getvalue()


# --- prune


def test_prune_keeps_what_the_policy_keeps(run, root):
    before = steps(root)
    code, out, _ = run("prune", root, "--keep-last", 1, "--keep-every", 100, "--dry-run")
    assert code == 0 and steps(root) == before
    assert "would delete step 50\n" in out and "would delete step 150\n" in out
    assert "left step 200 alone, which is damaged" in out
    code, out, _ = run("prune", root, "--keep-last", 1, "--keep-every", 100)
    assert code == 0 and steps(root) == [100, 200, 250]
    assert "deleted step 50\n" in out


def test_prune_never_counts_a_damaged_step_as_one_to_keep(run, root):
    break_step(root, 250)
    assert run("prune", root, "--keep-last", 1)[0] == 0
    assert steps(root) == [150, 200, 250]


def test_prune_reads_what_it_keeps(run, root):
    """What a quick look does not see must not outlive the last step that is whole."""
    flip(root, 250)
    flip(root, 100)
    code, out, _ = run("prune", root, "--keep-last", 1, "--keep-every", 100, "--dry-run")
    assert code == 0 and "would delete step 50\n" in out and "would delete step 150" not in out
    code, out, _ = run("prune", root, "--keep-last", 1)
    assert code == 0 and "left step 250 alone, which is damaged" in out
    assert steps(root) == [150, 200, 250]


def test_prune_sweeps_what_dead_saves_left_behind(run, root):
    left = root / ".unfinished-00000300-abcdef"
    assert "a save may be going on" in run("prune", root, "--keep-last", 9)[1] and left.is_dir()
    (left / "arrays").mkdir()
    old = time.time() - 7200
    os.utime(left, (old, old))  # but what is in it is new
    assert "a save may be going on" in run("prune", root, "--keep-last", 9)[1] and left.is_dir()
    os.utime(left / "arrays", (old, old))
    assert "would sweep .unfinished" in run("prune", root, "--keep-last", 9, "--dry-run")[1]
    assert left.is_dir()
    assert "swept .unfinished" in run("prune", root, "--keep-last", 9)[1] and not left.exists()
    assert steps(root) == [50, 100, 150, 200, 250]


def test_prune_gives_a_step_that_was_being_replaced_its_name_back(run, root):
    old = time.time() - 7200
    there, away = root / "step_00000250", root / ".replaced-00000250-abcdef"
    there.rename(away)
    for path in (*root.glob(".*"), *away.rglob("*")):
        os.utime(path, (old, old))
    assert f"{away.name}: is being replaced, or was when" in run("inspect", root)[1]
    assert run("prune", root, "--keep-last", 1)[0] == 0
    assert steps(root) == [200, 250]


def test_a_step_that_was_being_replaced_may_be_the_only_one(run, root):
    old = time.time() - 7200
    for step in steps(root)[:-1]:
        shutil.rmtree(root / f"step_{step:08}")
    away = root / ".replaced-00000250-abcdef"
    (root / "step_00000250").rename(away)
    for path in (*root.glob(".*"), *away.rglob("*")):
        os.utime(path, (old, old))
    for verb in ("inspect", "verify"):
        assert f"has no checkpoints (folders such as step_00000050); {away.name}" in (
            said := refused(run, verb, root)
        )
        assert "jzero checkpoint prune gives it its name back" in said
    assert run("prune", root, "--keep-last", 1)[0] == 0
    assert steps(root) == [250]


def test_prune_leaves_the_folder_of_a_running_program_alone(run, root):
    lock = Lock(root)
    try:
        assert "writes checkpoints here" in refused(run, "prune", root, "--keep-last", 1)
    finally:
        lock.release()
    assert run("prune", root, "--keep-last", 1)[0] == 0


# --- export and import

MODEL = """
import jax, jax.numpy as jnp, jzero
def net():
    init = lambda key: {"w": jnp.zeros((3, 4)), "b": jnp.zeros(4)}
    batch = lambda rows: {"x": jax.ShapeDtypeStruct((rows, 3), jnp.float32)}
    def loss(params, batch, rng):
        return jnp.mean(batch["x"] @ jzero.gather(params["w"]) + jzero.gather(params["b"]))
    return jzero.Workload(init, loss, batch)
def other():
    import dataclasses
    return dataclasses.replace(net(), init=lambda key: {"w": jnp.zeros((3, 5)), "b": jnp.zeros(5)})
"""


def test_weights_go_out_and_come_back(run, root, tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    names = tmp_path / "names.json"
    rules = [{"ours": "w", "theirs": "net.weight", "transpose": True}]
    names.write_text(json.dumps([*rules, {"ours": "b", "theirs": "net.bias"}]))
    out = tmp_path / "out"
    code, said, _ = run("export", root, out, "--dtype", "bf16", "--name-map", names)
    assert code == 0 and "step 250: 2 tensors" in said and "model.safetensors" in said
    assert find([out])["net.weight"].read().shape == (4, 3)
    again = tmp_path / "again"
    where = ["--model", f"{tmp_path}/net.py:net", "--name-map", names]
    code, said, _ = run("import", again, out, *where)
    assert code == 0 and "2 parameters" in said and "were bfloat16 and are float32" in said
    code, said, _ = run("export", again, tmp_path / "third", "--step", 0, "--max-shard-size", "10B")
    assert code == 0 and "2 files" in said
    np.testing.assert_array_equal(find([tmp_path / "third"])["w"].read(), W)


def test_a_part_of_the_parameters_is_said_to_be_one(run, tmp_path):
    save(tmp_path / "run", 1, trainable_only=True)
    assert "the trained parameters alone" in run("export", tmp_path / "run", tmp_path / "out")[1]
    assert "those that are trained alone" in run("inspect", tmp_path / "run")[1]


def test_what_cannot_be_is_told_in_one_line(run, root, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "net.py").write_text(MODEL)
    (tmp_path / "w.bin").write_bytes(b"")
    for verb in (["inspect"], ["verify"], ["prune", "--keep-last", 1]):
        assert "empty: has no checkpoints" in refused(run, *verb, tmp_path / "empty")
        assert "nowhere: no such folder" in refused(run, *verb, tmp_path / "nowhere")
    for verb in ("inspect", "verify"):
        assert "has no step 7; there are 50, 100" in refused(run, verb, root, 7)
    new = tmp_path / "new"
    assert "has no step 7" in refused(run, "export", root, new, "--step", 7)
    err = refused(run, "export", root, new, "--step", 200)
    assert "step_00000200 is damaged: arrays/params%2Fw/c" in err and "before it is 150" in err
    assert "checkpoints: is there already" in refused(run, "export", root, root)
    assert "there is no folder" in refused(run, "export", root, new / "deeper")
    assert "no such file: none.json" in refused(run, "export", root, new, "--name-map", "none.json")
    model = ["--model", f"{tmp_path}/net.py:net"]
    assert "w.bin: is a pickle" in refused(run, "import", new, tmp_path / "w.bin", *model)
    assert run("export", root, tmp_path / "out")[0] == 0
    assert "has checkpoints" in refused(run, "import", root, tmp_path / "out", *model)
    other = ["--model", f"{tmp_path}/net.py:other"]
    assert "w is [3, 4] for [3, 5] of w" in refused(run, "import", new, tmp_path / "out", *other)
    assert not new.exists()
    net = tmp_path / "net.py"
    for place, why in [(net, "File exists"), (net / "new", "Not a directory"), *no_folder()]:
        err = refused(run, "import", place, tmp_path / "out", *model)
        assert f"{place}: no folder can be made there: {why}; give another" in err
    (tmp_path / "index.json").write_text(json.dumps({"weight_map": {"w": "w" * 300}}))
    err = refused(run, "import", new, tmp_path / "index.json", *model)
    assert "index.json: names wwww" in err and "which is missing" in err
    assert "found '-1'; allowed: a whole number of at least 0" in refused(
        run, "inspect", root, "-1"
    )
    assert "at most 1e18" in refused(run, "inspect", root, "9" * 5000)
    assert "--keep-last" in refused(run, "prune", root)
    assert "allowed: bytes, as in 5GB" in refused(
        run, "export", root, new, "--max-shard-size", "5G"
    )
    assert "VERB" in refused(run)


def no_folder():
    """A place where the system makes none for anybody."""
    return (
        [(Path("/proc/jzero"), "No such file or directory")] if Path("/proc/self").exists() else []
    )


def test_sizes():
    assert byte_count("5GB") == 5 * 10**9 and byte_count("2 MiB") == 2**21
    assert byte_count("123") == byte_count("123b") == 123
