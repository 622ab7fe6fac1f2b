"""Runs of the training script in processes of their own, as users start them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "lm" / "train.py"
FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600 "
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)


def start(folder, *arguments, **environment):
    """The script in `folder`, with warnings as errors and its cache in `folder` too."""
    search = os.pathsep.join(p for p in sys.path if p)
    env = os.environ | {"XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONPATH": search}
    env |= {"XDG_CACHE_HOME": str(folder / "cache"), **environment}
    command = [sys.executable, "-W", "error", SCRIPT, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=env, stdout=pipe, stderr=pipe, text=True)


def run(folder, *arguments, **environment):
    process = start(folder, *arguments, **environment)
    try:
        out, err = process.communicate(timeout=400)
    finally:
        process.kill()
    return process.returncode, out, err


# Each run of the script takes some seconds to import JAX: one process reads them all.
ALL = """
import contextlib, io, json, pathlib, sys
sys.path.insert(0, sys.argv[1])
import train
for line in sys.stdin:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = train.main(json.loads(line))
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


class Session:
    """One process that runs the script's `main` for one command after the other, in `folder`."""

    def __init__(self, folder, **environment):
        env = os.environ | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
        env |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment}
        self.log = open(folder / "session.log", "w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", ALL, SCRIPT.parent],
            cwd=folder,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def __enter__(self):
        return self

    def __call__(self, *arguments):
        """Exit code, output, and errors of a command."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(list(map(str, arguments))) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, (self.log.seek(0), self.log.read())
        return json.loads(answer)

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self.log.close()


def corpus(folder):
    """A file of some ten thousand words that follow one another by simple rules."""
    rng = np.random.default_rng(0)
    words = "each device keeps a shard of what the stage names and gathers the rest on use".split()
    lines = [" ".join(words[i : i + rng.integers(3, 9)]) for i in rng.integers(0, 12, 6000)]
    path = folder / "corpus.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


def config(folder, **changes):
    """The example's configuration with changes, and a warm-up for a few steps."""
    settings = json.loads((ROOT / "examples/lm/stage3.json").read_text())
    settings["scheduler"]["params"] |= {"warmup_num_steps": 30, "warmup_type": "log"}
    path = folder / "config.json"
    path.write_text(json.dumps(settings | changes))
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]
