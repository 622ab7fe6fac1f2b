"""The short form of the soak: a run that is killed again and again ends as one that is not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.mark.slow
def test_a_run_that_is_killed_eight_times_comes_to_the_same_end(tmp_path):
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    environment = os.environ | {"XLA_FLAGS": flags, "TMPDIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, SOAK, "--kills", "8", "--steps", "30"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("8 kills (") and last.endswith("bit for bit")
    assert not list(tmp_path.iterdir()), "what it wrote is gone"
