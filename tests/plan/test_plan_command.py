"""The command line: what goes where, and how errors are told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jzero.cli import main
from jzero.cli.parser import count

ROOT = Path(__file__).parents[2]
MODEL = str(ROOT / "examples" / "lm" / "model.py")
BASE = ["plan", "--params", "13e9", "--devices", "8"]
FIELDS = ["stage", "params_bytes", "gradients_bytes", "optimizer_bytes", "total_bytes"]


def run(capsys, *arguments):
    """(exit code, standard output, standard error)"""
    try:
        code = main(list(arguments))
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


def test_the_table(capsys):
    code, out, err = run(capsys, *BASE)
    assert (code, err) == (0, "")
    for text in ("208.00", "71.50", "48.75", "26.00", "GiB", "24.21", "39,000,000,000 = 3ψ"):
        assert text in out


def test_json_has_standard_output_to_itself(capsys):
    code, out, err = run(capsys, *BASE, "--json", "-")
    data = json.loads(out)
    assert code == 0 and "208.00" in err
    assert (data["params"], data["devices"]) == (13 * 10**9, 8)
    assert [row["total_bytes"] for row in data["rows"]] == [
        208 * 10**9,
        71_500_000_000,
        48_750_000_000,
        26 * 10**9,
    ]
    assert [row["comm_elements"] for row in data["rows"]] == [n * 13 * 10**9 for n in (2, 2, 2, 3)]
    for row in data["rows"]:
        assert {*FIELDS, "comm_elements"} <= row.keys()
        assert all(type(row[name]) is int for name in FIELDS)


def test_json_in_a_file(capsys, tmp_path):
    code, out, err = run(capsys, *BASE, "--json", str(tmp_path / "plan.json"))
    assert code == 0 and "208.00" in out and err == ""
    assert json.loads((tmp_path / "plan.json").read_text())["devices"] == 8


def test_one_stage_with_everything_said(capsys):
    code, out, _ = run(
        capsys,
        *("plan", "--params", "800", "--devices", "8", "--stage", "2", "--dtype", "fp16"),
        *("--grad-accum-dtype", "fp16", "--optimizer-bytes", "4", "--accumulate", "3"),
        *("--offload", "optimizer", "--json", "-"),
    )
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row == {
        "stage": 2,
        "params_bytes": 1600,
        "gradients_bytes": 200,
        "optimizer_bytes": 0,
        "total_bytes": 1800,
        "comm_elements": 3200,
        "host_bytes": 800,
    }


def test_a_model_on_a_target(capsys):
    code, out, err = run(
        capsys, "plan", "--model", f"{MODEL}:tiny", "--target", "h100:8", "--json", "-"
    )
    data = json.loads(out)
    assert (code, data["params"], data["devices"]) == (0, 1_049_728, 8)
    assert data["recommended_stage"] == 0
    assert data["rows"][3]["fits"] is True and data["rows"][3]["break_even_tokens"] > 0
    assert "Recommended: stage 0" in err and "Stage 3: a mistake" in err


def test_tokens_decide_the_micro_batch_of_a_model(capsys):
    arguments = ["plan", "--model", f"{MODEL}:tiny", "--target", "h100:8", "--json", "-"]
    _, out, _ = run(capsys, *arguments, "--tokens", "512")
    assert json.loads(out)["tokens"] == 4 * 129


def test_a_files_own_printing_stays_out_of_the_json(capsys, tmp_path):
    source = Path(MODEL).read_text()
    (tmp_path / "talks.py").write_text(f"{source}\nprint('hello')\n")
    code, out, err = run(
        capsys, "plan", "--model", f"{tmp_path}/talks.py:tiny", "--devices", "2", "--json", "-"
    )
    assert code == 0 and json.loads(out)["devices"] == 2 and "hello" in err


def test_deepspeeds_estimators_are_labelled(capsys):
    arguments = ["plan", "--params", "2851e6", "--devices", "8", "--estimator", "deepspeed"]
    code, out, err = run(capsys, *arguments, "--largest-layer", "32M", "--json", "-")
    data = json.loads(out)
    assert code == 0 and "DeepSpeed's estimators (not jzero's accounting)" in err
    assert [row["stage"] for row in data["rows"]] == [2, 2, 3, 3, 3, 3, 3, 3]
    assert [row["stage"] for row in data["autotuner"]] == [0, 1, 2, 3]
    code, out, _ = run(capsys, *arguments, "--stage", "2")
    assert code == 0 and "11.28" in out
    code, _, err = run(
        capsys,
        *("plan", "--model", f"{MODEL}:tiny", "--devices", "8", "--estimator", "deepspeed"),
        *("--json", "-"),
    )
    assert code == 0


ERRORS = [
    ([], "no command given; there are: plan"),
    (["plna"], "plan"),
    (["plan"], "one of the arguments --params --model is required"),
    (["plan", "--params", "13e9"], "--devices: missing"),
    (["plan", "--params", "x", "--devices", "8"], "--params: found 'x'; allowed: a number such"),
    (["plan", "--params", "0.5", "--devices", "8"], "a whole number from 1"),
    (["plan", "--params", "1e999", "--devices", "8"], "a whole number from 1 to 1e18"),
    (["plan", "--params", "13B", "--devices", "0"], "--devices: found '0'"),
    ([*BASE, "--stage", "4"], "--stage: invalid choice: 4"),
    ([*BASE, "--dtype", "int8"], "--dtype: invalid choice"),
    ([*BASE, "--offload", "nvme"], "--offload: found 'nvme'; allowed: optimizer, params"),
    ([*BASE, "--model", "m.py:f"], "not allowed with argument"),
    ([*BASE, "--target", "h100:16"], "--target h100:16 has 16 devices"),
    ([*BASE, "--target", "h999:8"], "unknown accelerator 'h999'"),
    ([*BASE, "--micro-batch", "2"], "--micro-batch: only with --model"),
    ([*BASE, "--largest-layer", "2"], "--largest-layer: only with --estimator deepspeed"),
    ([*BASE, "--estimator", "deepspeed"], "--largest-layer: missing"),
    ([*BASE, "--estimator", "deepspeed", "--target", "h100:8"], "--target: not with DeepSpeed's"),
    ([*BASE, "--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
    ([*BASE, "--json", "/"], "is a folder"),
    ([*BASE, "--surprise"], "unrecognized arguments: --surprise"),
    (["plan", "--model", "model.py", "--devices", "8"], "give a file and a factory in it"),
    (["plan", "--model", "none.py:f", "--devices", "8"], "no such file: none.py"),
    (["plan", "--model", f"{MODEL}:nobody", "--devices", "8"], "factories there: tiny, gpt2"),
    (
        ["plan", "--model", f"{MODEL}:tiny", "--devices", "8", "--optimizer-bytes", "4"],
        "--optimizer-bytes: with --model",
    ),
    (
        ["plan", "--model", f"{MODEL}:tiny", "--devices", "8", "--offload", "optimizer"],
        "--offload: not yet with --model",
    ),
]


@pytest.mark.parametrize("arguments, message", ERRORS, ids=[" ".join(a[-2:]) for a, _ in ERRORS])
def test_bad_usage_is_one_line_and_exit_code_2(capsys, arguments, message):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n")
    assert err.startswith("jzero") and ": error: " in err and message in err


@pytest.mark.parametrize(
    "text, number",
    [("13B", 13 * 10**9), ("7.5e9", 7_500_000_000), ("125M", 125 * 10**6), ("1T", 10**12)]
    + [("13e9", 13 * 10**9), ("2.5k", 2500), ("1,000", 1000), ("1_000", 1000), ("7", 7)],
)
def test_numbers_as_people_write_them(text, number):
    assert count(text) == number


def test_as_a_module():
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "jzero", *BASE, "--devices", "x"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("jzero plan: error: argument --devices")
