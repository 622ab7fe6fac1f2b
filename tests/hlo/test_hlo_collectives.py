"""Collectives of committed HLO texts of three compilers and two JAX versions, by hand."""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from jzero.hlo import Collective, bytes_by, collectives, count_by, elements_by, sites

TEXTS = Path(__file__).parent / "texts"
DATA_TENSOR = AbstractMesh((4, 2), ("data", "tensor"))
DATA = AbstractMesh((8,), ("data",))
GLOBAL = "channel_id=1, use_global_device_ids=true"


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0"])
@pytest.mark.parametrize(
    ("compiler", "dtype", "size", "gathers"),
    # XLA:GPU combines a layer's two gathers into one; XLA:CPU runs bf16 collectives in f32.
    [("h100", "bf16", 2, 15), ("v5e", "bf16", 2, 30), ("cpu", "f32", 4, 30)],
)
def test_a_program_of_known_traffic(
    version: str, compiler: str, dtype: str, size: int, gathers: int
):
    rows = collectives((TEXTS / f"step-{compiler}-jax-{version}.txt").read_text(), DATA_TENSOR)
    # 2 weights x 5 layers x 3 micro-batches, each 64 x 64; 4 devices along data, 2 along tensor.
    gathered = 2 * 5 * 3 * 64 * 64
    assert rows == [
        Collective("all-gather", ("data",), dtype, gathers, gathered, gathered * size * 3 // 4),
        Collective("all-reduce", ("data", "tensor"), "f32", 1, 1, 7),
        Collective("all-reduce", ("tensor",), dtype, 1, 16 * 64, 16 * 64 * size),
        Collective("all-to-all", ("data",), dtype, 1, 8 * 64, 8 * 64 * size * 3 // 4),
        Collective("collective-permute", ("data",), dtype, 1, 8 * 64, 8 * 64 * size),
        Collective("reduce-scatter", ("data",), dtype, 1, 64 * 64, 64 * 64 * size * 3 // 4),
    ]


@pytest.mark.parametrize("version", ["0.10.2", "0.12.0"])
def test_tpu_chains_count_once_and_its_fused_form_is_a_reduce_scatter(version: str):
    rows = collectives((TEXTS / f"layer-v5e-jax-{version}.txt").read_text(), DATA)
    weight = 2048 * 8192
    padded = 8512 * 2048  # the fused form pads 8192 rows to 8 x 1064, and all of them travel
    assert count_by(rows, "all-gather", "data", "bf16") == 2 * 6
    assert elements_by(rows, "all-gather") == 2 * 6 * weight
    assert bytes_by(rows, "all-gather") == 2 * 6 * weight * 2 * 7 // 8
    assert count_by(rows, "reduce-scatter", "data") == 2 * 6
    assert elements_by(rows, "reduce-scatter") == 6 * (weight + padded)
    assert bytes_by(rows, "reduce-scatter") == 6 * (weight + padded) * 2 * 7 // 8
    assert bytes_by(rows, "collective-permute") == 6 * 280 * 2048 * 2
    assert bytes_by(rows, "all-reduce") == 7


def test_a_site_says_where_it_comes_from():
    found = sites((TEXTS / "step-h100-jax-0.10.2.txt").read_text(), DATA_TENSOR)
    gather = next(site for site in found if site.op == "all-gather")
    assert gather.count == 15
    assert [shape.dims for shape in gather.operands] == [(16, 64), (16, 64)]
    assert gather.source.endswith("all_gather")


def program(body: str, header: str = "num_partitions=8", more: str = "") -> str:
    return f"""HloModule m, {header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}
{more}
ENTRY %main (x: f32[8], y: bf16[4,2]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %y = bf16[4,2]{{1,0}} parameter(1)
{body}
}}
"""


def test_a_wrapped_asynchronous_collective_counts_once():
    more = """
%wrapped (p: f32[8]) -> f32[1] {
  %p = f32[8]{0} parameter(0)
  ROOT %rs = f32[1]{0} reduce-scatter(%p), REDUCE
}
"""
    body = """  %start = ((f32[8]{0}), f32[1]{0}, u32[]) async-start(%x), calls=%wrapped
  %update = ((f32[8]{0}), f32[1]{0}, u32[]) async-update(%start), calls=%wrapped
  ROOT %done = f32[1]{0} async-done(%update), calls=%wrapped"""
    more = more.replace("REDUCE", f"{GLOBAL}, replica_groups=[1,8]<=[8], to_apply=%add")
    rows = collectives(program(body, more=more), DATA)
    assert rows == [Collective("reduce-scatter", ("data",), "f32", 1, 8, 28)]


def test_a_combined_collective_of_two_dtypes_is_a_row_for_each():
    body = "  ROOT %ag = (f32[64]{0}, bf16[32,2]{1,0}) all-gather(%x, %y), dimensions={0}, "
    body += f"{GLOBAL}, replica_groups={{{{0,1,2,3,4,5,6,7}}}}"
    assert collectives(program(body), DATA) == [
        Collective("all-gather", ("data",), "bf16", 1, 64, 112),
        Collective("all-gather", ("data",), "f32", 1, 64, 224),
    ]


def branches(second: str) -> str:
    reduce = (
        "all-reduce(%{0}), channel_id=1, replica_groups={{{{0,1,2,3,4,5,6,7}}}}, "
        "use_global_device_ids=true, to_apply=%add"
    )
    more = f"""
%first (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %r = f32[8]{{0}} {reduce.format("p")}
}}

%second (q: f32[8]) -> f32[8] {{
  %q = f32[8]{{0}} parameter(0)
  ROOT %t = f32[8]{{0}} {second or reduce.format("q")}
}}
"""
    body = """  %which = s32[] constant(0)
  ROOT %c = f32[8]{0} conditional(%which, %x, %x), branch_computations={%first, %second}"""
    return program(body, more=more)


def test_equal_branches_count_once_and_unequal_ones_are_unknown():
    assert collectives(branches(""), DATA) == [Collective("all-reduce", ("data",), "f32", 1, 8, 56)]
    assert collectives(branches("negate(%q)"), DATA) == [
        Collective("all-reduce", ("data",), "f32", None, None, None)
    ]


def test_a_loop_of_unknown_length_gives_no_count():
    more = """
%condition (s: (f32[8])) -> pred[] {
  %s.1 = (f32[8]{0}) parameter(0)
  ROOT %ask = pred[] custom-call(%s.1), custom_call_target="ask"
}

%body (s: (f32[8])) -> (f32[8]) {
  %s.2 = (f32[8]{0}) parameter(0)
  %v = f32[8]{0} get-tuple-element(%s.2), index=0
  %r = f32[8]{0} all-reduce(%v), replica_groups={}, GLOBAL, to_apply=%add
  ROOT %after = (f32[8]{0}) tuple(%r)
}
"""
    body = """  %before = (f32[8]{0}) tuple(%x)
  ROOT %w = (f32[8]{0}) while(%before), condition=%condition, body=%body"""
    rows = collectives(program(body, more=more.replace("GLOBAL", GLOBAL)), DATA)
    assert rows == [Collective("all-reduce", ("data",), "f32", None, None, None)]
    assert count_by(rows, "all-reduce") is None
    assert count_by(rows, "all-gather") == 0


@pytest.mark.parametrize(
    ("groups", "mesh", "axes", "sent"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", DATA_TENSOR, ("unknown",), 48),
        ("{{0},{1},{2},{3},{4},{5},{6},{7}}", DATA, (), 0),
        ("{{0,1,2,3,4,5,6,7}}", AbstractMesh((4,), ("data",)), ("unknown",), 56),
    ],
)
def test_groups_that_are_no_axes(groups: str, mesh: AbstractMesh, axes: tuple[str, ...], sent: int):
    body = f"  ROOT %r = f32[8]{{0}} all-reduce(%x), {GLOBAL}, to_apply=%add, "
    body += f"replica_groups={groups}"
    assert collectives(program(body), mesh) == [Collective("all-reduce", axes, "f32", 1, 8, sent)]


def test_replica_numbering_with_a_channel_means_every_partition():
    body = "  ROOT %r = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0}}, to_apply=%add"
    assert collectives(program(body), DATA)[0].axes == ("data",)
    alone = body.replace("channel_id=1, ", "")
    assert collectives(program(alone), DATA)[0].axes == ()
