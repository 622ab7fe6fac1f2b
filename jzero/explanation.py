"""What each device keeps of a training state, as a table of leaves."""

import io
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# What a state is made of; gradients live only inside a step.
STATE_KINDS = ("params", "master", "optimizer", "other")
KINDS = ("params", "master", "gradients", "optimizer", "other")


@dataclass(frozen=True)
class Row:
    """One array of the training state, or one gradient.

    Attributes:
      kind: "params", "master", "gradients", "optimizer" or "other".
      path: its name: of a parameter for the first three kinds, else its place in the state.
      shape: the shape that the user knows.
      stored: the shape as stored; larger than `shape` where padded.
      dtype: its dtype's name.
      spec: its PartitionSpec, in the user's axis names.
      bytes_per_device: of its piece on each device.
      total_bytes: of the whole array as stored.
      sharded: over the ZeRO axes.
      by_design: it is whole because the stage keeps its kind whole, or it has nothing to share out.
      reason: in words.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    stored: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int
    total_bytes: int
    sharded: bool
    by_design: bool
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What each device keeps of a training state, leaf by leaf.

    Attributes:
      stage: 0 to 3.
      group: devices in the ZeRO group.
      rows: kind by kind; within a kind, the leaves with most bytes per device first.
    """

    stage: int
    group: int
    rows: tuple[Row, ...]

    @property
    def bytes_per_device(self) -> dict[str, int]:
        """Bytes of the state on each device by kind: params, master, optimizer, other.

        In fp32 the parameters are the master weights, counted as params. Gradients are no part of
        the state: see `gradient_bytes`.
        """
        return {kind: self._bytes(kind) for kind in STATE_KINDS}

    @property
    def total_bytes_per_device(self) -> int:
        return sum(self.bytes_per_device.values())

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the gradients on each device, as they are accumulated, while a step runs."""
        return self._bytes("gradients")

    @property
    def sharded_share(self) -> float:
        """Of the bytes of the state's arrays, the share in arrays sharded over ZeRO axes."""
        rows = [row for row in self.rows if row.kind in STATE_KINDS]
        total = sum(row.total_bytes for row in rows)
        return sum(row.total_bytes for row in rows if row.sharded) / total if total else 0.0

    def whole(self) -> list[Row]:
        """Every array that each device of the group keeps whole; those not by design first."""
        rows = [row for row in self.rows if not row.sharded]
        return sorted(rows, key=lambda row: (row.by_design, -row.bytes_per_device))

    def as_dict(self) -> dict[str, Any]:
        """The same as data for JSON."""
        return {
            "stage": self.stage,
            "group": self.group,
            "bytes_per_device": self.bytes_per_device,
            "total_bytes_per_device": self.total_bytes_per_device,
            "gradient_bytes": self.gradient_bytes,
            "sharded_share": self.sharded_share,
            "leaves": [
                {**asdict(row), "shape": list(row.shape), "stored": list(row.stored)}
                for row in self.rows
            ],
        }

    def print(self, console: Console | None = None) -> None:
        """Prints the table on a rich console, by default standard output."""
        console = console or Console()
        console.print(self._table(wide=console.width >= 120))
        console.print(Text(self._summary()))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=150, color_system=None)
        self.print(console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    def _bytes(self, kind: str) -> int:
        return sum(row.bytes_per_device for row in self.rows if row.kind == kind)

    def _table(self, wide: bool) -> Table:
        """In a narrow table the reason stands below the leaf's name."""
        table = Table(title=f"Stage {self.stage}, {self.group} devices in the ZeRO group")
        for name, ratio in (("leaf", 7), ("shape", 3), ("dtype", None), ("spec", 3)):
            table.add_column(name, overflow="fold", ratio=ratio)
        table.add_column("bytes/device", justify="right", no_wrap=True)
        if wide:
            table.add_column("why", overflow="fold", ratio=8)
        for kind in KINDS:
            rows = [row for row in self.rows if row.kind == kind]
            if not rows:
                continue
            name = kind + (" (while a step runs)" if kind == "gradients" else "")
            table.add_section()
            table.add_row(Text(name, "bold"), "", "", "", Text(f"{self._bytes(kind):,}", "bold"))
            for row in rows:
                leaf, *cells, why = (Text(cell, _style(row)) for cell in _cells(row))
                if not wide:
                    leaf.append(f"\n{why}", "dim")
                table.add_row(leaf, *cells, *([why] if wide else []))
        return table

    def _summary(self) -> str:
        lines = [
            f"On each device: {self.total_bytes_per_device:,} bytes of state, "
            f"{self.gradient_bytes:,} of gradients. Of the state's bytes, "
            f"{self.sharded_share:.2%} are in arrays sharded over the ZeRO group."
        ]
        odd = [row for row in self.whole() if not row.by_design]
        if odd:
            names = ", ".join(f"{row.kind} {row.path}" for row in odd[:5])
            more = f" and {len(odd) - 5} more" if len(odd) > 5 else ""
            lines.append(
                f"WHOLE on every device though stage {self.stage} shards their kind: {len(odd)} "
                f"arrays, {sum(row.bytes_per_device for row in odd):,} bytes: {names}{more}. "
                f"The first is {odd[0].reason}."
            )
        return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    shape = str(row.shape)
    if row.stored != row.shape:
        shape += f" stored {row.stored}"
    spec = row.spec
    if not row.sharded:
        spec = ("whole" if row.by_design else "WHOLE") + ("" if spec == "P()" else f" {spec}")
    return row.path, shape, row.dtype, spec, f"{row.bytes_per_device:,}", row.reason


def _style(row: Row) -> str:
    if row.sharded:
        return ""
    return "dim" if row.by_design else "bold yellow"
