"""The presets: what is asked of which platform, and what the running JAX takes per program."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

import jzero
from jzero import xla_options
from jzero.xla_options import Layers, compiler_options, layer_bytes, options, preset

LAYERS, WIDTH, HIDDEN = 3, 16, 64
SCAN = Layers(scanned=10**9)


@pytest.fixture(autouse=True, scope="module")
def _flags_are_read():
    """Before tests set others."""
    jax.devices()


def stacked(key: jax.Array) -> dict[str, jax.Array]:
    return {
        "up": jax.numpy.ones((LAYERS, WIDTH, HIDDEN)),
        "down": jax.numpy.ones((LAYERS, HIDDEN, WIDTH)),
        "head": jax.numpy.ones((WIDTH, 100 * WIDTH)),
    }


def test_only_gpus_have_options_and_unrolled_layers_their_own():
    assert preset("cpu", SCAN) == preset("tpu", SCAN) == preset("gpu", Layers()) == {}
    assert preset("gpu", SCAN) == preset("cuda", SCAN) != {}
    unrolled = Layers(unrolled=True)
    assert preset("gpu", unrolled) == {
        "xla_gpu_enable_analytical_latency_estimator": True,
        "xla_gpu_dot_merger_threshold_mb": "0",
        "xla_gpu_reduce_scatter_combine_threshold_bytes": "1048576",
    }
    assert preset("tpu", unrolled) == {} and options("gpu", unrolled).per_process == {}


@pytest.mark.parametrize(
    "stage, axes, prefetch, want",
    [
        (3, {"up": 0, "down": 0}, None, Layers(2 * 2 * WIDTH * HIDDEN)),
        (2, {"up": 0, "down": 0}, None, Layers(2 * 2 * WIDTH * HIDDEN)),
        (3, {}, None, Layers(unrolled=True)),
        (2, {}, None, Layers()),
        (3, {}, 0, Layers()),
    ],
)
def test_what_is_prefetched(stage: int, axes: dict[str, int], prefetch: int | None, want: Layers):
    mesh = AbstractMesh((8,), ("data",))
    zero = jzero.Zero(stage=stage, precision="bf16", mesh=mesh, prefetch_elements=prefetch)
    assert zero.setup_for(stacked, optax.adam(1e-3), layer_axes=axes).prefetched == want


def test_one_layer_is_combined_and_never_less_than_by_default():
    name = "xla_gpu_all_gather_combine_threshold_bytes"
    assert int(str(preset("gpu", SCAN)[name])) == 1_050_000_000
    assert int(str(preset("gpu", Layers(scanned=1000))[name])) == 31_457_287


def test_every_option_is_given_one_way(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    found = options("gpu", SCAN)
    assert {**found.per_program, **found.per_process} == preset("gpu", SCAN)
    assert "xla_gpu_enable_latency_hiding_scheduler" in found.per_program
    assert compiler_options("gpu", SCAN) == found.per_program
    for name in found.per_process:
        assert f"--{name}=true" in found.line


def test_what_jax_takes_in_the_environment_alone_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(xla_options, "is_taken", lambda name: "pipelined" not in name)
    with caplog.at_level("INFO", logger="jzero"):
        found = compiler_options("gpu", SCAN)
    assert not any("pipelined" in name for name in found)
    assert 'XLA_FLAGS="--xla_gpu_enable_pipelined_all_gather=true ' in caplog.text


def test_a_users_own_flag_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    own = "xla_gpu_enable_latency_hiding_scheduler"
    monkeypatch.setenv("XLA_FLAGS", f"--{own}=false --xla_dump_to=there")
    found = options("gpu", SCAN)
    assert own not in {**found.per_program, **found.per_process}


def test_asking_works_under_any_mesh():
    xla_options.is_taken.cache_clear()
    with jax.set_mesh(Mesh(np.array(jax.devices()[2:4]), ("other",))):
        assert xla_options.is_taken("xla_gpu_enable_latency_hiding_scheduler")


@pytest.mark.parametrize(
    "settings, width",
    [({"precision": "bf16"}, 2), ({"precision": "fp32"}, 4)],
    ids=["bf16", "fp32"],
)
def test_bytes_of_a_layer(settings: dict[str, str], width: int):
    zero = jzero.Zero(stage=3, mesh=AbstractMesh((8,), ("data",)), **settings)
    axes = {"up": 0, "down": 0}
    layout = zero.setup_for(stacked, optax.adam(1e-3), layer_axes=axes).layout
    assert layer_bytes(layout) == width * 2 * WIDTH * HIDDEN
    layout = zero.setup_for(stacked, optax.adam(1e-3)).layout
    assert layer_bytes(layout) == 0, "no scan"
