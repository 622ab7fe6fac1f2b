"""The report of an audit: figures to read, and assertions for a test."""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from jzero.auditing import failures
from jzero.auditing.largest import Made
from jzero.auditing.lines import held, merged
from jzero.auditing.moved import Moved
from jzero.auditing.origins import Kind
from jzero.auditing.table import arrays_table, kept_table, kinds_table, memory_line
from jzero.errors import JzeroError
from jzero.hlo import Collective, Memory
from jzero.hlo.groups import UNKNOWN


@dataclass(frozen=True, repr=False)
class Report:
    """What a compiled function needs, sends and keeps; of one device, for one call.

    Attributes:
      mesh: axes and sizes.
      shard_axes: those that the state is sharded over; () where the mesh does not say.
      replica_axes: those over which the shards repeat.
      memory: None of a text.
      collectives: by opcode, axes and dtype, with loops multiplied out.
      overlapped_fraction: see `jzero.hlo.overlapped_fraction`.
      moved: every array that a collective moves, and what it is.
      kept: gathered weights kept from forward for backward; None where the program does not tell.
      largest: arrays that the program makes.
      state, batch, unsure: names of the arguments that are training state, the batch, or one of the
        two without a sign of which.
    """

    mesh: dict[str, int]
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...]
    memory: Memory | None
    collectives: tuple[Collective, ...]
    overlapped_fraction: float | None
    moved: tuple[Moved, ...]
    kept: tuple[Moved, ...] | None
    largest: tuple[Made, ...]
    state: tuple[str, ...]
    batch: tuple[str, ...]
    unsure: tuple[str, ...]

    def of(self, *kinds: Kind, axes: Sequence[str] | str | None = None) -> list[Moved]:
        """What is moved of some kinds over any of some axes, the largest traffic first.

        Arguments:
          kinds: see `jzero.auditing.Kind`.
          axes: mesh axes; by default those of the state and of replicas, or all of a mesh that
            names none. Collectives of which the axes are not known are always among them.
        """
        chosen = self._axes(axes)
        return merged(
            each
            for each in self.moved
            if each.kind in kinds and (each.axes == UNKNOWN or not chosen.isdisjoint(each.axes))
        )

    def assert_no_collective_on_activations(
        self, axes: Sequence[str] | str | None = None, *, allow_unknown: bool = False
    ) -> None:
        """Fails where activations are moved: what annotations alone make of ZeRO-3.

        Arguments:
          axes: as `of` takes them. Over a tensor or expert axis activations move rightly.
          allow_unknown: pass over what cannot be told to be weights or activations.

        Raises:
          AssertionError: naming every such collective.
        """
        over = ", ".join(sorted(self._axes(axes)))
        parts = []
        if found := self.of(Kind.ACTIVATION, axes=axes):
            parts.append(failures.on_activations(found, over))
        if not allow_unknown and (found := self.of(Kind.UNKNOWN, axes=axes)):
            parts.append(failures.on_unknown(found, over, self.unsure))
        if parts:
            raise AssertionError("\n".join(parts))

    def assert_volume(
        self,
        ratio: float,
        parameters: Any,
        *,
        tolerance: float = 0.02,
        itemsize: int | None = None,
        axes: Sequence[str] | str | None = None,
    ) -> None:
        """Fails where traffic is not the ZeRO paper's: 2, 2, 2 and 3 for stages 0 to 3.

        With A micro-batches 2, 2, A + 1 and 3A. The unit is psi (N-1)/N, what a ring of N devices
        sends to gather or to reduce-scatter all parameters once.

        Arguments:
          ratio: of what each device sends to that unit.
          parameters: psi, their number (of one tensor shard), or a pytree of arrays.
          tolerance: relative, both ways: less traffic is another stage than the one that is meant.
          itemsize: bytes of a parameter as it travels, to compare bytes (2 for bf16); None
            compares elements, whatever the dtype, as XLA:CPU asks for, which sends bf16 as f32.
          axes: whose collectives count; by default those of the state and of replicas.

        Raises:
          AssertionError: with the parts of the volume.
          JzeroError: no axes are known to shard the state.
        """
        group = math.prod(self.mesh[axis] for axis in self.shard_axes)
        if group < 2:
            raise JzeroError(
                f"assert_volume: no axis of the mesh {self.mesh} is known to shard the state over "
                "several devices; say which: audit(..., axes=...)"
            )
        psi = (
            int(parameters)
            if isinstance(parameters, int | float | np.number)
            else _size(parameters)
        )
        chosen = self._axes(axes)
        unknown = [each for each in self.moved if each.axes == UNKNOWN]
        counted = [each for each in self.moved if chosen.issuperset(each.axes)]
        if chosen.issuperset(axis for axis, size in self.mesh.items() if size > 1):
            counted, unknown = [*counted, *unknown], []
        lost = [*unknown, *(each for each in counted if each.bytes is None)]
        if lost:
            raise AssertionError(failures.unknown_volume(lost))
        unit = psi * (group - 1) / group
        sent = [(each, failures.sent(each, itemsize) / unit) for each in counted]
        found = sum(amount for _, amount in sent)
        if abs(found - ratio) > tolerance * ratio:
            what = "elements" if itemsize is None else f"x {itemsize} bytes"
            in_words = f"psi (N-1)/N {what}, of psi = {psi:,} and N = {group}"
            raise AssertionError(failures.volume(sent, found, ratio, tolerance, in_words))

    def assert_peak_below(self, limit: int) -> None:
        """Fails where the program's peak memory on a device is `limit` bytes or more.

        Raises:
          AssertionError: with what the peak is made of.
          JzeroError: the report is of a text, which has no memory analysis.
        """
        if self.memory is None:
            raise JzeroError("assert_peak_below: a text has no memory analysis; audit the program")
        if self.memory.peak_bytes >= limit:
            raise AssertionError(failures.peak(self.memory, limit, self.largest, self.kept or ()))

    def assert_no_kept_weights(self, limit: int = 0) -> None:
        """Fails where gathered weights of more than `limit` bytes are kept for backward.

        All of them are there at once then, whole, as at stage 2.

        Raises:
          AssertionError: naming every such weight; or where the program does not tell.
        """
        if self.kept is None:
            raise AssertionError(
                "it cannot be told which weights are kept: no operation's name tells forward from "
                "backward, as in a program without a gradient"
            )
        there = held(self.kept)
        if self.kept and (there is None or there > limit):
            raise AssertionError(failures.kept(self.kept))

    def print(self, console: Console | None = None) -> None:
        """Prints the report on a rich console, by default standard output."""
        console = console or Console()
        console.print(Text(self._summary()))
        console.print(kinds_table(self.moved) if self.moved else "No collectives.")
        for title, kind in (
            ("Activations that are moved", Kind.ACTIVATION),
            ("Moved, and perhaps activations", Kind.UNKNOWN),
        ):
            found = merged(each for each in self.moved if each.kind is kind)
            if found:
                console.print(arrays_table(title, found))
        if self.kept:
            console.print(kept_table(self.kept))

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=110, color_system=None)
        self.print(console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().rstrip()

    __repr__ = __str__

    def _summary(self) -> str:
        axes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        over = ", ".join(self.shard_axes) or "no axis that is known"
        line = f"Mesh {axes}, ZeRO over {over}."
        roles = {"State": self.state, "Batch": self.batch, "State or batch": self.unsure}
        lines = [" ".join([line, *(f"{k}: {', '.join(v)}." for k, v in roles.items() if v)])]
        if self.memory is not None:
            lines.append(memory_line(self.memory))
        if self.overlapped_fraction is not None:
            lines.append(
                f"Of the bytes sent in layer loops {self.overlapped_fraction:.1%} have a matrix "
                "product to run meanwhile."
            )
        return "\n".join(lines)

    def _axes(self, axes: Sequence[str] | str | None) -> set[str]:
        if axes is None:
            return set(self.shard_axes + self.replica_axes) or set(self.mesh)
        chosen = {axes} if isinstance(axes, str) else set(axes)
        for axis in sorted(chosen - self.mesh.keys()):
            raise JzeroError(f"axis {axis!r} is not in the mesh; its axes are {self.mesh}")
        return chosen


def _size(parameters: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(parameters))
