"""Before a run: its configuration, its folder, its processes and its devices."""

import os
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jzero import config as configs
from jzero.config.source import read
from jzero.errors import JzeroError


def read_config(path: str, steps: int) -> configs.Config:
    """The configuration in a file; a schedule whose length is "auto" ends with the run."""
    given = read(path)
    scheduler = given.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, dict) else None
    length = params.get("total_num_steps") if isinstance(params, dict) else None
    config = configs.load(given, total_num_steps=steps if length == "auto" else None)
    if config.optimizer is None:
        raise JzeroError('optimizer: missing; add one, such as {"type": "AdamW"}')
    return config


def check_out(folder: Path, resumed: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise JzeroError(f"--out {folder}: is a file; give a folder")
    if folder.exists() and any(folder.iterdir()) and not resumed:
        raise JzeroError(
            f"--out {folder}: is not empty; give a new folder, or go on in this one with --resume"
        )


def join_processes() -> None:
    """Makes this process one of several, where the environment says so."""
    env = os.environ
    given = "JAX_COORDINATOR_ADDRESS" in env
    counts = (env.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    if not given and all(count == "1" for count in counts):
        return

    def number(name: str) -> int | None:
        return int(env[name]) if given and name in env else None

    try:
        jax.distributed.initialize(
            num_processes=number("JAX_NUM_PROCESSES"), process_id=number("JAX_PROCESS_ID")
        )
    except (RuntimeError, ValueError) as error:
        raise JzeroError(f"this process cannot join the others: {error}") from error


def make_mesh(count: int | None) -> Mesh | None:
    """One axis `data` over the first `count` devices; None, for all of them."""
    # Without accelerators JAX makes as many CPU devices as it is told before it looks for any. They
    # take turns on few cores, so one may wait long for the others: do not take that for a hang.
    flags = os.environ.get("XLA_FLAGS", "")
    for name, seconds in (("warn_stuck", 120), ("terminate", 600)):
        flag = f"--xla_cpu_collective_call_{name}_timeout_seconds"
        if flag not in flags:
            flags = f"{flags} {flag}={seconds}"
    os.environ["XLA_FLAGS"] = flags.strip()
    if count is not None and "xla_force_host_platform_device_count" not in flags:
        if "JAX_NUM_CPU_DEVICES" not in os.environ and "JAX_COORDINATOR_ADDRESS" not in os.environ:
            jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise JzeroError(f"JAX finds no devices: {error}") from error
    if count is None:
        return None
    if count > len(devices):
        raise JzeroError(f"--devices {count}: there are {len(devices)} ({devices[0].platform})")
    if count < len(devices) and jax.process_count() > 1:
        raise JzeroError(f"--devices {count}: several processes use all their {len(devices)}")
    return Mesh(np.array(devices[:count]), ("data",))
