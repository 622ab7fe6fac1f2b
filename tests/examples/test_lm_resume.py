"""Checkpoints of the training script: what goes on, what is refused, and with which words."""

import json
import shutil
import signal
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from lm_runs import FLAGS, SCRIPT, Session, config, corpus, lines, start
from resume import LAST, changes, resume

import jzero
from jzero.checkpoint import Reader, folders, manifest
from jzero.errors import JzeroError

pytestmark = pytest.mark.xdist_group("lm_resume")

STEPS = 20


def rows(out: Path) -> list[dict]:
    return [
        {k: v for k, v in row.items() if k != "tokens_per_second"}
        for row in lines(out / "metrics.jsonl")
    ]


def saved(out: Path, step: int) -> dict[str, bytes]:
    folder = folders.step_folder(out / "checkpoints", step)
    reader = Reader(folder, manifest.read(folder))
    return {name: reader.region(name).tobytes() for name in reader.manifest.leaves}


def steps(out: Path) -> list[int]:
    return folders.published(out / "checkpoints")


def settings(folder: Path, name: str = "usual", **changes) -> Path:
    """Two rows a step, a schedule that does not end with the run; fp32 at stage 3."""
    (folder / name).mkdir()
    path = config(folder / name, **{"train_micro_batch_size_per_gpu": 2, **changes})
    found = json.loads(path.read_text())
    found["scheduler"]["params"] |= {"total_num_steps": STEPS, "warmup_num_steps": 5}
    path.write_text(json.dumps(found))
    return path


class Runs:
    """A folder with a finished run `straight`, and a process that runs the script in it."""

    def __init__(self, folder: Path, session: Session):
        self.folder, self.session = folder, session
        self.given = ["--config", settings(folder), "--data", corpus(folder)]
        self.given += ["--save-every", 5, "--devices", 1]

    def __call__(self, *arguments):
        """A command, whose options come after the usual ones and override them."""
        return self.session(*self.given, *arguments)

    def copy(self, name: str) -> Path:
        """A copy of the finished run."""
        shutil.copytree(self.folder / "straight", self.folder / name)
        return self.folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    environment = {
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=2",
        # For one device: JAX 0.10.2 hangs in programs from the cache that have collectives.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    with Session(folder, **environment) as session:
        found = Runs(folder, session)
        code, _, err = found("--out", "straight", "--steps", STEPS)
        assert code == 0, err
        assert steps(folder / "straight") == [10, 15, 20], "the last three, and the last step"
        yield found


# --- going on


def test_ten_steps_and_ten_resumed_are_twenty(runs):
    """Also the evaluation, and lines after the checkpoint, which are cut away."""
    out = runs.folder / "parts"
    assert runs("--out", out, "--steps", 10)[0] == 0
    assert steps(out) == [5, 10] and len(rows(out)) == 10
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 11, "loss": 1.0}\n{"step": 12, "lo')
    code, said, _ = runs("--out", out, "--steps", STEPS, "--resume")
    assert code == 0
    assert "Going on from step 10 (stage 3, devices: 1)" in said
    straight = runs.folder / "straight"
    assert rows(out) == rows(straight)
    assert saved(out, STEPS) == saved(straight, STEPS)
    one, other = (json.loads((f / "summary.json").read_text()) for f in (out, straight))
    for name in ("steps", "train_loss", "validation_loss", "bits_per_byte"):
        assert one[name] == other[name]


def test_a_finished_run_has_nothing_left_to_do(runs):
    """Whatever lies beside its last checkpoint."""
    out = runs.copy("finished")
    (out / "checkpoints" / "step_00000500").mkdir()
    half = out / "checkpoints" / ".unfinished-00000400-0123456789ab"
    shutil.copytree(folders.step_folder(out / "checkpoints", 20), half)
    before = (out / "metrics.jsonl").read_text()
    code, said, _ = runs("--out", out, "--steps", STEPS, "--resume")
    assert code == 0 and "Going on from step 20" in said
    assert (out / "metrics.jsonl").read_text() == before and steps(out) == [10, 15, 20]
    assert not half.exists()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["train_loss"] == rows(out)[-1]["loss"]


def test_a_run_goes_back_to_an_earlier_step(runs):
    """Here, to one before a damaged one. What is set aside is not taken for the last one later."""
    out = runs.copy("back")
    (folders.step_folder(out / "checkpoints", 20) / "manifest.json").write_text("{}")
    code, said, err = runs("--out", out, "--steps", STEPS, "--resume", 10)
    assert code == 0, err
    assert "Later checkpoints are in" in said and "after_00000010" in said
    assert folders.published(out / "checkpoints" / "after_00000010") == [15, 20]
    assert rows(out) == rows(runs.folder / "straight")
    assert saved(out, STEPS) == saved(runs.folder / "straight", STEPS)


def test_nothing_to_go_on_from(runs):
    out = runs.folder / "fresh"
    code, said, _ = runs("--out", out, "--steps", 2, "--resume")
    assert code == 0 and "No checkpoint in" in said and "starting afresh" in said
    assert [row["step"] for row in rows(out)] == [1, 2] and steps(out) == [2]


def test_another_stage_and_number_of_devices(runs):
    out = runs.copy("elsewhere")
    shutil.rmtree(folders.step_folder(out / "checkpoints", 20))
    changed = settings(
        runs.folder,
        "stage 1",
        zero_optimization={"stage": 1},
        train_micro_batch_size_per_gpu=1,
    )
    code, said, err = runs(
        "--out", out, "--steps", STEPS, "--resume", "--config", changed, "--devices", 2
    )
    assert code == 0, err
    assert "Going on from step 15 (stage 3, devices: 1)" in said
    assert "Changed since: zero_optimization.stage: 1, was 3" in said
    found, want = rows(out), rows(runs.folder / "straight")
    assert found[:15] == want[:15]
    np.testing.assert_allclose(
        [row["loss"] for row in found[15:]], [row["loss"] for row in want[15:]], rtol=1e-4
    )


def test_what_else_changed_is_said():
    old = {"a": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "eps": 1e-8}}}
    new = {"b": True, "optimizer": {"type": "Adam", "params": {"lr": 0.2, "eps": 1e-8}}}
    assert list(changes(old, new)) == [
        "a: null, was 1",
        "optimizer.params.lr: 0.2, was 0.1",
        "b: true, was null",
    ]


# --- what is refused


def test_a_folder_in_use_needs_resume(runs):
    """Even one that holds checkpoints alone."""
    out = runs.folder / "checkpoints-alone"
    shutil.copytree(runs.folder / "straight" / "checkpoints", out / "checkpoints")
    code, _, err = runs("--out", out, "--steps", STEPS)
    assert code == 2 and "is not empty" in err and "--resume" in err


def damage_missing(path: Path) -> None:
    path.unlink()


def damage_cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def damage_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 8
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_missing, damage_cut, damage_flipped])
@pytest.mark.parametrize("kind", ["manifest.json", "zarr.json", "c*"])
def test_a_damaged_checkpoint_ends_the_run(runs, damage, kind):
    out = runs.copy(f"{damage.__name__}-{kind.strip('*')}")
    folder = folders.step_folder(out / "checkpoints", 20)
    path = sorted(folder.rglob(kind))[-1]
    damage(path)
    code, _, err = runs("--out", out, "--steps", STEPS, "--resume")
    assert code == 2 and len(err.splitlines()) == 1, err
    assert err.startswith("train.py: error: ")
    assert f"step_00000020 is damaged: {path.relative_to(folder)} " in err
    assert "the last complete step before it is 15" in err
    assert err.strip().endswith("--resume 15 does both")
    assert len(rows(out)) == STEPS, "nothing is touched"


REFUSED = {
    "no such step": (["--resume", 7], "has no step 7; there are 10, 15, 20"),
    "fewer steps": (["--resume", "--steps", 12], "--steps 12: the checkpoint of step 20"),
    "another batch": (["--resume", "--devices", 2], "train_batch_size: the checkpoint of step 20"),
    "another corpus": (["--resume", "--data", SCRIPT], "--data: the checkpoint of step 20"),
    "another model": (["--resume", "--model", "gpt2"], "--model: the checkpoint of step 20"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_another_run_is_refused(runs, name):
    """Before anything is written, and by the option that makes it another one."""
    arguments, said = REFUSED[name]
    out = runs.folder / "straight"
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.name != ".lock")
    code, _, err = runs("--out", out, "--steps", STEPS, *arguments)
    assert code == 2 and said in err and len(err.splitlines()) == 1, err
    after = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*") if p.name != ".lock")
    assert [p for p, _ in before] == [p for p, _ in after]


# --- SIGTERM


@pytest.mark.slow
def test_sigterm_saves_the_running_step_and_ends_the_run(tmp_path):
    given = ["--config", settings(tmp_path), "--data", corpus(tmp_path), "--devices", 1]
    process = start(tmp_path, *given, "--steps", 2000, "--out", "out")
    metrics = tmp_path / "out" / "metrics.jsonl"
    try:
        end = time.monotonic() + 300
        while not (metrics.exists() and len(lines(metrics)) >= 3) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=300)
    finally:
        process.kill()
    (step,) = steps(tmp_path / "out")
    assert process.returncode == 143, err
    assert err.splitlines()[-1] == (
        f"train.py: stopped after step {step} of 2000, which is saved: go on with --resume"
    )
    assert len(lines(metrics)) == step and not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("position", [None, {"row": 1}, {"run": [1]}, {"run": None}])
def test_a_checkpoint_of_another_program_is_refused(tmp_path, position):
    zero = jzero.Zero(stage=1)
    state = zero.init(lambda key: {"w": jnp.zeros(3)}, optax.sgd(0.1))
    with zero.checkpointer(tmp_path) as checkpoints:
        checkpoints.save(state, position, force=True)
        checkpoints.wait()
        with pytest.raises(JzeroError, match="is not one that this script has saved"):
            resume(checkpoints, LAST, {"--model": "tiny"}, zero.config, 10, print)
