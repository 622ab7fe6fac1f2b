"""The training script as a user runs it: its files, its figures, and what it says of bad input."""

import json
import socket

import numpy as np
import pytest
from lm_runs import FLAGS, Session, config, corpus, lines, run, start

# Most tests look at one run or one process; two workers would start two of each.
pytestmark = pytest.mark.xdist_group("lm_train")

METRICS = {
    "step",
    "loss",
    "lr",
    "grad_norm",
    "grad_norm_clipped",
    "loss_scale",
    "skipped",
    "tokens_per_second",
}
SUMMARY = {
    "parameters",
    "stage",
    "devices",
    "steps",
    "train_loss",
    "validation_loss",
    "bits_per_byte",
    "unigram_bits_per_byte",
    "bytes_per_device",
}


# --- a run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Eight steps at stage 3 in bf16, two micro-batches each, on 8 virtual devices."""
    folder = tmp_path_factory.mktemp("trained")
    settings = config(
        folder,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=2,
        bf16={"enabled": True},
        csv_monitor={"enabled": True, "job_name": "curves"},
    )
    given = ("--config", settings, "--data", corpus(folder), "--out", "out")
    code, out, err = run(folder, *given, "--devices", 8, "--steps", 8)
    assert code == 0, err
    return folder / "out", out, err


def test_each_step_has_its_line_of_metrics(trained):
    folder, _, _ = trained
    rows = lines(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row.keys() == METRICS for row in rows)
    assert all(row["skipped"] is False and row["loss_scale"] == 1.0 for row in rows)
    assert all(row["grad_norm_clipped"] <= min(row["grad_norm"], 1.001) for row in rows)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    assert rows[0]["lr"] == 0 and rows[-1]["lr"] > 1e-3
    assert abs(rows[0]["loss"] - np.log(2048)) < 0.3
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.5


def test_the_summary_says_what_was_reached(trained):
    folder, out, _ = trained
    summary = json.loads((folder / "summary.json").read_text())
    assert summary.keys() >= SUMMARY
    assert (summary["parameters"], summary["stage"]) == (1_049_728, 3)
    assert (summary["devices"], summary["steps"]) == (8, 8)
    assert summary["train_loss"] == lines(folder / "metrics.jsonl")[-1]["loss"]
    assert 0 < summary["validation_loss"] < np.log(2048)
    assert summary["bits_per_byte"] > 0 and summary["unigram_bits_per_byte"] > 0
    for name in ("bits_per_byte", "unigram_bits_per_byte"):
        assert f"{summary[name]:.4f} bits per byte" in out


def test_predicted_bytes_of_all_stages_are_those_of_the_shards(trained):
    folder, out, _ = trained
    summary = json.loads((folder / "summary.json").read_text())
    stages = summary["stages"]
    assert [row["stage"] for row in stages] == [0, 1, 2, 3]
    for row in stages:
        assert row["measured"] == {kind: row[kind] for kind in row["measured"]}
        assert row["measured"].keys() == {"params", "master", "optimizer", "other"}
        assert f"{row['state']:,}" in out
    assert summary["bytes_per_device"] == stages[3]["measured"]
    # bf16 copies and fp32 masters with two moments, each whole or an eighth.
    count = summary["parameters"]
    assert stages[0]["params"] == 2 * count and stages[0]["master"] == 4 * count
    assert stages[1]["master"] == 4 * count // 8
    assert stages[3]["params"] == 0
    assert [row["gradients"] for row in stages] == [4 * count, 4 * count, count // 2, count // 2]


def test_the_configuration_is_printed_and_saved_as_it_holds(trained):
    folder, out, _ = trained
    saved = json.loads((folder / "config.json").read_text())
    assert saved["scheduler"]["params"]["total_num_steps"] == 8
    assert saved["optimizer"]["params"]["betas"] == [0.9, 0.95]
    for key, value in saved.items():
        assert f"{key}: {json.dumps(value)}" in out


def test_progress_is_told_in_lines_where_there_is_no_terminal(trained):
    _, out, err = trained
    assert "step 1/8: loss" in err and "step 8/8: loss" in err and "00:00:00 left" in err
    assert "\x1b" not in out + err and "\r" not in out + err


def test_monitors_write_beside_the_metrics(trained):
    folder, _, _ = trained
    rows = (folder / "curves" / "Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(rows) == 8 and rows[-1].startswith("128,")


@pytest.mark.slow
def test_two_processes_write_one_set_of_files(tmp_path, trained):
    """Also another stage: it must not show in the losses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = config(
        tmp_path,
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=2,
        bf16={"enabled": True},
        zero_optimization={"stage": 1},
    )
    given = ("--config", settings, "--data", corpus(tmp_path), "--out", "out", "--steps", 3)
    common = {
        "XLA_FLAGS": f"{FLAGS} --xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    both = [start(tmp_path, *given, **common, JAX_PROCESS_ID=str(i)) for i in range(2)]
    try:
        said = [process.communicate(timeout=400) for process in both]
    finally:
        for process in both:
            process.kill()
    assert [process.returncode for process in both] == [0, 0], said
    assert "step 3/3: loss" in said[0][1] and "loss" not in said[1][0] + said[1][1]
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["devices"], summary["stage"]) == (8, 1)
    # The other run is longer, but both are still warming up.
    found, other = lines(tmp_path / "out/metrics.jsonl"), lines(trained[0] / "metrics.jsonl")
    for one, another in zip(found, other[:3], strict=True):
        assert one["loss"] == pytest.approx(another["loss"], abs=2e-2)


# --- what cannot be run


def write(folder, text):
    path = folder / "bad.json"
    path.write_text(text)
    return path


BAD = {
    "no config": (lambda f: [], "--config"),
    "missing config": (lambda f: ["--config", f / "none.json"], "none.json"),
    "config is a folder": (lambda f: ["--config", f], "directory"),
    "not JSON": (lambda f: ["--config", write(f, "{'stage': 3}")], "not valid JSON"),
    "empty config": (lambda f: ["--config", write(f, "")], "empty"),
    "unknown key": (
        lambda f: ["--config", config(f, zero_optimization={"stge": 3})],
        "zero_optimization.stge",
    ),
    "boolean as text": (lambda f: ["--config", config(f, bf16={"enabled": "yes"})], "bf16"),
    "stage 4": (
        lambda f: ["--config", config(f, zero_optimization={"stage": 4})],
        "zero_optimization.stage",
    ),
    "not yet": (
        lambda f: [
            "--config",
            config(f, zero_optimization={"offload_optimizer": {"device": "cpu"}}),
        ],
        "zero_optimization.offload_optimizer",
    ),
    "batch that does not divide": (
        lambda f: ["--config", config(f, train_batch_size=20), "--devices", 8],
        "train_batch_size",
    ),
    "no batch": (
        lambda f: [
            "--config",
            config(f, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None),
        ],
        "train_micro_batch_size_per_gpu",
    ),
    "no optimizer": (lambda f: ["--config", config(f, optimizer=None)], "optimizer"),
    "no steps": (lambda f: ["--config", config(f), "--steps", 0], "--steps"),
    "half a step": (lambda f: ["--config", config(f), "--steps", "1.5"], "--steps"),
    "no devices": (lambda f: ["--config", config(f), "--devices", 0], "--devices"),
    "too many devices": (
        lambda f: ["--config", config(f), "--devices", 9],
        "--devices 9",
    ),
    "unknown model": (lambda f: ["--config", config(f), "--model", "huge"], "huge"),
    "unknown flag": (lambda f: ["--config", config(f), "--stage", 3], "--stage"),
    "short flag": (lambda f: ["--conf", config(f)], "--config"),
    "missing data": (lambda f: ["--config", config(f), "--data", f / "none.txt"], "none.txt"),
    "too little data": (lambda f: ["--config", config(f), "--data", write(f, "a b")], "--data"),
    "resume what": (lambda f: ["--config", config(f), "--resume"], "say which run with --out"),
    "no step": (lambda f: ["--config", config(f), "--out", f, "--resume", 0], "--resume"),
    "save never": (lambda f: ["--config", config(f), "--save-every", 0], "--save-every"),
    "folder in use": (lambda f: ["--config", config(f), "--out", f], "not empty; give a new"),
    "out is a file": (lambda f: ["--config", config(f), "--out", config(f)], "is a file"),
}


def overflowing(folder):
    """fp16 with a loss scale that is too large and may not fall."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "min_loss_scale": 2.0**40}
    settings = config(folder, fp16=fp16, train_micro_batch_size_per_gpu=1)
    return ["--config", settings, "--data", corpus(folder), "--out", folder / "new", "--steps", 9]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    found = {}
    with Session(tmp_path_factory.mktemp("all")) as session:
        cases = {name: arguments for name, (arguments, _) in BAD.items()}
        for name, arguments in {**cases, "overflow": overflowing}.items():
            code, _, err = session("--steps", 2, *arguments(tmp_path_factory.mktemp("bad")))
            found[name] = code, err
    return found


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(answers, name):
    code, err = answers[name]
    assert code == 2, err
    assert len(err.splitlines()) == 1, err
    assert BAD[name][1] in err and err.startswith("train.py: error: ")


def test_a_run_that_fails_says_so_in_one_line_with_exit_code_1(answers):
    code, err = answers["overflow"]
    assert code == 1, err
    last = err.splitlines()[-1]
    assert last.startswith("train.py: error: step ") and "minimum loss scale" in last
    assert "Traceback" not in err and "skipped: not finite" in err


def test_bad_input_of_the_command_itself(tmp_path):
    bad = config(tmp_path, zero_optimization={"stage": 7})
    code, out, err = run(tmp_path, "--config", bad, "--out", "new")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and "zero_optimization.stage" in err
    assert not (tmp_path / "new").exists()
