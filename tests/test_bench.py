"""The benchmark runs what it says, its contenders train alike, and it refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh
from model import LMConfig

from benchmarks import bench, gpu_check, handwritten, ours, race
from benchmarks.job import Job
from jzero import factory
from jzero.errors import RunFailed

SCRIPTS = Path(__file__).parents[1] / "scripts"
CONTENDERS = ["jzero", "by hand", "data parallel", "Flax FSDP"]


SMALL = LMConfig(64, 8, layers=2, width=16, heads=2, kv_heads=1, mlp=32, tied=True)


@pytest.mark.slow
def test_contenders_train_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(bench.PRESETS, "tiny", SMALL)
    monkeypatch.setattr(bench.beside, "is_installed", lambda: False)
    out = tmp_path / "out.json"
    given = ["--stage", "3", "--precision", "bf16", "--devices", "2"]
    assert bench.main([*given, "--steps", "1", "--rounds", "2", "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["rows"]] == CONTENDERS
    assert found["rows"][0]["ratio"] == [1.0, 1.0, 1.0]
    assert found["devices"] == 2 and found["tokens_per_step"] == 2 * 8
    for row in found["rows"]:
        assert len(row["seconds"]) == 2 and min(row["seconds"]) > 0
        assert row["peak_bytes"] > 0
        np.testing.assert_allclose(row["losses"], found["rows"][0]["losses"], rtol=1e-2)
    assert found["rows"][0]["losses"][-1] < found["rows"][0]["losses"][0]
    printed = capsys.readouterr().out
    assert all(name in printed for name in CONTENDERS)
    assert "DeepSpeed: left out" in printed and "beyond its compiled function" in printed


@pytest.mark.slow
def test_stage_1_by_hand_is_the_same_step():
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    job = Job(SMALL, mesh, stage=1, precision="fp32", rows=1)
    zero, _, first = ours.contender(job)
    weights = jax.tree.map(np.asarray, zero.params(first.state))
    both = [first, handwritten.contender(job, weights, {})]
    race.losses_of([race.Runner(each, job.batch, True) for each in both], "fp32")


def test_losses_that_differ_are_no_benchmark():
    with pytest.raises(RunFailed, match=r"other: the loss of step 2 is 2.1, jzero's is 2: they"):
        race.check({"jzero": [3.0, 2.0], "other": [3.0, 2.1]}, "bf16")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--stage", "4"], "invalid choice: 4"),
        (["--model", "llama_13b_unrolled"], "invalid choice: 'llama_13b_unrolled'"),
        (["--rounds", "0"], "found '0'; allowed: a whole number of at least 1"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--devices", "99"], "--devices 99: there are 8 (cpu)"),
    ],
)
def test_bad_arguments_are_told_in_one_line(arguments, said, capsys):
    try:
        code = bench.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith("bench.py: error: ") and said in error


def test_the_check_judges_figures():
    raced = {
        "rows": [{"name": "jzero", "ratio": [1, 1, 1]}, {"name": "by hand", "ratio": [1, 1.03, 2]}],
        "host_seconds": [1e-4, 2e-4, 3e-4],
    }
    row = {"peak_bytes": 97, "measured_peak_bytes": 99, "capacity_bytes": 180}
    assert [each.holds for each in gpu_check.judge(row, raced)] == [True, True, False, True]
    row = {"peak_bytes": 90, "measured_peak_bytes": 99, "capacity_bytes": 200}
    assert [each.holds for each in gpu_check.judge(row, raced)] == [False, False, False, True]
    row = {"peak_bytes": 97, "measured_peak_bytes": None, "capacity_bytes": None}
    judged = gpu_check.judge(row, raced)
    assert [each.holds for each in judged] == [None, None, False, True]
    assert "unknown here" in judged[0].line


def test_the_check_fills_a_device(tmp_path):
    memory = 151_400_000_000
    workload = factory.load(gpu_check.filling(tmp_path, "NVIDIA H200", memory))
    model = nnx.eval_shape(lambda: workload.init(rngs=nnx.Rngs(0)))
    state = gpu_check.BYTES * sum(x.size for x in jax.tree.leaves(nnx.state(model)))
    assert 0.55 * memory < state < gpu_check.FILL * memory
    with pytest.raises(gpu_check.JzeroError, match="does not tell its memory; try --preset tiny"):
        gpu_check.filling(tmp_path, "cpu", None)


def test_the_check_refuses_a_cpu():
    done = subprocess.run(
        [sys.executable, SCRIPTS / "gpu_check.py"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.endswith("does not tell its memory; try --preset tiny\n")
