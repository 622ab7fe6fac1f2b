"""The figures of one stage's compiled program, and of all stages together."""

from dataclasses import asdict, dataclass
from typing import Any

from jzero.compare.schedule.parts import Schedule
from jzero.hlo.large import Large
from jzero.hlo.text import Shape


@dataclass(frozen=True)
class Traffic:
    """What a device sends in an optimizer step, for one opcode, set of axes and dtype.

    Attributes:
      op: HLO opcode; a TPU's fused form counts as "reduce-scatter".
      axes: mesh axes by the user's names, or ("unknown",).
      dtype: as HLO spells it.
      count: runs, loops multiplied out; None where the program does not tell.
      bytes: ring bytes; None where unknown.
      elements: of the full tensors, not scaled by the ring; None where unknown.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    bytes: int | None
    elements: int | None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "axes": list(self.axes)}


@dataclass(frozen=True)
class Row:
    """One stage; bytes are a device's. None is what the compiler, or nobody, could tell.

    Attributes:
      stage: 0 to 3.
      argument_bytes, temp_bytes, alias_bytes, peak_bytes, host_bytes: see `jzero.hlo.Memory`.
      capacity_bytes: the device's memory; None on CPU.
      fits: whether the peak is at most 0.95 of capacity; None on CPU.
      mem_fraction: what XLA_CLIENT_MEM_FRACTION must be; None where JAX's own 0.75 suffices.
      state_bytes: between steps: params, master, optimizer, other.
      collectives: all of the program's.
      comm_bytes: ring bytes over ZeRO and replica axes alone.
      comm_ratio: these over 2 bytes x psi x (N-1)/N.
      comm_ratio_elements: the same in elements, whatever the dtype.
      overlapped_fraction: see `jzero.hlo.overlapped_fraction`.
      trace_seconds, compile_seconds: of JAX, and of XLA.
      measured_peak_bytes: of the devices present, the most in use on the fullest as the step ran;
        None where they do not tell, as CPUs.
      seconds_per_step: the median of the steps that were timed.
      seconds_fastest, seconds_slowest: of these steps.
      timed_steps: how many there were.
      notes: what the program shows beside the figures (`jzero.compare.notes`).
      peak_split: what the peak is made of; see `jzero.compare.split`.
      largest: the largest buffers of the heap at the peak, the largest first.
      schedule: what the program computes and sends, in order; see `jzero.compare.schedule`.
      error: why there is no program, or why it does not run.
    """

    stage: int
    argument_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    peak_bytes: int | None = None
    host_bytes: int | None = None
    capacity_bytes: int | None = None
    fits: bool | None = None
    mem_fraction: float | None = None
    state_bytes: dict[str, int] | None = None
    collectives: tuple[Traffic, ...] | None = None
    comm_bytes: int | None = None
    comm_ratio: float | None = None
    comm_ratio_elements: float | None = None
    overlapped_fraction: float | None = None
    trace_seconds: float | None = None
    compile_seconds: float | None = None
    measured_peak_bytes: int | None = None
    seconds_per_step: float | None = None
    seconds_fastest: float | None = None
    seconds_slowest: float | None = None
    timed_steps: int | None = None
    notes: tuple[str, ...] | None = None
    peak_split: dict[str, int] | None = None
    largest: tuple[Large, ...] | None = None
    schedule: Schedule | None = None
    error: str | None = None

    @property
    def is_refused(self) -> bool:
        """Whether there is no program, since it does not fit."""
        return self.error is not None and self.state_bytes is None

    def as_dict(self) -> dict[str, Any]:
        found = self.collectives
        return {
            **asdict(self),
            "collectives": found and [each.as_dict() for each in found],
            "schedule": self.schedule and self.schedule.as_dict(),
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Row":
        rows, notes = data["collectives"], data["notes"]
        if rows is not None:
            rows = tuple(Traffic(**{**each, "axes": tuple(each["axes"])}) for each in rows)
        notes = None if notes is None else tuple(notes)
        read = {"collectives": rows, "notes": notes}
        if data["largest"] is not None:
            read["largest"] = tuple(map(_large, data["largest"]))
        read["schedule"] = data["schedule"] and Schedule.from_dict(data["schedule"])
        return Row(**{**data, **read})


def _large(data: dict[str, Any]) -> Large:
    shape = data["shape"] and Shape(data["shape"]["dtype"], tuple(data["shape"]["dims"]))
    return Large(**{**data, "shape": shape})


@dataclass(frozen=True)
class Result:
    """A comparison.

    Attributes:
      model: the factory.
      parameters: of the model, whole.
      target: the target's name.
      devices: how many it has.
      platform: theirs: "gpu", "tpu" or "cpu".
      description: what they are.
      memory_bytes: of one; None on CPU.
      jax: the version that compiled.
      mesh: axes and sizes.
      micro_batch, accumulate: samples of a device and micro-batch, micro-batches of a step.
      xla_flags: the options in effect, as they would stand in XLA_FLAGS.
      environment: the line to set for those that this JAX does not take per program; "" for none.
      notices: what jzero has to say of the configuration and the model.
      rows: a stage each.
    """

    model: str
    parameters: int
    target: str
    devices: int
    platform: str
    description: str
    memory_bytes: int | None
    jax: str
    mesh: dict[str, int]
    micro_batch: int
    accumulate: int
    xla_flags: tuple[str, ...]
    environment: str
    notices: tuple[str, ...]
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            **asdict(self),
            "xla_flags": list(self.xla_flags),
            "notices": list(self.notices),
            "rows": [row.as_dict() for row in self.rows],
        }
