"""The schedule as data: what is computed, what is sent meanwhile, and over which iterations."""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from jzero.compare.schedule.parts import Part, Schedule, Step
from jzero.compare.schedule.read import MOST, schedule
from jzero.hlo.flops import Flops
from jzero.hlo.text import parse

TEXTS = Path(__file__).parents[1] / "hlo" / "texts"
MESH = AbstractMesh((8,), ("data",))
GROUP = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
GATHER = "zero_gather/all_gather"
SOURCE = f"jit(f)/jvp()/while/body/zero_read/layers/(up/{GATHER}:down/{GATHER})"
PRODUCT = (
    "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, "
    'metadata={op_name="jit(f)/transpose(jvp())/dot_general"}'
)

HEAD = f"""HloModule m, is_scheduled=true, num_partitions=8

%gemm (a: bf16[8,4], b: bf16[4,2]) -> f32[8,2] {{
  %a = bf16[8,4]{{1,0}} parameter(0)
  %b = bf16[4,2]{{1,0}} parameter(1)
  ROOT %dot = f32[8,2]{{1,0}} {PRODUCT}
}}

%test (c: (s32[], bf16[8,4], bf16[4,2], bf16[2])) -> pred[] {{
  %c = (s32[], bf16[8,4]{{1,0}}, bf16[4,2]{{1,0}}, bf16[2]{{0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}
"""
CARRIED = "(s32[], bf16[8,4]{1,0}, bf16[4,2]{1,0}, bf16[2]{0})"
PARTS = f"""  %c = {CARRIED} parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = bf16[8,4]{{1,0}} get-tuple-element(%c), index=1
  %w = bf16[4,2]{{1,0}} get-tuple-element(%c), index=2
  %s = bf16[2]{{0}} get-tuple-element(%c), index=3
"""
START = (
    "  %start = ((bf16[2]{0}, bf16[2]{0}), (bf16[16]{0}, bf16[16]{0})) all-gather-start(%s, %s), "
    f'{GROUP}, metadata={{op_name="{SOURCE}"}}\n'
)
DONE = "  %done = (bf16[16]{0}, bf16[16]{0}) all-gather-done(%start)\n"
LOOP = (
    f"  %loop = {CARRIED} while(%c), condition=%test, body=%body, "
    'backend_config={"known_trip_count":{"n":"5"}}\n'
)
END = f"  ROOT %out = {CARRIED} tuple(%i, %x, %w, %s)\n"


def product(n: int) -> str:
    return f"  %p{n} = f32[8,2]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%gemm\n"


def other(n: int) -> str:
    return f"  %o{n} = bf16[8,4]{{1,0}} negate(%x)\n"


def program(body: str, end: str = END, entry: str = LOOP) -> Schedule:
    text = f"{HEAD}\n%body (b: s32[]) -> s32[] {{\n{PARTS}{body}{end}}}\n"
    text += f"\nENTRY %main (m: s32[]) -> s32[] {{\n{PARTS}{entry}{END}}}\n"
    return schedule(text, MESH)


def kinds(part: Part) -> list[str]:
    return [step.kind for step in part.steps]


def test_a_loop_is_a_part_and_its_steps_stand_in_schedule_order():
    found = program(product(1) + other(1) + other(2) + START + product(2) + DONE + product(3))
    whole, loop = found.parts
    assert kinds(whole) == ["loop"] and whole.steps[0].index == 1
    assert whole.steps[0].flops == 5 * 3 * 2 * 8 * 2 * 4
    assert (whole.phase, loop.phase, loop.trips) == ("step", "backward", 5)
    assert kinds(loop) == ["product", "other", "start", "product", "done", "product"]
    first, rest = loop.steps[0], loop.steps[1]
    assert first == Step("product", 128, dtype="bf16", phase="backward", name="f32[8,2] over 4")
    assert rest.count == 2


def test_a_transfer_says_what_it_carries_and_sends_in_one_iteration():
    loop = program(START + product(1) + DONE).parts[1]
    (transfer,) = loop.transfers
    # Two arrays of 2 elements of 2 bytes on each of 8 devices: a device sends 7 times its own.
    assert (transfer.op, transfer.dtype, transfer.bytes) == ("all-gather", "bf16", 2 * 2 * 2 * 7)
    assert (transfer.tensors, transfer.leaves) == (2, ("layers/up", "layers/down"))
    assert transfer.axes == ("data",)
    assert not transfer.for_next


def test_axes_are_called_as_the_user_calls_them():
    text = (TEXTS / "step-h100-jax-0.10.2.txt").read_text()
    mesh = AbstractMesh((4, 2), ("zero_data", "tensor"))
    found = schedule(text, mesh, {"zero_data": "data"})
    axes = {transfer.axes for part in found.parts for transfer in part.transfers}
    assert axes == {("data",), ("tensor",), ("data", "tensor")}


def test_a_transfer_that_is_carried_into_the_next_iteration():
    body = (
        "  %ended = bf16[2]{0} reduce-scatter-done(%s)\n"
        + product(1)
        + f"  %begun = (bf16[16]{{0}}, bf16[2]{{0}}) reduce-scatter-start(%s), {GROUP}\n"
        + product(2)
    )
    loop = program(body, END.replace("%s)", "%begun)")).parts[1]
    assert kinds(loop) == ["done", "product", "start", "product"]


def test_weights_for_the_next_iteration_alone():
    used = "  %use = (bf16[16]{0}, bf16[16]{0}) negate(%done)\n"
    handed = "  %got = bf16[16]{0} get-tuple-element(%done), index=0\n"
    on = END.replace("%s)", "%got)")
    assert program(START + product(1) + DONE + handed, on).parts[1].transfers[0].for_next
    assert not program(START + product(1) + DONE + handed + used, on).parts[1].transfers[0].for_next
    assert not program(START + product(1) + DONE + handed).parts[1].transfers[0].for_next


def test_a_synchronous_collective_is_one_step():
    sent = f"  %sum = bf16[2]{{0}} all-reduce(%s), {GROUP}\n"
    loop = program(product(1) + sent + product(2)).parts[1]
    assert kinds(loop) == ["product", "send", "product"]
    assert loop.transfers[0].bytes == 2 * 2 * 2 * 7 // 8


def test_what_a_branch_sends_is_unknown_where_the_other_sends_otherwise():
    branches = {"one": f"all-reduce(%s), {GROUP}", "other": "negate(%s)"}
    one, other = (
        f"%{name} (s: bf16[2]) -> bf16[2] {{\n"
        f"  %s = bf16[2]{{0}} parameter(0)\n  ROOT %r = bf16[2]{{0}} {sent}\n}}\n"
        for name, sent in branches.items()
    )
    branch = "  %b = bf16[2]{0} conditional(%i, %s, %s), branch_computations={%one, %other}\n"
    text = f"{HEAD}\n{one}\n{other}\nENTRY %main (m: s32[]) -> s32[] {{\n{PARTS}{branch}{END}}}\n"
    (whole,) = schedule(text, MESH).parts
    assert kinds(whole) == ["send"] and whole.transfers[0].bytes is None


def test_an_unknown_trip_count_leaves_flops_unknown():
    entry = LOOP.replace("known_trip_count", "other")
    whole, loop = program(START + product(1) + DONE, entry=entry).parts
    assert loop.trips is None and whole.steps[0].flops is None
    assert loop.transfers[0].bytes == 56


def test_long_schedules_are_shortened_and_say_so():
    few = "".join(product(n) for n in range(MOST + 1))
    (whole,) = program("", entry=few).parts
    assert kinds(whole) == ["product"] and whole.steps[0].count == MOST + 1
    assert whole.steps[0].flops == 128 * (MOST + 1) and whole.left_out == (0, 0)

    def gather(n: int) -> str:
        pair = START + product(n) + DONE
        return pair.replace("%start", f"%start{n}").replace("%done", f"%done{n}")

    many = "".join(gather(n) for n in range(MOST))
    (whole,) = program("", entry=many).parts
    assert len(whole.steps) == MOST and whole.left_out == (MOST, MOST)


def test_what_is_written_is_read_again():
    found = program(product(1) + START + product(2) + DONE)
    assert Schedule.from_dict(found.as_dict()) == found


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0"])
def test_the_layers_of_a_compiled_step_on_gpus(version: str):
    forward, backward = schedule(
        (TEXTS / f"layers-h100-jax-{version}.txt").read_text(), MESH
    ).parts[1:]
    gathered = 7 * 2 * 256 * 8192  # each of the two weights, in bf16, times 7/8
    for part, scattered in ((forward, 0), (backward, 1)):
        ops = [transfer.op for transfer in part.transfers]
        assert ops.count("reduce-scatter") == scattered
        sent = sum(t.bytes or 0 for t in part.transfers if t.op == "all-gather")
        assert sent == 2 * gathered
        under_way: set[int] = set()
        for step in part.steps:
            if step.kind == "start":
                under_way.add(step.index)
            if step.kind == "done":
                under_way.remove(step.index)
        assert not under_way


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0"])
def test_a_chain_of_fusions_on_a_tpu_is_one_transfer(version: str):
    text = (TEXTS / f"layer-v5e-jax-{version}.txt").read_text()
    parts = schedule(text, MESH).parts
    transfers = [transfer for part in parts for transfer in part.transfers]
    assert {"all-gather", "reduce-scatter"} <= {transfer.op for transfer in transfers}
    begun = [step.index for part in parts for step in part.steps if step.kind == "start"]
    assert begun and len(begun) == len(set(begun))


FLOPS = [
    ("dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "f32[8,2]{1,0}", 128),
    # cuBLAS gives a workspace beside the product.
    (
        'custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_'
        'config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}',
        "(f32[8,2]{1,0}, s8[64]{0})",
        128,
    ),
    ('custom-call(%x, %w), custom_call_target="__cudnn$conv"', "f32[8,2]{1,0}", None),
    ("convolution(%x, %w), dim_labels=bf_io->bf", "f32[8,2]{1,0}", 128),
    # 3 batches as a dimension of space, each meeting one kernel position alone.
    (
        "convolution(%b3, %k3), window={size=3 stride=2 lhs_dilate=3}, dim_labels=0bf_0io->0bf",
        "f32[3,8,2]{2,1,0}",
        2 * 3 * 8 * 2 * 4,
    ),
    # Of 4 x 3 pairs of places the first and the last lie in the padding.
    (
        "convolution(%row, %k3), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f",
        "f32[1,4,2]{2,1,0}",
        2 * 10 * 4 * 2,
    ),
]


@pytest.mark.parametrize(("written", "result", "flops"), FLOPS)
def test_operations_of_a_product(written: str, result: str, flops: int | None):
    module = parse(
        f"""HloModule m

ENTRY %main (x: bf16[8,4]) -> f32[8,2] {{
  %x = bf16[8,4]{{1,0}} parameter(0)
  %w = bf16[4,2]{{1,0}} parameter(1)
  %b3 = bf16[3,8,4]{{2,1,0}} parameter(2)
  %k3 = bf16[3,4,2]{{2,1,0}} parameter(3)
  %row = bf16[1,4,4]{{2,1,0}} parameter(4)
  ROOT %product = {result} {written}
}}
"""
    )
    main = module.computations["main"]
    assert Flops(module).of(main, main.root) == flops
