"""DeepSpeed on the same job, in processes of its own, where torch and deepspeed are installed."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.job import CLIP, Job
from benchmarks.lm import Weights
from benchmarks.race import COMPARED
from jzero.errors import RunFailed
from jzero.paths import flatten

LIMIT = 600
"""Seconds."""


def is_installed() -> bool:
    """Whether both can be imported; neither is."""
    return all(importlib.util.find_spec(name) for name in ("torch", "deepspeed"))


def ranks_for(job: Job) -> int:
    """A process for each GPU; on CPUs two where they divide the rows, else one."""
    if job.mesh.devices.flat[0].platform != "cpu":
        return job.mesh.size
    return 2 if job.mesh.size * job.rows % 2 == 0 else 1


def train(job: Job, weights: Weights, steps: int, rounds: int) -> dict[str, Any]:
    """Runs `benchmarks/deepspeed_lm.py`; what it writes.

    Arguments:
      job: the job, with its whole batch.
      weights: to begin with, fp32.
      steps, rounds: to time.

    Raises:
      RunFailed: it fails, or takes too long.
    """
    ranks = ranks_for(job)
    found = {
        "sizes": asdict(job.config),
        "stage": job.stage,
        "precision": job.precision,
        "clip": CLIP,
        "ranks": ranks,
        "compared": COMPARED,
        "steps": steps,
        "rounds": rounds,
    }
    script = Path(__file__).with_name("deepspeed_lm.py")
    environment = dict(os.environ)
    if job.mesh.devices.flat[0].platform == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    with tempfile.TemporaryDirectory(prefix="jzero-bench-") as folder:
        paths = [Path(folder) / name for name in ("job.json", "weights.npz", "out.json")]
        paths[0].write_text(json.dumps(found))
        np.savez(paths[1], tokens=np.asarray(job.batch["tokens"]), **flatten(weights))
        try:
            done = subprocess.run(
                [sys.executable, script, *paths],
                env=environment,
                timeout=LIMIT,
                capture_output=True,
                text=True,
            )
        except subprocess.TimeoutExpired as error:
            raise RunFailed(f"DeepSpeed took more than {LIMIT} s") from error
        if done.returncode or not paths[2].exists():
            last = done.stderr.strip().splitlines() or ["nothing said"]
            raise RunFailed(f"DeepSpeed: {last[-1]}")
        return json.loads(paths[2].read_text())
