"""The figures of one stage's compiled program, and of all stages together."""

from dataclasses import asdict, dataclass
from typing import Any

FIGURES = (
    "argument_bytes",
    "temp_bytes",
    "alias_bytes",
    "peak_bytes",
    "host_bytes",
    "capacity_bytes",
)


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
      error: why there is no program.
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
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        found = self.collectives
        return {**asdict(self), "collectives": found and [each.as_dict() for each in found]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Row":
        rows = data["collectives"]
        if rows is not None:
            rows = tuple(Traffic(**{**each, "axes": tuple(each["axes"])}) for each in rows)
        return Row(**{**data, "collectives": rows})


@dataclass(frozen=True)
class Result:
    """A comparison.

    Attributes:
      model: the factory.
      parameters: of the model, whole.
      target: the target's name.
      devices: how many it has.
      jax: the version that compiled.
      mesh: axes and sizes.
      micro_batch, accumulate: samples of a device and micro-batch, micro-batches of a step.
      xla_flags: the options in effect, as they would stand in XLA_FLAGS.
      environment: the line to set for those that this JAX does not take per program; "" for none.
      rows: a stage each.
    """

    model: str
    parameters: int
    target: str
    devices: int
    jax: str
    mesh: dict[str, int]
    micro_batch: int
    accumulate: int
    xla_flags: tuple[str, ...]
    environment: str
    rows: tuple[Row, ...]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` writes it."""
        return {
            **asdict(self),
            "xla_flags": list(self.xla_flags),
            "rows": [row.as_dict() for row in self.rows],
        }
