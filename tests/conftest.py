"""Eight virtual CPU devices for every test, set up before JAX has looked for any."""

import os

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jzero.mesh import make_zero_mesh

jax.config.update("jax_platforms", "cpu")
os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    # Compiling is what tests spend their time on; this is LLVM's part of it.
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


@pytest.fixture
def mesh_of():
    """n -> a ZeroMesh over the first n devices, one axis `data`."""
    return lambda n: make_zero_mesh(Mesh(np.array(jax.devices()[:n]), ("data",)))


# Their tests compile whole training steps.
COSTLY = {"audit", "checkpoint", "compare", "optimizers", "traffic", "training"}
# Left out by --quick: what compiles for other machines or starts processes.
SLOW = {"test_compare_cpu.py", "test_compare_gpu.py", "test_gpu.py", "test_processes.py"}


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="every combination, not only every pair")
    parser.addoption(
        "--quick",
        action="store_true",
        help=f"without slow tests, and of those in {', '.join(sorted(COSTLY))} one case each",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: runs with --full only")
    config.addinivalue_line("markers", "slow: does not run with --quick")


def pytest_collection_modifyitems(config, items):
    # An address differs between the workers of pytest-xdist, which then refuse to start.
    if unstable := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(f"a test's name holds an address, give it ids: {unstable[0]}")
    left_out = set()
    if not config.getoption("--full"):
        left_out |= {item for item in items if item.get_closest_marker("full")}
    if config.getoption("--quick"):
        left_out |= {
            item for item in items if item.get_closest_marker("slow") or item.path.name in SLOW
        }
        seen = set()
        for item in items:
            if item not in left_out and not COSTLY.isdisjoint(item.path.parts):
                test = (item.path, item.originalname)
                left_out |= {item} if test in seen else set()
                seen.add(test)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
