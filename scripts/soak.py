"""Kills a training run again and again, resumes it each time, and compares it with one left alone.

    python scripts/soak.py                # 60 kills
    python scripts/soak.py --kills 8      # the short form that the tests run

Each life of the run gets SIGKILL or SIGTERM at a random moment: while it starts, between steps, or
while a checkpoint is written. Once all kills are delivered it is let finish. Its loss curve and
the leaves of its last checkpoint must be those of the undisturbed run, bit for bit. Exit code 0 if
they are, 1 if not; the folder with all files is kept then.

Needs jzero and the example's packages (`pip install ".[examples]"`), and no accelerator.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jzero.checkpoint import Reader, folders, manifest

EXAMPLE = Path(__file__).parents[1] / "examples" / "lm"
STOPPED = 143  # train.py's exit code after SIGTERM, its last step saved
WORDS = "each device keeps a shard of what the stage names and gathers the rest on use".split()


class Wrong(Exception):
    """A run did what it must not do."""


@dataclass(frozen=True)
class Training:
    """The run that is killed: how it is started, and what it leaves.

    Arguments:
      work: folder for everything.
      name: of the run's own folder.
      steps: optimizer steps in all.
      save_every: steps between checkpoints.
      devices: virtual CPU devices.
    """

    work: Path
    name: str
    steps: int
    save_every: int
    devices: int

    @property
    def out(self) -> Path:
        return self.work / self.name

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def start(self) -> subprocess.Popen:
        options = {
            "--config": self.work / "config.json",
            "--data": self.work / "corpus.txt",
            "--steps": self.steps,
            "--save-every": self.save_every,
            "--devices": self.devices,
            "--out": self.out,
        }
        arguments = [str(text) for pair in options.items() for text in pair]
        environment = {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(self.work / "cache")}
        if self.devices == 1:
            # A life lasts seconds: it must not compile for as long. Of several CPU devices, JAX
            # 0.10.2 runs the collectives of a program from the cache in any order, and hangs.
            environment |= {
                "JAX_COMPILATION_CACHE_DIR": str(self.work / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
        with open(self.work / f"{self.name}.log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, EXAMPLE / "train.py", *arguments, "--resume"],
                env=os.environ | environment,
                stdout=log,
                stderr=log,
            )

    def lines(self) -> int:
        """Whole lines of metrics."""
        path = self.out / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def saving(self) -> bool:
        """Whether a checkpoint is being written, or was when its process died."""
        return any(self.checkpoints.glob(".unfinished-*"))

    def latest(self) -> int:
        return max(folders.published(self.checkpoints), default=0)


# --- one life ------------------------------------------------------------------------------------


def moment(rng: random.Random, run: Training) -> tuple[str, Callable[[float], bool]]:
    """When to kill: a name, and whether it is time, given the seconds since the start."""
    kind = rng.choice(("start", "step", "save", "save"))
    if kind == "start":
        seconds = rng.uniform(0, 4)
        return kind, lambda now: now > seconds
    lines, delay, since = run.lines() + rng.randint(1, 5), rng.uniform(0, 0.02), 0.0

    def is_time(now: float) -> bool:
        nonlocal since
        if since:
            return now > since + delay
        if run.lines() >= lines and (kind == "step" or run.saving()):
            since = now
        return False

    return kind, is_time


def live(run: Training, rng: random.Random) -> tuple[signal.Signals, bool] | None:
    """A life that is ended: by which signal, and whether during a save; None if it finished."""
    before = run.latest()
    kind, is_time = moment(rng, run)
    sent = rng.choice((signal.SIGKILL, signal.SIGTERM))
    process, began, in_save = run.start(), time.monotonic(), False
    try:
        while process.poll() is None:
            if is_time(time.monotonic() - began):
                in_save = run.saving()
                process.send_signal(sent)
                break
            time.sleep(0.0005 if kind == "save" else 0.005)
        code = process.wait(120)
    finally:
        process.kill()
        process.wait()
    if code == 0:
        return None
    after = run.latest()
    if code not in {-sent, STOPPED}:
        raise Wrong(f"exit code {code} after {sent.name} in {run.out}")
    if after < before:
        raise Wrong(f"step {before} was there before {sent.name}, now {after} is the last")
    if code == STOPPED and after != run.lines():
        raise Wrong(f"stopped after step {run.lines()} by {sent.name}, but step {after} is saved")
    return sent, run.saving() if code == -signal.SIGKILL else in_save


def finish(run: Training) -> None:
    """Lets a run come to its end."""
    process = run.start()
    try:
        if process.wait(600):
            raise Wrong(f"exit code {process.returncode} of {run.out}, left alone")
    finally:
        process.kill()
        process.wait()


# --- the comparison ------------------------------------------------------------------------------


def compare(run: Training, undisturbed: Training) -> None:
    """Whether a run came to the same end.

    Raises:
      Wrong: naming the first step or leaf that differs.
    """
    for number, (one, other) in enumerate(zip(curve(run), curve(undisturbed), strict=True), 1):
        if one != other:
            raise Wrong(f"{run.out}: step {number} is {one}, undisturbed {other}")
    one, other = leaves(run), leaves(undisturbed)
    if one.keys() != other.keys():
        raise Wrong(f"{run.out}: other leaves: {sorted(one.keys() ^ other.keys())}")
    for name in one:
        if one[name] != other[name]:
            raise Wrong(f"{run.out}: {name} differs")
    hidden = [path.name for path in run.checkpoints.glob(".*-*")]
    if hidden:
        raise Wrong(f"{run.checkpoints}: dead saves left {hidden}")


def curve(run: Training) -> list[dict[str, Any]]:
    text = (run.out / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    if len(rows) != run.steps:
        raise Wrong(f"{run.out}: {len(rows)} lines of metrics for {run.steps} steps")
    return [{k: v for k, v in row.items() if k != "tokens_per_second"} for row in rows]


def leaves(run: Training) -> dict[str, bytes]:
    if run.latest() != run.steps:
        raise Wrong(f"{run.out}: the last checkpoint is of step {run.latest()} of {run.steps}")
    folder = folders.step_folder(run.checkpoints, run.steps)
    reader = Reader(folder, manifest.read(folder))
    return {name: reader.region(name).tobytes() for name in reader.manifest.leaves}


# --- all of it -----------------------------------------------------------------------------------


def prepare(work: Path, steps: int) -> None:
    """A configuration and a corpus that make steps short."""
    config = json.loads((EXAMPLE / "stage3.json").read_text())
    config["train_micro_batch_size_per_gpu"] = 1
    config["scheduler"]["params"] |= {"warmup_num_steps": 10, "total_num_steps": steps}
    (work / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    lines = [" ".join(rng.choices(WORDS, k=rng.randint(3, 9))) for _ in range(6000)]
    (work / "corpus.txt").write_text("\n".join(lines) + "\n")


def soak(work: Path, args: argparse.Namespace) -> str:
    """Runs everything; a line that says what was done."""
    began, rng = time.monotonic(), random.Random(args.seed)
    prepare(work, args.steps)
    settings = (args.steps, args.save_every, args.devices)
    undisturbed = Training(work, "undisturbed", *settings)
    finish(undisturbed)
    print(f"undisturbed: {args.steps} steps in {time.monotonic() - began:.0f} s", flush=True)
    sent, in_save, runs = Counter[str](), 0, 0
    while sum(sent.values()) < args.kills:
        runs += 1
        run, alive = Training(work, f"killed-{runs}", *settings), True
        while alive and sum(sent.values()) < args.kills:
            end = live(run, rng)
            alive = end is not None
            if end is not None:
                sent[end[0].name] += 1
                in_save += end[1]
                where = f"step {run.latest()} saved{', in a save' if end[1] else ''}"
                print(f"kill {sum(sent.values())}: {end[0].name}, {where}", flush=True)
        if alive:
            finish(run)
        compare(run, undisturbed)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(sent.items()))
    return (
        f"{sum(sent.values())} kills ({kinds}), {in_save} of them during a save, over {runs} runs "
        f"of {args.steps} steps in {time.monotonic() - began:.0f} s: loss curves and all leaves "
        f"are those of the undisturbed run, bit for bit"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill and resume a training run.")
    add = parser.add_argument
    add("--kills", type=int, default=60, metavar="N", help="signals to deliver (60)")
    add("--seed", type=int, default=0, help="of the moments and the signals (0)")
    add("--steps", type=int, default=60, metavar="N", help="optimizer steps of a run (60)")
    add("--save-every", type=int, default=3, metavar="K", help="steps between checkpoints (3)")
    add("--devices", type=int, default=1, metavar="N", help="virtual CPU devices (1)")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="jzero-soak-"))
    try:
        print(soak(work, args))
    except (Wrong, subprocess.TimeoutExpired) as error:
        print(f"soak.py: {error}; all files are in {work}", file=sys.stderr)
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
