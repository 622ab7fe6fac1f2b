"""What a run says of itself: metrics in files, progress on the terminal, and a table of bytes."""

import json
import math
import os
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from rich import progress as bars
from rich.console import Console
from rich.table import Table

LINES = 12  # of progress, over a run
IN_FLIGHT = 2  # steps that are dispatched before the first one's metrics are waited for


class Record:
    """Metrics of finished steps: to `metrics.jsonl` and to the terminal.

    Arguments:
        folder: where `metrics.jsonl` goes, or is cut back to the steps that are done.
        steps: optimizer steps in the run.
        done: how many of them a checkpoint holds.
        rows, context: rows in a global batch, and tokens in a row.
        first: this is process 0, which alone writes.
    """

    def __init__(self, folder: Path, steps: int, done: int, rows: int, context: int, first: bool):
        console = Console(stderr=True, quiet=not first, highlight=False)
        self.bar = bars.Progress(
            bars.TextColumn("step {task.completed}/{task.total}"),
            bars.BarColumn(),
            bars.TextColumn("loss {task.fields[loss]:.4f}, {task.fields[speed]:,.0f} tokens/s"),
            bars.TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or not first,
        )
        self.steps, self.tokens = steps, rows * context
        self.task = self.bar.add_task(
            "train", total=steps, completed=done, loss=math.nan, speed=0.0
        )
        self.number = self.done = done
        self.loss: float | None = None
        self.file: TextIO | None = None
        self.in_flight: deque[Mapping[str, jax.Array]] = deque()
        if first:
            path = folder / "metrics.jsonl"
            kept = cut_back(path, done)
            if len(kept) < done:
                self.bar.console.print(f"{path} lacks steps {len(kept) + 1} to {done}")
            if kept:
                self.loss = kept[-1]["loss"]
            self.file = path.open("a")
        self.compile_seconds = 0.0
        self.then = self.began = time.perf_counter()

    def __enter__(self) -> "Record":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        try:
            self.sync()  # also where the loss scale has given up
        finally:
            self.bar.stop()
            if self.file is not None:
                self.file.close()
                self.file = None
                self.file = None

    def compiled(self, seconds: float) -> None:
        self.compile_seconds = seconds
        self.bar.console.print(f"step {self.done + 1} traced and compiled in {seconds:.1f} s")
        self.then = self.began = time.perf_counter()

    def add(self, metrics: Mapping[str, jax.Array]) -> None:
        """Takes a dispatched step's metrics, and writes those of a step before it."""
        self.in_flight.append(metrics)
        if len(self.in_flight) > IN_FLIGHT:
            self.write(self.in_flight.popleft())

    def sync(self) -> None:
        """Waits for all steps so far, and until their metrics are on the disk."""
        while self.in_flight:
            self.write(self.in_flight.popleft())
        if self.file is not None:
            os.fsync(self.file.fileno())

    def write(self, metrics: Mapping[str, jax.Array]) -> None:
        values = {name: np.asarray(x).item() for name, x in jax.device_get(metrics).items()}
        now = time.perf_counter()
        speed, self.then = self.tokens / (now - self.then), now
        self.number += 1
        loss, self.loss = values["loss"], finite(values["loss"])
        line = {
            "step": self.number,
            "loss": self.loss,
            "lr": values.get("lr"),
            "grad_norm": finite(values["grad_norm"]),
            "grad_norm_clipped": finite(values["grad_norm_clipped"]),
            "loss_scale": values["loss_scale"],
            "skipped": values["skipped"],
            "tokens_per_second": speed,
        }
        if self.file is not None:
            self.file.write(json.dumps(line, allow_nan=False) + "\n")
            self.file.flush()
        self.bar.update(self.task, advance=1, loss=loss, speed=speed)
        ends = (self.done + 1, self.steps)
        if self.number in ends or self.number % max(1, self.steps // LINES) == 0:
            took = (now - self.began) / (self.number - self.done)
            left = time.strftime("%H:%M:%S", time.gmtime(took * (self.steps - self.number)))
            skipped = ", skipped: not finite" if values["skipped"] else ""
            self.bar.console.print(
                f"step {self.number}/{self.steps}: loss {loss:.4f}, "
                f"{self.tokens / took:,.0f} tokens/s, {left} left{skipped}",
                soft_wrap=True,
            )


def cut_back(path: Path, step: int) -> list[dict[str, Any]]:
    """Leaves the lines of steps 1 to `step` in a file of metrics, and gives what they hold.

    The file is whole at any moment. It has fewer lines where some were not there.
    """
    kept: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for line in lines[:step]:
        try:
            values = json.loads(line)
        except ValueError:
            break
        if values["step"] != len(kept) + 1 or not line.endswith(b"\n"):
            break
        kept.append(values)
    draft = path.with_name(f".{path.name}")
    with open(draft, "wb") as file:
        file.writelines(lines[: len(kept)])
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    return kept


def hbm_table(rows: list[dict[str, int]], measured: dict[int, dict[str, int]], stage: int) -> Table:
    """Bytes per device by stage: as the specs predict them, and as the arrays have them."""
    kinds = ("params", "master", "optimizer", "other", "state")
    table = Table(title=f"Bytes on each device, by stage (this run: stage {stage})")
    for name in ("stage", *kinds, "from the shards", "gradients", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        found = measured.get(row["stage"])
        real = "not made" if found is None else f"{sum(found.values()):,}"
        numbers = [f"{row[kind]:,}" for kind in kinds]
        after = (f"{row['gradients']:,}", f"{row['total']:,}")
        style = "bold" if row["stage"] == stage else ""
        table.add_row(str(row["stage"]), *numbers, real, *after, style=style)
    table.caption = "state: predicted from the specs; gradients live only while a step runs"
    return table


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2, allow_nan=False) + "\n")
