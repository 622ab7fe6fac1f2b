"""The HLO text parser: shapes, operands, attributes, and what it refuses."""

import pytest

from jzero.errors import JzeroError
from jzero.hlo.text import Shape, parse

TEXT = """HloModule jit_f, entry_computation_layout={(f32[8]{0})->f32[8]{0}}, num_partitions=4

FileNames
1 "somewhere.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(f32[] %a, f32[] %b), metadata={op_name="calls=%other"}
}

ENTRY %main (x: f32[8]) -> (bf16[2,3], s4[3]) {
  %x = f32[8]{0:T(8,128)(2,1)S(1)} parameter(0)
  %label = u8[3]{0} constant("a)b")
  %both = (bf16[2,3]{1,0}, /*index=1*/s4[3]{0}) custom-call(%x, /*index=1*/%label), calls=%sum
  ROOT %copy = (bf16[2,3]{1,0}, s4[3]{0}) copy(%both), metadata={op_name="jit(f)/copy"}
}
"""


def test_instructions_are_read():
    module = parse(TEXT)
    assert (module.entry, module.partitions, module.replicas) == ("main", 4, 1)
    assert set(module.computations) == {"main", "sum"}
    both = module.computations["main"].by_name["both"]
    assert both.opcode == "custom-call"
    assert both.shapes == (Shape("bf16", (2, 3)), Shape("s4", (3,)))
    assert both.operands == ("x", "label")
    assert both.called == ("sum",)
    root = module.computations["main"].root
    assert (root.name, root.source) == ("copy", "jit(f)/copy")


def test_operands_may_carry_shapes_and_metadata_is_no_attribute():
    add = parse(TEXT).computations["sum"].root
    assert add.operands == ("a", "b")
    assert add.called == ()


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        ("pred", 10),
        ("bf16", 20),
        ("f32", 40),
        ("f8e4m3fn", 10),
        ("s4", 5),
        ("c64", 80),
        ("token", 0),
    ],
)
def test_bytes_of_a_dtype(dtype: str, size: int):
    assert Shape(dtype, (5, 2)).bytes == size


def test_an_unknown_dtype_is_named():
    with pytest.raises(JzeroError, match="'weird'"):
        _ = Shape("weird", (2,)).bytes


def test_other_text_is_refused():
    with pytest.raises(JzeroError, match="no ENTRY computation"):
        parse("module @jit_f { func.func public @main() { return } }")
