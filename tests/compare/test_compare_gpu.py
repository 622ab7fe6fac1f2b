"""Compiled for GPUs that are not there: state, traffic and overlap as the ZeRO paper has them."""

from pathlib import Path

import pytest
from commands import compare
from factories import PARAMETERS, ROW_BYTES

from jzero import targets
from jzero.errors import JzeroError

TARGET = "h100:8"


@pytest.fixture(autouse=True, scope="module")
def gpu_compiler():
    try:
        targets.devices(targets.parse(TARGET))
    except JzeroError as error:
        pytest.skip(str(error))


def test_all_stages(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    found = compare(tmp_path / "out.json", "small", TARGET)
    flags = " ".join(found["xla_flags"])
    assert "--xla_gpu_enable_pipelined_all_gather=true" in flags
    assert "--xla_gpu_enable_latency_hiding_scheduler=true" in flags
    state = [14, 2 + 12 / 8, 2 + 12 / 8, 12 / 8]
    for row, each, ratio in zip(found["rows"], state, (2, 2, 2, 3), strict=True):
        assert row["argument_bytes"] - ROW_BYTES == pytest.approx(each * PARAMETERS, rel=1e-3)
        assert row["comm_ratio"] == pytest.approx(ratio, rel=0.02)
        assert row["comm_ratio"] == pytest.approx(row["comm_ratio_elements"], rel=1e-3)
        assert row["fits"] is True and row["capacity_bytes"] == 84_942_979_072
        assert row["argument_bytes"] <= row["peak_bytes"] < 17 * PARAMETERS
        large = [c for c in row["collectives"] if c["bytes"] > 2**16]
        assert {c["dtype"] for c in large} == {"bf16"}
    layers = found["rows"][3]
    assert layers["overlapped_fraction"] >= 0.98, "each layer's gathers run behind another layer"
    if found["environment"]:
        assert "pipelined_all_gather" in found["environment"]
        out, _ = capfd.readouterr()
        assert found["environment"] in out


def test_a_users_own_flag_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = "--xla_gpu_enable_pipelined_all_gather=false"
    monkeypatch.setenv("XLA_FLAGS", own)
    found = compare(tmp_path / "out.json", "small", TARGET, "--stages", "3")
    named = [flag for flag in found["xla_flags"] if "pipelined_all_gather" in flag]
    assert named == [own]
    assert found["rows"][0]["overlapped_fraction"] < 1
