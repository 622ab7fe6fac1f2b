"""What a benchmark found, as data and as a table."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.race import Quartiles, quartiles
from jzero import targets
from jzero.units import size

# A device as JAX names it, and as one of jzero's targets, which have its peak.
_TARGETS = {
    "NVIDIA A100-SXM4-80GB": "a100-80g:1",
    "NVIDIA H100 80GB HBM3": "h100:1",
    "NVIDIA H200": "h200:1",
    "NVIDIA B200": "b200:1",
    "TPU v5 lite": "v5e:1x1",
    "TPU v5": "v5p:1x1x1",
    "TPU v6 lite": "v6e:1x1",
}


@dataclass(frozen=True)
class Row:
    """One contender.

    Attributes:
      name: of it.
      seconds: per step, of each round.
      ratio: of jzero's seconds to these, round by round: first quartile, median, third; None
        where it did not run in the same rounds.
      cpu_ratio: the same of CPU time, which tells of the step only where devices are CPUs; None
        elsewhere.
      tokens_per_second: over all devices.
      flop_utilisation: of the devices' dense bf16 peak, remat not counted; None where unknown.
      peak_bytes: of a step on one device, by the compiler; None where there is none.
      losses: of its first steps.
    """

    name: str
    seconds: tuple[float, ...]
    ratio: Quartiles | None
    cpu_ratio: Quartiles | None
    tokens_per_second: float
    flop_utilisation: float | None
    peak_bytes: int | None
    losses: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Figures:
    """A benchmark.

    Attributes:
      model, stage, precision: what was trained, and how.
      parameters: of the model.
      devices, device_kind, platform: on what.
      rows_per_device, tokens_per_step: of the batch.
      steps, rounds: steps in each round of each contender.
      versions: of the packages, by name.
      load: of the machine before the first round: waiting processes, mean of a minute.
      host_seconds: of jzero's call beyond that of its compiled function: quartiles.
      process_peak_bytes: the most memory in use on a device, all contenders' states together;
        None where devices do not tell.
      notes: what is to be said besides.
      rows: jzero's first.
    """

    model: str
    stage: int
    precision: str
    parameters: int
    devices: int
    device_kind: str
    platform: str
    rows_per_device: int
    tokens_per_step: int
    steps: int
    rounds: int
    versions: dict[str, str]
    load: float
    host_seconds: Quartiles
    process_peak_bytes: int | None
    notes: tuple[str, ...]
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` writes it."""
        rows = [{**asdict(row), "seconds_per_step": row.median} for row in self.rows]
        return {**asdict(self), "rows": rows}


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Quartiles:
    """Quartiles of the ratios of the same rounds.

    >>> paired([2.0, 3.0, 4.0], [2.0, 2.0, 2.0])
    (1.25, 1.5, 1.75)
    """
    return quartiles([one / other for one, other in zip(ours, theirs, strict=True)])


def peak_flops(device_kind: str) -> float | None:
    """A device's dense bf16 operations per second; None where jzero does not know it.

    >>> peak_flops("NVIDIA H200"), peak_flops("cpu")
    (989000000000000.0, None)
    """
    name = _TARGETS.get(device_kind)
    return None if name is None else targets.parse(name).flops


def show(found: Figures, console: Console) -> None:
    """Prints a benchmark."""
    console.print(
        Text(
            f"{found.model}: {found.parameters:,} parameters, stage {found.stage}, "
            f"{found.precision}, {found.devices} x {found.device_kind}, "
            f"{found.tokens_per_step // found.devices:,} tokens a device; {found.rounds} rounds of "
            f"{found.steps} steps each in turn"
        )
    )
    on_cpu = found.platform == "cpu"
    columns = ["ms", "jzero's / its", "quartiles"]
    columns += ["CPU time's", "quartiles"] if on_cpu else ["MFU"]
    table = Table()
    table.add_column("step", no_wrap=True)
    for name in (*columns, "tokens/s", "peak, MB"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        share = row.flop_utilisation
        table.add_row(
            row.name,
            f"{1e3 * row.median:.2f}",
            *_ratio(row.ratio),
            *(_ratio(row.cpu_ratio) if on_cpu else ["" if share is None else f"{share:.1%}"]),
            f"{row.tokens_per_second:,.0f}",
            "" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:,.1f}",
        )
    console.print(table)
    low, middle, high = (1e3 * seconds for seconds in found.host_seconds)
    said = [
        f"jzero's call beyond its compiled function: {middle:.3f} ms a step ({low:.3f} to "
        f"{high:.3f})",
        f"losses of the first {len(found.rows[0].losses)} steps agree: "
        f"{', '.join(f'{loss:.4f}' for loss in found.rows[0].losses)}",
        "ms: median of the rounds; jzero's / its: jzero's time over the step's, of the same "
        "rounds; peak: of one device, by the compiler"
        + ("" if on_cpu else "; MFU: products without remat, of the dense bf16 peak"),
    ]
    if found.process_peak_bytes is not None:
        said.append(f"measured peak, all states together: {size(found.process_peak_bytes)}")
    said += found.notes
    said.append(
        f"{', '.join(f'{name} {version}' for name, version in found.versions.items())}; load "
        f"{found.load:.1f}"
    )
    for line in said:
        console.print(Text(line), soft_wrap=True)


def _ratio(found: Quartiles | None) -> tuple[str, str]:
    if found is None:
        return "", ""
    low, middle, high = found
    return f"{middle:.3f}", f"{low:.3f} to {high:.3f}"
