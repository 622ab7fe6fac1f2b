"""The command from end to end on virtual CPU devices, and how its errors are told."""

import json
from pathlib import Path

import pytest
from commands import FACTORIES, Run, compare
from factories import LAYERS, PARAMETERS, ROW_BYTES, VOCABULARY, WIDTH

from jzero import targets
from jzero.compare.refused import needed, there

SMALL = ("--model", f"{FACTORIES}:small")
FIELDS = {"model", "parameters", "target", "devices", "jax", "xla_flags", "rows"}
BYTES = {"argument_bytes", "temp_bytes", "alias_bytes", "peak_bytes", "host_bytes"}
ROW = {"stage", "capacity_bytes", "fits", "state_bytes", "collectives", "comm_bytes"}
ROW |= {"comm_ratio", "overlapped_fraction", "compile_seconds", "error"} | BYTES


def test_all_stages(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    found = compare(tmp_path / "out.json", "small", "cpu:8")
    assert found.keys() >= FIELDS
    assert found["model"].endswith("factories.py:small")
    assert (found["parameters"], found["target"], found["devices"]) == (PARAMETERS, "cpu:8", 8)
    assert any("device_count=8" in flag for flag in found["xla_flags"])
    assert [row["stage"] for row in found["rows"]] == [0, 1, 2, 3]
    gathered = 2 * PARAMETERS - 2 * VOCABULARY * WIDTH  # embedding and head once, layers twice
    ratios = [2, 2, 2, 1 + gathered / PARAMETERS]
    state = [14, 2 + 12 / 8, 2 + 12 / 8, 12 / 8]
    for row, ratio, each in zip(found["rows"], ratios, state, strict=True):
        assert row.keys() >= ROW
        assert all(type(row[name]) is int for name in BYTES | {"comm_bytes"})
        assert set(row["state_bytes"]) == {"params", "master", "optimizer", "other"}
        # The arguments are the state and one row of tokens; the state is the closed form.
        assert row["argument_bytes"] == sum(row["state_bytes"].values()) + ROW_BYTES
        assert row["argument_bytes"] == pytest.approx(each * PARAMETERS, rel=1e-3)
        assert row["peak_bytes"] >= row["argument_bytes"] + row["temp_bytes"]
        assert (row["capacity_bytes"], row["fits"], row["error"]) == (None, None, None)
        assert row["overlapped_fraction"] is None and row["compile_seconds"] > 0
        # XLA:CPU sends bf16 as f32: elements are the paper's, bytes twice them.
        assert row["comm_ratio_elements"] == pytest.approx(ratio, rel=1e-3)
        assert row["comm_ratio"] == pytest.approx(2 * ratio, rel=1e-3)
        for each in row["collectives"]:
            assert {"op", "axes", "dtype", "count", "bytes"} <= each.keys()
            assert each["axes"] == ["data"] and each["dtype"] == "f32"
    scattered = [c for c in found["rows"][3]["collectives"] if c["op"] == "reduce-scatter"]
    assert sum(c["count"] for c in scattered) == 2 + 2 * LAYERS
    out, err = capfd.readouterr()
    told = [line.partition(":")[0] for line in err.splitlines()]
    assert told == [f"compiling stage {stage}" for stage in range(4)]
    assert f"{PARAMETERS:,} parameters on cpu:8" in out
    assert "reduce-scatter" in out and "XLA options: " in out


def test_a_mesh_with_replicas_and_several_micro_batches(tmp_path: Path):
    """Stage 2 with A micro-batches: A + 1 in the group, and each shard over the replicas."""
    found = compare(
        tmp_path / "out.json",
        "small",
        "cpu:8",
        *("--stages", "2", "--replicas", "2", "--accumulate", "3", "--micro-batch", "2"),
        *("--dump-hlo", str(tmp_path / "hlo")),
    )
    assert found["mesh"] == {"replica": 2, "data": 4}
    assert (found["micro_batch"], found["accumulate"]) == (2, 3)
    (row,) = found["rows"]
    assert {tuple(each["axes"]) for each in row["collectives"]} == {
        ("data",),
        ("replica",),
        ("replica", "data"),
    }
    assert row["argument_bytes"] == sum(row["state_bytes"].values()) + 6 * ROW_BYTES
    # Over replicas an all-reduce sends 2 (R-1)/R of a quarter: in units of (N-1)/N, a third.
    assert row["comm_ratio_elements"] == pytest.approx(3 + 1 + 2 * (1 / 2) / 4 / (3 / 4), rel=1e-3)
    text = (tmp_path / "hlo" / "stage2.hlo.txt").read_text()
    assert text.startswith("HloModule") and "ENTRY" in text
    assert [path.name for path in (tmp_path / "hlo").iterdir()] == ["stage2.hlo.txt"]


def test_beside_a_tensor_axis_psi_is_a_tensor_shards(tmp_path: Path):
    mesh = ("--mesh", "data=4,tensor=2", "--stages", "3", "--micro-batch", "5")
    found = compare(tmp_path / "out.json", "tensor", "cpu:8", *mesh)
    (row,) = found["rows"]
    assert found["parameters"] == 3 * 2 * 16 * 32
    assert row["comm_ratio_elements"] == pytest.approx(3, rel=0.01)
    over = {tuple(each["axes"]) for each in row["collectives"]}
    assert {("data",), ("tensor",)} <= over
    sent = sum(each["bytes"] for each in row["collectives"] if "tensor" not in each["axes"])
    assert row["comm_bytes"] == sent, "what moves over the tensor axis is the model's own"


def test_the_workloads_own_configuration_and_json_alone(run: Run):
    code, out, err = run(
        "--model", f"{FACTORIES}:configured", "--target", "cpu:2", "--stages", "1", "--json", "-"
    )
    data = json.loads(out)
    assert code == 0 and "parameters on cpu:2" in err
    assert (data["micro_batch"], data["accumulate"]) == (3, 2)
    state = data["rows"][0]["state_bytes"]
    assert (state["params"], state["master"]) == (4 * PARAMETERS, 0), "fp32 is its own master"


def test_a_program_that_is_refused_for_memory_is_a_row(run: Run, tmp_path: Path):
    out = tmp_path / "out.json"
    code, shown, _ = run(
        "--model",
        f"{FACTORIES}:too_large",
        "--target",
        "cpu:2",
        "--stages",
        "3",
        "--json",
        str(out),
    )
    (row,) = json.loads(out.read_text())["rows"]
    assert code == 0 and row["fits"] is False
    assert row["peak_bytes"] == round(34.42 * 2**30)
    assert "it needs 36.96 GB (34.42 GiB) of 16.91 GB (15.75 GiB)" in row["error"]
    assert "it needs 36.96 GB" in shown
    rest = row.keys() - {"stage", "fits", "peak_bytes", "error"}
    assert {row[name] for name in rest} == {None}


@pytest.mark.parametrize(
    "factory, code, message",
    [
        ("raises", 2, "raises() raised KeyError: 'vocabulary'"),
        ("nobody", 2, "factories there: small, pinned, mixed"),
        ("cannot_trace", 2, "the workload cannot be traced: KeyError: 'nothing'"),
        ("cannot_compile", 1, "stage 0 does not compile: RuntimeError: INTERNAL: the compiler is"),
        ("dies", 1, "ended with exit code 7 and said the last words"),
    ],
)
def test_what_goes_wrong_in_a_worker_is_one_line(
    run: Run, tmp_path: Path, factory: str, code: int, message: str
):
    out = tmp_path / "out.json"
    where = ("--model", f"{FACTORIES}:{factory}", "--target", "cpu:2", "--json", str(out))
    got, shown, err = run(*where)
    assert (got, shown) == (code, "") and not list(tmp_path.iterdir()), "nothing half-written"
    assert err.count("\n") == 1 and err.startswith("jzero compare: error: ") and message in err


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "arguments are required: --model, --target"),
        ((*SMALL, "--target", "h999:8"), "unknown accelerator 'h999'"),
        ((*SMALL, "--target", "here:0"), "target 'here:0': '0' is not a number of devices"),
        ((*SMALL, "--target", "here:two"), "write here for all of them or here:2 for two"),
        (("--model", "none.py:f", "--target", "cpu:2"), "no such file: none.py"),
        (("--model", "none.py", "--target", "cpu:2"), "give a file and a factory in it"),
        ((*SMALL, "--target", "cpu:2", "--stages", "1,4"), "--stages: found '1,4'"),
        ((*SMALL, "--target", "cpu:2", "--stages", "1,1"), "each once"),
        ((*SMALL, "--target", "cpu:2", "--micro-batch", "0"), "--micro-batch: found '0'"),
        ((*SMALL, "--target", "cpu:8", "--mesh", "data"), "--mesh: found 'data'"),
        ((*SMALL, "--target", "cpu:8", "--mesh", "data=2,data=4"), "axes and their sizes"),
        ((*SMALL, "--target", "cpu:8", "--mesh", "data=2"), "makes 2 devices, but cpu:8 has 8"),
        ((*SMALL, "--target", "cpu:8", "--replicas", "3"), "does not divide the 8 devices"),
        (
            (*SMALL, "--target", "cpu:8", "--mesh", "replica=2,data=4", "--replicas", "2"),
            "--mesh has an axis replica already",
        ),
        ((*SMALL, "--target", "cpu:2", "--offload", "optimizer"), "--offload: not yet"),
        ((*SMALL, "--target", "cpu:2", "--json", "/none/x.json"), "there is no folder /none"),
        ((*SMALL, "--target", "cpu:2", "--dump-hlo", FACTORIES), "is not a folder"),
    ],
    ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) else None,
)
def test_bad_usage_is_one_line(run: Run, arguments: tuple[str, ...], message: str):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1) and message in err


def test_a_missing_compiler_says_what_to_install(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(targets, "plugin_installed", lambda kind: False)
    code, out, err = run(*SMALL, "--target", "h100:8")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert 'pip install ".[compile-only]" in a clone' in err


@pytest.mark.parametrize(
    "message, needs, has",
    [
        ("temporaries (34.42G) exceeds available HBM (15.75G).", 34.42 * 2**30, 15.75 * 2**30),
        ("Used 26.41G of 15.75G hbm. Exceeded by 10.66G.", 26.41 * 2**30, 15.75 * 2**30),
        ("Out of memory while trying to allocate 1024 bytes.", 1024, None),
        ("failed to allocate 2.5MiB", 2.5 * 2**20, None),
        ("no figure at all", None, None),
    ],
)
def test_what_compilers_say(message: str, needs: float | None, has: float | None):
    whole = [None if number is None else round(number) for number in (needs, has)]
    assert [needed(message), there(message)] == whole
