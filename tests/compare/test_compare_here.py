"""The target `here`: the step that was compiled runs on the devices present, and is measured."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import FACTORIES, Run
from factories import mixed
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from jzero import targets
from jzero.compare import here, program, report, running
from jzero.compare.request import Request
from jzero.compare.row import Result, Row
from jzero.errors import JzeroError, RunFailed

MIXED = f"{FACTORIES}:mixed"
NOTICE = "wall_clock_breakdown: no effect"


def measure(stage: int = 3, target: str = "here:2") -> tuple[dict[str, Any], Row]:
    """In this process, which has eight devices."""
    answer = program.compile_stage(Request(MIXED, target, stage))
    return answer, Row.from_dict(answer["row"])


@pytest.mark.slow
def test_the_users_own_devices_and_environment(tmp_path: Path):
    """From end to end; and the process that was started touches no device."""
    out = tmp_path / "out.json"
    where = ["--model", MIXED, "--target", "here", "--replicas", "2", "--stages", "0,3"]
    code = (
        "import sys\n"
        "from jax._src import xla_bridge\n"
        "from jzero.cli import main\n"
        "assert main(sys.argv[1:]) == 0\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=4")
    done = subprocess.run(
        [sys.executable, "-c", code, "compare", *where, "--json", str(out)],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (found["target"], found["devices"], found["platform"]) == ("here", 4, "cpu")
    assert (found["description"], found["memory_bytes"]) == ("4 x cpu", None)
    assert found["mesh"] == {"replica": 2, "data": 2} and found["accumulate"] == 2
    assert found["xla_flags"] == flags.split(), "no flag but the user's own"
    for row in found["rows"]:
        fastest, median, slowest = (
            row[f"seconds_{name}"] for name in ("fastest", "per_step", "slowest")
        )
        assert 0 < fastest <= median <= slowest
        assert running.LEAST <= row["timed_steps"] <= running.MOST
        assert (row["measured_peak_bytes"], row["fits"], row["error"]) == (None, None, None)
        assert row["peak_bytes"] > 0 and row["collectives"] and row["notes"] == []
    assert "Measured as the steps ran" in done.stdout
    assert "These devices do not tell their peak" in done.stdout
    # Each stage's process said it.
    assert done.stderr.count(NOTICE) == 1 == len(found["notices"])


def test_the_step_that_was_compiled_is_what_runs(monkeypatch: pytest.MonkeyPatch):
    compiles, losses = [], []
    compile, call = jax.stages.Lowered.compile, jax.stages.Compiled.__call__

    def compiling(self, *args, **options):
        compiles.append(compile(self, *args, **options))
        return compiles[-1]

    def calling(self, state, batch):
        assert self is compiles[0]
        state, metrics, health = call(self, state, batch)
        losses.append(float(metrics["loss"]))
        return state, metrics, health

    monkeypatch.setattr(jax.stages.Lowered, "compile", compiling)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", calling)
    answer, row = measure()
    assert len(compiles) == 1
    assert row.timed_steps == len(losses) - running.WARM_UP >= running.LEAST
    assert all(np.isfinite(losses)) and losses[-1] < losses[0], "real steps: the loss falls"
    assert (answer["target"], answer["devices"], answer["mesh"]) == ("here:2", 2, {"data": 2})


def test_made_up_values():
    like = mixed().batch(8)
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("data",)), PartitionSpec("data"))
    made = running.make_batch(like, sharding)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), like
    )
    assert all(x.sharding.is_equivalent_to(sharding, x.ndim) for x in made.values())
    assert not made["label"].any() and made["mask"].all() and jnp.std(made["x"]) > 0.5


@pytest.mark.parametrize(
    "peaks, measured, notes",
    [
        ([100, 150], 150, []),
        ([150, 150], None, ["making the state took more memory than a step"]),
    ],
)
def test_measured_peak(monkeypatch: pytest.MonkeyPatch, peaks, measured, notes):
    """A device tells the most since its process began: a step's own only where a step is more."""
    told = iter(peaks)
    monkeypatch.setattr(running, "peak", lambda devices: next(told))
    _, row = measure(stage=1)
    assert row.measured_peak_bytes == measured and row.seconds_per_step is not None
    assert [note.split(",")[0] for note in row.notes or ()] == notes


def test_out_of_memory_as_it_runs_is_a_row(monkeypatch: pytest.MonkeyPatch):
    def call(self, state, batch):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 2500 bytes.")

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call)
    _, row = measure()
    assert row.error == (
        "it compiles, but runs out of memory as it runs: 2.50 kB (2.44 KiB) could not be allocated"
    )
    assert row.peak_bytes and row.collectives, "the compiler's figures stay"
    assert (row.seconds_per_step, row.timed_steps) == (None, None)


def test_another_failure_as_it_runs(monkeypatch: pytest.MonkeyPatch):
    def call(self, state, batch):
        raise RuntimeError("INTERNAL: the device\nis gone")

    monkeypatch.setattr(jax.stages.Compiled, "__call__", call)
    with pytest.raises(RunFailed) as caught:
        measure(stage=2)
    assert str(caught.value) == "stage 2 does not run: RuntimeError: INTERNAL: the device is gone"


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_is_one_line(run: Run):
    code, out, err = run("--model", MIXED, "--target", "here", "--mesh", "data=3")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--mesh: data=3 makes 3 devices, but here has 8" in err


def test_other_commands_do_not_look_at_devices():
    with pytest.raises(JzeroError, match="only `jzero compare` looks at the devices present"):
        targets.parse("here")


def test_more_devices_than_there_are():
    with pytest.raises(JzeroError, match="'here:9': there are 8 devices .cpu.; write here for all"):
        here.present("here:9")


def test_no_devices(monkeypatch: pytest.MonkeyPatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no GPU\nand more")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(JzeroError) as caught:
        here.present("here")
    assert str(caught.value) == (
        "target 'here': JAX finds no devices: Unable to initialize backend 'cuda': no GPU"
    )


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(JzeroError, match="the devices belong to 2 processes, and compare runs in"):
        here.present("here")


def test_what_devices_tell_of_their_memory(monkeypatch: pytest.MonkeyPatch):
    def device(platform: str, **stats: int):
        return SimpleNamespace(platform=platform, memory_stats=lambda: stats or None)

    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert here.capacity(device("cpu")) is None
    assert here.capacity(device("tpu", bytes_limit=95)) == 95
    # A GPU's allocator tells its own share, three quarters unless it is told otherwise.
    assert here.capacity(device("gpu", bytes_limit=60)) == 80
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", ".5")
    assert here.capacity(device("gpu", bytes_limit=60)) == 120
    fullest = [device("gpu", peak_bytes_in_use=7), device("gpu", peak_bytes_in_use=9)]
    assert here.peak(fullest) == 9
    assert here.peak([*fullest, device("gpu")]) is None


def test_the_table_has_both_peaks():
    ran = Row(
        stage=2,
        peak_bytes=1_020_000,
        measured_peak_bytes=1_000_000,
        seconds_per_step=0.25,
        seconds_fastest=0.2,
        seconds_slowest=1.5,
        timed_steps=7,
    )
    found = Result(
        model="m.py:f",
        parameters=1,
        target="here",
        devices=1,
        platform="gpu",
        description="1 x NVIDIA H200, gpu",
        memory_bytes=150_000_000_000,
        jax=jax.__version__,
        mesh={"data": 1},
        micro_batch=1,
        accumulate=1,
        xla_flags=(),
        environment='XLA_FLAGS="--xla_a=true"',
        notices=(),
        rows=(Row(stage=1, error="it runs out of memory"), ran),
    )
    console = Console(width=120, file=io.StringIO())
    report.show(found, console)
    text = console.file.getvalue()
    (line,) = [line for line in text.splitlines() if "250.00 ms" in line]
    cells = [cell.strip() for cell in line.strip("│").split("│")]
    assert cells == ["2", "1.02", "1.00", "+2.0%", "250.00 ms", "200.00 ms", "1.50 s", "7"]
    assert "These steps ran without; set this before compare" in text
