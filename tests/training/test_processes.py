"""Two processes of four devices train as one process of eight does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from models import distance

WORKER = Path(__file__).with_name("process_worker.py")
FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


def start(processes: int, process: int, port: int, out: Path) -> subprocess.Popen:
    flags = f"{FLAGS} --xla_force_host_platform_device_count={8 // processes}"
    command = [sys.executable, WORKER, f"127.0.0.1:{port}", str(processes), str(process), out]
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    environment["PYTHONPATH"] = os.pathsep.join([str(WORKER.parent), *sys.path])
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def together(processes: int, folder: Path) -> list[dict[str, np.ndarray]]:
    """What each process saw, once all have ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    outs = [folder / f"{processes}-{process}.npz" for process in range(processes)]
    running = [start(processes, i, port, out) for i, out in enumerate(outs)]
    try:
        for process in running:
            text, _ = process.communicate(timeout=300)
            assert process.returncode == 0, text[-3000:]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [dict(np.load(out)) for out in outs]


def test_two_processes_train_as_one(tmp_path):
    (want,) = together(1, tmp_path)
    first, second = together(2, tmp_path)
    assert first.keys() == second.keys() == want.keys()
    for name in want:
        assert np.array_equal(first[name], second[name]), name
        bound = 5e-3 if name.startswith("nnx-2") else 1e-5
        assert distance(first[name], want[name]) < bound, name
