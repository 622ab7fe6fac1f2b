"""Eight virtual CPU devices for every test, set up before JAX is imported."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    # Compiling is what tests spend their time on; this is LLVM's part of it.
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import Mesh  # noqa: E402

from jzero.mesh import make_zero_mesh  # noqa: E402


@pytest.fixture
def mesh_of():
    """n -> a ZeroMesh over the first n devices, one axis `data`."""
    return lambda n: make_zero_mesh(Mesh(np.array(jax.devices()[:n]), ("data",)))


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every combination, not only every pair")


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full only")
    config.addinivalue_line("markers", "slow: ./scripts/test --quick leaves it out")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
