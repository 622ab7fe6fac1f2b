"""What compilers make of arrays on their way, in programs written by hand."""

import re

import pytest
from jax.sharding import AbstractMesh

import jzero
from jzero.auditing import Kind, Moved
from jzero.auditing.frames import frames
from jzero.hlo.text import parse

MESH = AbstractMesh((8,), ("data",))
GROUP = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"
HEAD = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }, \
num_partitions=8

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}
"""
ARGUMENTS = """  %w = f32[64,64]{1,0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %x = f32[32,64]{1,0} parameter(1), metadata={op_name="batch"}
"""
DIMS = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
BACKWARD = 'metadata={op_name="jit(step)/transpose(jvp())/dot_general" stack_frame_id=2}'


def program(body: str, more: str = "") -> str:
    """Of w [64, 64], which output 0 overwrites, and a batch x [32, 64]; outputs: new w, a loss."""
    arguments, result = "w: f32[64,64], x: f32[32,64]", "(f32[64,64], f32[])"
    return f"{HEAD}{more}\nENTRY %main ({arguments}) -> {result} {{\n{ARGUMENTS}{body}}}\n"


def moved(text: str) -> list[Moved]:
    return list(jzero.audit(text, MESH, weights=["params"]).moved)


# A product with w is an activation, one with x transposed a gradient; both are reduced.
PRODUCTS = f"""  %y = f32[32,64]{{1,0}} dot(%x, %w), {DIMS}, {BACKWARD}
  %t = f32[64,32]{{1,0}} transpose(%x), dimensions={{1,0}}
  %g = f32[64,64]{{1,0}} dot(%t, %y), {DIMS}
"""
USES = f"""  %z = f32[32,64]{{1,0}} dot(%activation, %w), {DIMS}
  %zero = f32[] constant(0)
  %loss = f32[] reduce(%z, %zero), dimensions={{0,1}}, to_apply=%sum
  %new = f32[64,64]{{1,0}} subtract(%w, %gradient)
  ROOT %out = (f32[64,64]{{1,0}}, f32[]) tuple(%new, %loss)
"""


def test_arrays_laid_end_to_end_for_one_all_reduce():
    """As XLA:GPU combines them: a gradient does not hide the activation beside it."""
    packed = f"""  %flat_g = f32[4096]{{0}} bitcast(%g)
  %flat_y = f32[2048]{{0}} bitcast(%y)
  %laid = f32[6144]{{0}} concatenate(%flat_g, %flat_y), dimensions={{0}}
  %start = f32[6144]{{0}} all-reduce-start(%laid), {GROUP}, to_apply=%sum
  %done = f32[6144]{{0}} all-reduce-done(%start)
  %cut_g = f32[4096]{{0}} slice(%done), slice={{[0:4096]}}
  %cut_y = f32[2048]{{0}} slice(%done), slice={{[4096:6144]}}
  %gradient = f32[64,64]{{1,0}} bitcast(%cut_g)
  %activation = f32[32,64]{{1,0}} bitcast(%cut_y)
"""
    found = moved(program(PRODUCTS + packed + USES))
    assert [(each.kind, each.elements) for each in found] == [
        (Kind.GRADIENT, 4096),
        (Kind.ACTIVATION, 2048),
    ]
    assert sum(each.bytes or 0 for each in found) == 2 * 6144 * 4 * 7 // 8
    assert found[1].op_name == "jit(step)/transpose(jvp())/dot_general"


def test_a_packed_array_that_is_used_whole_stays_one():
    """A cut across both: what it moves is no gradient alone."""
    across = f"""  %flat_g = f32[4096]{{0}} bitcast(%g)
  %flat_y = f32[2048]{{0}} bitcast(%y)
  %laid = f32[6144]{{0}} concatenate(%flat_y, %flat_g), dimensions={{0}}
  %done = f32[6144]{{0}} all-reduce(%laid), {GROUP}, to_apply=%sum
  %cut_g = f32[4096]{{0}} slice(%done), slice={{[1024:5120]}}
  %cut_y = f32[2048]{{0}} slice(%done), slice={{[0:2048]}}
  %gradient = f32[64,64]{{1,0}} bitcast(%cut_g)
  %activation = f32[32,64]{{1,0}} bitcast(%cut_y)
"""
    assert [each.elements for each in moved(program(PRODUCTS + across + USES))] == [6144]


def test_one_collective_for_weights_and_activations():
    """As XLA combines gathers of one step of the schedule; the start hands its operands on."""
    types = "(f32[64,64]{1,0}, f32[32,64]{1,0}), (f32[512,64]{1,0}, f32[256,64]{1,0})"
    combined = f"""  %start = ({types}) all-gather-start(%w, %y), {GROUP}, dimensions={{0}}
  %done = (f32[512,64]{{1,0}}, f32[256,64]{{1,0}}) all-gather-done(%start)
  %whole_w = f32[512,64]{{1,0}} get-tuple-element(%done), index=0
  %whole_y = f32[256,64]{{1,0}} get-tuple-element(%done), index=1
  %activation = f32[32,64]{{1,0}} slice(%whole_y), slice={{[0:32], [0:64]}}
  %gradient = f32[64,64]{{1,0}} slice(%whole_w), slice={{[0:64], [0:64]}}
"""
    found = moved(program(PRODUCTS + combined + USES))
    assert [(each.kind, each.dims, each.arguments) for each in found] == [
        (Kind.WEIGHT, (512, 64), ("params['w']",)),
        (Kind.ACTIVATION, (256, 64), ()),
    ]
    assert [each.bytes for each in found] == [7 * 64 * 64 * 4, 7 * 32 * 64 * 4]


def test_one_array_moved_twice_is_sent_twice():
    twice = f"""  %both = (f32[64,64]{{1,0}}, f32[64,64]{{1,0}}) all-reduce(%g, %g), {GROUP}, \
to_apply=%sum
  %one = f32[64,64]{{1,0}} get-tuple-element(%both), index=0
  %other = f32[64,64]{{1,0}} get-tuple-element(%both), index=1
  %gradient = f32[64,64]{{1,0}} add(%one, %other)
  %activation = f32[32,64]{{1,0}} copy(%y)
"""
    report = jzero.audit(program(PRODUCTS + twice + USES), MESH, weights=["params"])
    assert [each.elements for each in report.moved] == [4096, 4096]
    report.assert_volume(4, 64 * 64, tolerance=0)
    with pytest.raises(AssertionError, match=r"4\.000  all-reduce, gradients, f32 over data"):
        report.assert_volume(2, 64 * 64)


@pytest.mark.parametrize(
    "name, between, kept",
    [
        ("jvp()", True, True),
        ("transpose(jvp())", True, True),
        ("transpose(jvp())/rematted_computation", True, False),  # a layer, done again
        ("jvp()", False, False),
    ],
)
def test_a_weight_is_kept_over_other_weights(name: str, between: bool, kept: bool):
    """Forward and backward both multiply with it; what lies between decides."""
    passes = "jvp()", name, "transpose(jvp())"
    y, z, g = (f'metadata={{op_name="jit(step)/{each}/dot"}}' for each in passes)
    other = f"  %z = f32[32,64]{{1,0}} dot(%x, %w), {DIMS}, {z}\n"
    body = f"""  %whole = f32[512,64]{{1,0}} all-gather(%w), {GROUP}, dimensions={{0}}
  %part = f32[64,64]{{1,0}} slice(%whole), slice={{[0:64], [0:64]}}
{"" if between else other}  %y = f32[32,64]{{1,0}} dot(%x, %part), {DIMS}, {y}
{other if between else ""}  %back = f32[32,64]{{1,0}} dot(%y, %part), {DIMS}, {g}
  %t = f32[64,32]{{1,0}} transpose(%x), dimensions={{1,0}}
  %g = f32[64,64]{{1,0}} dot(%t, %back), {DIMS}
  %new = f32[64,64]{{1,0}} subtract(%w, %g)
  %loss = f32[] constant(0)
  ROOT %out = (f32[64,64]{{1,0}}, f32[]) tuple(%new, %loss)
"""
    report = jzero.audit(program(body), MESH)
    assert report.kept is not None
    assert [each.arguments for each in report.kept] == ([("params['w']",)] if kept else [])


def test_random_numbers_come_from_no_argument():
    text = program(
        PRODUCTS
        + f"""  %seed = u64[2]{{0}} constant({{1, 2}})
  %rng = (u64[2]{{0}}, f32[4,64]{{1,0}}) rng-bit-generator(%seed), algorithm=rng_default
  %bits = f32[4,64]{{1,0}} get-tuple-element(%rng), index=1
  %mask = f32[32,64]{{1,0}} all-gather(%bits), {GROUP}, dimensions={{0}}
  %activation = f32[32,64]{{1,0}} multiply(%y, %mask)
  %gradient = f32[64,64]{{1,0}} copy(%g)
"""
        + USES
    )
    report = jzero.audit(text, MESH, weights=["params"])
    assert [each.kind for each in report.moved] == [Kind.UNKNOWN]
    with pytest.raises(AssertionError, match="made from no argument: random numbers, or constants"):
        report.assert_no_collective_on_activations()


TABLES = """
FileNames
1 "/home/me/model.py"
2 "/usr/lib/python3/site-packages/flax/linear.py"

FunctionNames
1 "layer"

FileLocations
1 {file_name_id=1 function_name_id=1 line=21 end_line=21 column=12 end_column=12}
2 {file_name_id=2 function_name_id=1 line=99 end_line=99 column=12 end_column=12}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""


def test_the_line_is_the_users():
    """The innermost that is not in an installed package; a caller's number is written plus one."""
    text = program(PRODUCTS + USES, TABLES).replace("%activation", "%y").replace("%gradient", "%g")
    product = parse(text).computations["main"].by_name["y"]
    assert frames(text).line(product) == "model.py:21"
    installed = text.replace("/home/me/", "/usr/lib/python3/site-packages/")
    assert frames(installed).line(product) == "linear.py:99"
    beside = text.replace("stack_frame_id=2", 'source_file="/home/me/old.py" source_line=7')
    assert frames(beside).line(parse(beside).computations["main"].by_name["y"]) == "old.py:7"
    assert frames(program(PRODUCTS + USES)).line(product) == ""


def test_a_text_that_is_cut_short():
    text = program(PRODUCTS + USES)
    with pytest.raises(jzero.JzeroError, match=re.escape("the text is not complete")):
        moved(text)
