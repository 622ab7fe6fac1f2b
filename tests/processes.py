"""Processes that work together over gloo: the test's side, and the worker's."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax


@contextmanager
def started(
    worker: Path, arguments: Sequence[Sequence[object]], devices: int
) -> Iterator[list[subprocess.Popen]]:
    """A process for each list of arguments, with virtual devices each; none is left at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(worker.parent), *sys.path]),
    }
    running = []
    try:
        for number, given in enumerate(arguments):
            command = [sys.executable, worker, coordinator, len(arguments), number, *given]
            running.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def finish(running: Sequence[subprocess.Popen]) -> list[str]:
    """What each printed, once all have ended well."""
    printed = []
    for process in running:
        out, error = process.communicate(timeout=300)
        assert process.returncode == 0, (out + error)[-3000:]
        printed.append(out)
    return printed


def join() -> list[str]:
    """In a worker, before JAX is used: joins the others. The arguments of its own are left."""
    coordinator, processes, number, *own = sys.argv[1:]
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, int(processes), int(number))
    return own
