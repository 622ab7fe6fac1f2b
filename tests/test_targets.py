"""Targets: their names, what is refused and how, and the devices that they give."""

import importlib.util
import os
import subprocess
import sys

import pytest

from jzero import targets
from jzero.errors import JzeroError
from jzero.targets import devices, environment, parse


@pytest.mark.parametrize(
    ("text", "kind", "count", "topology"),
    [
        ("h100:8", "gpu", 8, "1x1x8"),
        ("a100-80g:64", "gpu", 64, "1x8x8"),
        ("H200:2", "gpu", 2, "1x1x2"),
        ("b200:1024", "gpu", 1024, "1x128x8"),
        ("v5p:2x2x2", "tpu", 8, "v5p:2x2x2"),
        ("v5e:2x4", "tpu", 8, "v5e:2x4"),
        ("v6e:4x4", "tpu", 16, "v6e:4x4"),
        ("cpu:8", "cpu", 8, ""),
    ],
)
def test_names(text: str, kind: str, count: int, topology: str):
    target = parse(text)
    assert (target.name, target.kind) == (text.lower(), kind)
    assert (target.count, target.topology) == (count, topology)
    assert (target.memory_bytes is None) == (kind == "cpu")


def test_figures_come_from_the_data_files():
    h100 = parse("h100:8")
    assert h100.memory_bytes == 84942979072
    assert (h100.flops, h100.link_bytes_per_s, h100.network_bytes_per_s) == (989e12, 450e9, 50e9)
    assert parse("v5e:2x4").network_bytes_per_s is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100", "'' is not a number of devices; write one, as in h100:8"),
        ("h100:0", "'0' is not a number of devices"),
        ("h100:12", "multiple of 8: h100:8 or h100:16"),
        ("h100:2x4", "'2x4' is not a number of devices"),
        ("v5p:8", "a v5p topology has 3 dimensions, as in v5p:2x2x2"),
        ("v5e:2x2x2", "a v5e topology has 2 dimensions, as in v5e:2x2"),
        ("v6e:2x0", "a v6e topology has 2 dimensions"),
        ("mi300:8", "unknown accelerator 'mi300', known are cpu, a100-80g, h100"),
        ("gpu", "a target is a model and a size, as in h100:8"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str):
    with pytest.raises(JzeroError, match="target") as caught:
        parse(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("text", "compiler"), [("h100:8", "GPU"), ("v5e:2x4", "TPU")])
def test_a_missing_compiler_is_one_line_that_says_what_to_install(
    text: str, compiler: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    monkeypatch.setenv(
        "TPU_SKIP_MDS_QUERY", "1"
    )  # so that the test leaves the variables as they were
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost")
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    with pytest.raises(JzeroError) as caught:
        devices(parse(text))
    assert str(caught.value) == (
        f"target {text!r} needs XLA's {compiler} compiler, which is not installed: "
        'pip install ".[compile-only]" in a clone of jzero'
    )


def test_too_few_cpu_devices():
    with pytest.raises(JzeroError, match="xla_force_host_platform_device_count=4096"):
        devices(parse("cpu:4096"))


def test_environment():
    assert environment(parse("h100:8")) == {"JAX_PLATFORMS": "cpu"}
    assert environment(parse("v5p:2x2x2"))["TPU_ACCELERATOR_TYPE"] == "v5p-16"
    assert environment(parse("v5e:2x4"))["TPU_ACCELERATOR_TYPE"] == "v5litepod-8"
    assert "device_count=4 " in environment(parse("cpu:4"))["XLA_FLAGS"]


def test_gpu_devices_of_two_nodes():
    if not targets.plugin_installed("gpu"):
        pytest.skip("the compile-only GPU plugin is not installed (jax[cuda13-local])")
    found = devices(parse("h100:16"))
    assert [device.id for device in found] == list(range(16))
    assert found[0].device_kind == "NVIDIA H100 80GB HBM3"


def test_tpu_devices():
    if not targets.plugin_installed("tpu"):
        pytest.skip("the compile-only TPU plugin is not installed (jax[tpu])")
    code = (
        "from jzero.targets import devices, parse\n"
        "found = devices(parse('v5e:2x4'))\n"
        "print(len(found), found[0].platform)"
    )
    # In a process of its own: libtpu wants its variables before JAX is imported.
    variables = os.environ | environment(parse("v5e:2x4"))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    assert done.stdout.split() == ["8", "tpu"]


def test_importing_touches_no_device():
    code = (
        "import jzero.targets, jzero.hlo\n"
        "from jax._src import xla_bridge\n"
        "jzero.targets.parse('h100:8')\n"
        "assert not xla_bridge.backends_are_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
