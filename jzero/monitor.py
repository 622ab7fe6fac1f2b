"""Writes a run's metrics where the configuration's `tensorboard` and `csv_monitor` say."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jzero.config import Config
from jzero.errors import JzeroError

# DeepSpeed's names of events; the x axis is samples of the global batch.
_NAMES = {
    "loss": "Train/Samples/train_loss",
    "lr": "Train/Samples/lr",
    "loss_scale": "Train/Samples/loss_scale",
}


class Monitor:
    """The monitors that a configuration switches on; process 0 alone writes.

    Arguments:
      config: sections `tensorboard` and `csv_monitor`, with `output_path` and `job_name`.
      folder: where to write when `output_path` is empty.

    Raises:
      JzeroError: TensorBoard is asked for and its writer is not installed.
    """

    def __init__(self, config: Config, folder: str | Path = "runs"):
        self._board: Any = None
        self._csv: Path | None = None
        if jax.process_index() != 0:
            return
        if config.tensorboard.enabled:
            self._board = _board(_folder(config.tensorboard, folder))
        if config.csv_monitor.enabled:
            self._csv = _folder(config.csv_monitor, folder)
            self._csv.mkdir(parents=True, exist_ok=True)

    def write(self, samples: int, metrics: Mapping[str, Any]) -> None:
        """Writes scalar metrics, waiting for them.

        Arguments:
          samples: rows of the global batch seen so far.
          metrics: what a training step returned; what is not a scalar is left out.
        """
        if self._board is None and self._csv is None:
            return
        for name, value in metrics.items():
            if getattr(value, "shape", ()) != () or not hasattr(value, "__float__"):
                continue
            event = _NAMES.get(name, f"Train/Samples/{name}")
            if self._board is not None:
                self._board.add_scalar(event, float(value), samples)
            if self._csv is not None:
                with (self._csv / f"{event.replace('/', '_')}.csv").open("a", newline="") as file:
                    csv.writer(file).writerow([samples, float(value)])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def _folder(section: Any, folder: str | Path) -> Path:
    return Path(section.output_path or folder) / section.job_name


def _board(folder: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        raise JzeroError(
            'tensorboard.enabled: its writer is missing; pip install ".[tensorboard]" in a clone '
            "of jzero"
        ) from None
    return SummaryWriter(str(folder))
