"""The table of leaves: what is sharded, what stays whole, and why.

It is computed from specs alone; `jzero.measure` sums the arrays themselves.
"""

import io
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jzero.layout import Layout, bytes_per_device, struct
from jzero.partition import STAGES
from jzero.paths import flatten
from jzero.setup import Setup
from jzero.state import State

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


def explain(
    layout: Layout,
    state: State,
    made_whole: Mapping[str, str] | None = None,
    accumulation: int = 1,
) -> Explanation:
    """The table of leaves of a training state.

    Arguments:
      layout: where everything lives.
      state: the state's arrays, or `jax.ShapeDtypeStruct`s with shardings: what the table says of
        an array is what its own sharding says.
      made_whole: path -> primitive, of `jzero.whole_init.whole_at_init`.
      accumulation: micro-batches in a step; decides the gradients' dtype.
    """
    made_whole = made_whole or {}
    rows = [
        *_parameters(layout, state, made_whole),
        *_masters(layout, state, made_whole),
        *_gradients(layout, accumulation),
        *_optimizer(layout, state),
        *_others(layout, state),
    ]
    rows.sort(key=lambda row: (KINDS.index(row.kind), -row.bytes_per_device))
    return Explanation(layout.stage, layout.mesh.group_size, tuple(rows))


def stage_table(setup: Setup, accumulation: int = 1) -> list[dict[str, int]]:
    """Bytes per device at each stage, of the same model, optimizer and mesh.

    Arguments:
      setup: the model and its optimizer as laid out at any stage.
      accumulation: micro-batches in a step; decides the gradients' dtype.

    Returns:
      For stages 0 to 3: {"stage", "params", "master", "gradients", "optimizer", "other", "state",
      "total"}, where `state` is what stays between steps, and `total` that and the gradients.
    """
    table = []
    for stage in STAGES:
        at = setup.at_stage(stage)
        found = explain(at.layout, at.abstract_state(), accumulation=accumulation)
        state = found.total_bytes_per_device
        table.append(
            {
                "stage": stage,
                **found.bytes_per_device,
                "gradients": found.gradient_bytes,
                "state": state,
                "total": state + found.gradient_bytes,
            }
        )
    return table


def _parameters(layout: Layout, state: State, made_whole: Mapping[str, str]) -> Iterator[Row]:
    for path, x in state.params.items():
        leaf = layout.leaves[path]
        if leaf.dim is not None and not leaf.shard_parameter and layout.stage < 3:
            reason = "whole: parameters are sharded from stage 3 on"
        else:
            reason = leaf.persistent or leaf.reason
        if leaf.shard_parameter:
            reason += _note(path, made_whole)
        yield _row(layout, "params", path, leaf.array.shape, x, leaf.shard_parameter, reason)


def _masters(layout: Layout, state: State, made_whole: Mapping[str, str]) -> Iterator[Row]:
    for path, x in state.master.items():
        leaf = layout.leaves[path]
        reason = leaf.reason + _note(path, made_whole)
        yield _row(layout, "master", path, leaf.array.shape, x, leaf.shard_state, reason)


def _gradients(layout: Layout, accumulation: int) -> Iterator[Row]:
    policy = layout.policy
    dtype = policy.communication if accumulation == 1 else policy.accumulation
    for path, leaf in layout.trained.items():
        sharded = leaf.shard_gradient
        shape = leaf.stored_shape if sharded else leaf.array.shape
        spec = leaf.spec(layout.mesh.shard_axes, sharded)
        reason = leaf.reason
        if leaf.shard_state and not sharded:
            reason = "whole in backward, then reduce-scattered once per step"
            if leaf.persistent:
                reason += f"; the parameter stays {leaf.persistent}"
        x = struct(shape, dtype, layout.mesh.sharding(spec))
        yield _row(layout, "gradients", path, leaf.array.shape, x, sharded, reason)


def _optimizer(layout: Layout, state: State) -> Iterator[Row]:
    leaves, arrays = flatten(layout.opt_leaves), flatten(state.opt_state)
    for path, x in arrays.items():
        leaf = leaves[path]
        yield _row(layout, "optimizer", path, leaf.array.shape, x, leaf.shard_state, leaf.reason)


def _others(layout: Layout, state: State) -> Iterator[Row]:
    numbers = {"step": state.step, "skipped": state.skipped, "rng": state.rng, "scale": state.scale}
    for path, x in flatten(numbers).items():
        reason = "whole: one number for the whole run"
        yield _row(layout, "other", path, tuple(x.shape), x, False, reason)
    for path, x in flatten({"variables": state.variables}).items():
        reason = "whole: variables that are not parameters are the same on every device"
        yield _row(layout, "other", path, tuple(x.shape), x, False, reason)


def _row(
    layout: Layout,
    kind: str,
    path: str,
    shape: tuple[int, ...],
    x: Any,
    planned: bool,
    reason: str,
) -> Row:
    """A row; `planned`: the layout shards this array."""
    spec, mesh = x.sharding.spec, layout.mesh
    axes = {a for entry in spec if entry for a in (entry if isinstance(entry, tuple) else (entry,))}
    sharded = mesh.group_size > 1 and not axes.isdisjoint(mesh.shard_axes)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if planned and not sharded:
        reason = f"whole, against its plan: {reason}"
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    stage = STAGES[layout.stage]
    shards = {
        "params": stage.parameters,
        "master": stage.optimizer,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "other": False,
    }
    return Row(
        kind=kind,
        path=path,
        shape=shape,
        stored=tuple(x.shape),
        dtype=str(x.dtype),
        spec=_spec_text(spec),
        bytes_per_device=bytes_per_device(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        ),
        total_bytes=bytes_per_device(whole),
        sharded=sharded,
        by_design=not sharded
        and (mesh.group_size == 1 or not shards[kind] or not shape or 0 in shape or is_key),
        reason=reason,
    )


def _note(path: str, made_whole: Mapping[str, str]) -> str:
    if path not in made_whole:
        return ""
    return f"; made whole on each device at init: its initialiser uses {made_whole[path]}"


def _spec_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"


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
