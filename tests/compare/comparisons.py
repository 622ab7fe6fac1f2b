"""A comparison written by hand, whose every figure is known: to draw without compiling."""

from jzero.compare.row import Result, Row, Traffic
from jzero.compare.schedule.parts import Part, Schedule, Step, Transfer
from jzero.hlo.large import Large
from jzero.hlo.text import Shape
from jzero.targets import Target

GB = 10**9
TARGET = Target(
    "h100:8",
    "h100",
    "gpu",
    8,
    description="Eight <GPUs>",
    memory_bytes=80 * GB,
    flops=1e12,
    link_bytes_per_s=1e9,
    network_bytes_per_s=1e8,
)


def product(seconds: float, phase: str = "forward", dtype: str = "bf16") -> Step:
    """A product that takes so long at the target's peak rate."""
    return Step("product", round(seconds * 1e12), dtype=dtype, phase=phase, name="bf16[8,8]")


def gather(seconds: float | None, **more: bool) -> Transfer:
    """A gather that takes so long on the target's links."""
    size = None if seconds is None else round(seconds * 1e9)
    return Transfer("all-gather", ("data",), "bf16", size, 2, ("layers/a", "layers/b"), **more)


def scatter(seconds: float) -> Transfer:
    return Transfer("reduce-scatter", ("data",), "bf16", round(seconds * 1e9), 1)


SCHEDULE = Schedule(
    (
        Part(
            "step",
            1,
            (
                Step("start", index=0),
                Step("done", index=0),
                Step("loop", 40 * 3 * 10**12, index=1),
                product(2),
                Step("loop", 40 * 6 * 10**12, index=2),
                Step("send", index=1),
                Step("other", count=7),
            ),
            (gather(3), scatter(5)),
        ),
        Part(
            "forward",
            40,
            (
                product(1),
                Step("start", index=0),
                product(2),
                Step("done", index=0),
                Step("other"),
            ),
            (gather(1.5, for_next=True),),
        ),
        Part(
            "backward",
            40,
            (
                product(1, "recomputed"),
                Step("done", index=0),
                product(4, "backward"),
                Step("start", index=0),
                product(1, "backward"),
            ),
            (Transfer("reduce-scatter", ("data",), "bf16", 4 * GB, 2),),
        ),
    )
)

SENT = (
    Traffic("all-gather", ("data",), "bf16", 41, 44_980_000_123, 25_704_043_520),
    Traffic("reduce-scatter", ("data",), "bf16", 40, 22_780_000_456, 13_015_864_320),
    Traffic("all-reduce", ("data",), "f32", None, None, None),
)

ROWS = (
    Row(
        stage=0,
        peak_bytes=210 * GB,
        fits=False,
        error="the compiler refuses the program: it needs <210 GB>",
    ),
    Row(
        stage=1,
        argument_bytes=45_560_000_001,
        temp_bytes=29_540_000_002,
        alias_bytes=45_550_000_003,
        peak_bytes=73_110_000_004,
        host_bytes=0,
        capacity_bytes=80 * GB,
        fits=False,
        state_bytes={"params": 26 * GB, "master": 6 * GB, "optimizer": 13 * GB, "other": 5},
        collectives=(),
        comm_bytes=0,
        comm_ratio=2.0,
        compile_seconds=5.8,
    ),
    Row(
        stage=2,
        argument_bytes=45_560_000_011,
        temp_bytes=5_390_000_012,
        alias_bytes=45_550_000_013,
        peak_bytes=50_640_000_014,
        host_bytes=1_000_000_015,
        capacity_bytes=80 * GB,
        fits=True,
        mem_fraction=None,
        state_bytes={"params": 26 * GB, "master": 6 * GB, "optimizer": 13 * GB, "other": 5},
        peak_split={
            "parameters": 26 * GB,
            "optimizer": 19 * GB,
            "gradients": 2_640_000_014,
            "gathered": 0,
            "activations": 2 * GB,
            "temporaries": 1 * GB,
        },
        collectives=SENT[:2],
        comm_bytes=67_760_000_579,
        comm_ratio=2.975,
        overlapped_fraction=0.987,
        compile_seconds=6.2,
        notes=("the model's remat pins <every> gather",),
        schedule=SCHEDULE,
    ),
    Row(
        stage=3,
        argument_bytes=19_520_000_021,
        temp_bytes=6_650_000_022,
        alias_bytes=19_510_000_023,
        peak_bytes=25_540_000_024,
        host_bytes=0,
        capacity_bytes=80 * GB,
        fits=True,
        state_bytes={"params": 0, "master": 6 * GB, "optimizer": 13 * GB, "other": 5},
        peak_split={
            "parameters": 24,
            "optimizer": 19 * GB,
            "gradients": 2_540_000_000,
            "gathered": 1 * GB,
            "activations": 2 * GB,
            "temporaries": 1 * GB,
        },
        largest=(
            Large(2_000_000_025, Shape("bf16", (40, 5120)), "fusion.1", "fusion", "jit(f)/<dot>"),
            Large(1_000_000_026, None, "custom-call.2", "", ""),
        ),
        collectives=SENT,
        schedule=SCHEDULE,
    ),
)

RESULT = Result(
    model="a/<b>&c.py:llama",
    parameters=13_015_864_320,
    target="h100:8",
    devices=8,
    platform="gpu",
    description="Eight <GPUs>",
    memory_bytes=80 * GB,
    jax="0.10.2",
    mesh={"data": 8},
    micro_batch=1,
    accumulate=1,
    xla_flags=("--xla_one=true", "--xla_two=<2>"),
    environment='XLA_FLAGS="--xla_one=true"',
    notices=("a notice & more",),
    rows=ROWS,
)
COMMAND = "jzero compare --model 'a/<b>&c.py:llama' --target h100:8 --html page.html"
