"""What is hidden behind products, in schedules written by hand: every figure can be added up."""

from pathlib import Path

import pytest
from jax.sharding import AbstractMesh

from jzero.hlo import overlapped_fraction

TEXTS = Path(__file__).parent / "texts"
MESH = AbstractMesh((8,), ("data",))
GROUP = "channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, use_global_device_ids=true"

HEAD = """HloModule m, is_scheduled=true, num_partitions=8

%gemm (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  %a = f32[8,8]{1,0} parameter(0)
  %b = f32[8,8]{1,0} parameter(1)
  ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%sum (p: f32[], q: f32[]) -> f32[] {
  %p = f32[] parameter(0)
  %q = f32[] parameter(1)
  ROOT %s = f32[] add(%p, %q)
}

%test (c: (s32[], f32[8,8], f32[64])) -> pred[] {
  %c = (s32[], f32[8,8]{1,0}, f32[64]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""
PARTS = """  %carried = (s32[], f32[8,8]{1,0}, f32[64]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = f32[8,8]{1,0} get-tuple-element(%carried), index=1
  %w = f32[64]{0} get-tuple-element(%carried), index=2
"""
PRODUCT = "  %product{n} = f32[8,8]{{1,0}} fusion(%x, %x), kind=kCustom, calls=%gemm\n"
OTHER = "  %other{n} = f32[8,8]{{1,0}} negate(%x)\n"
START = "  %start{n} = (f32[{size}]{{0}}, f32[{full}]{{0}}) all-gather-start(%w{n}), {group}\n"
DONE = "  %done{n} = f32[{full}]{{0}} all-gather-done(%start{n})\n"
TRIPS = 'backend_config={"known_trip_count":{"n":"%d"}}'
CARRIED = "(s32[], f32[8,8], f32[64])"
END = "  ROOT %out = (s32[], f32[8,8]{1,0}, f32[64]{0}) tuple(%i, %x, %w)\n"


def gather(*between: str, size: int = 64, n: int = 1) -> str:
    """An all-gather of `size` elements a device, with lines between start and done."""
    fill = {"n": n, "size": size, "full": 8 * size, "group": GROUP}
    source = f"  %w{n} = f32[{size}]{{0}} broadcast(%i), dimensions={{}}\n"
    return source + START.format(**fill) + "".join(between) + DONE.format(**fill)


def product(n: int) -> str:
    return PRODUCT.format(n=n)


def other(n: int) -> str:
    return OTHER.format(n=n)


def loop(body: str, trips: int = 10, more: str = "", after: str = "") -> str:
    """A program whose loop has this body."""
    return f"""{HEAD}{more}
%body (carried: {CARRIED}) -> {CARRIED} {{
{PARTS}{body}{END}}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %i = s32[] constant(0)
  %w = f32[64]{{0}} broadcast(%i), dimensions={{}}
  %first = {CARRIED} tuple(%i, %x, %w)
  %loop = {CARRIED} while(%first), condition=%test, body=%body, {TRIPS % trips}
{after}  ROOT %y = f32[8,8]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


def entry(body: str, more: str = "") -> str:
    """A program without loops."""
    return f"""{HEAD}{more}
ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %i = s32[] constant(0)
{body}  ROOT %y = f32[8,8]{{1,0}} negate(%x)
}}
"""


@pytest.mark.parametrize(
    "version, hidden, total",
    [
        # 8 layers of two weights of equal bytes, defaults. Forward, 8 times: one of two gathers has
        # a product. Backward, 7 times (the 8th stands after the loop): one of two gathers, and
        # both gradients' reduce-scatters.
        ("0.10.2", 8 + 7 + 2 * 7, 8 * 2 + 7 * 4),
        # Pipelined, a layer or two before and after the loops. Forward, 7 times: both gathers, in
        # one. Backward, 6 times: both reduce-scatters, in one; its gathers are synchronous.
        ("0.12.0", 7 * 2 + 6 * 2, 7 * 2 + 6 * 4),
    ],
)
def test_layers_as_compiled(version: str, hidden: int, total: int):
    text = (TEXTS / f"layers-h100-jax-{version}.txt").read_text()
    assert overlapped_fraction(text, MESH) == hidden / total


def test_bytes_count_and_not_collectives():
    """96 of 128 elements a device have a product between start and done."""
    hidden = gather(other(1), product(1), size=96, n=1)
    bare = gather(other(2), size=32, n=2)
    assert overlapped_fraction(loop(hidden + bare + product(3)), MESH) == 96 / 128


def test_loops_are_multiplied_out():
    """An inner loop of 3 in an outer of 10: 30 x 32 hidden elements, and 10 x 64 bare ones."""
    inner = f"""
%inner (carried: {CARRIED}) -> {CARRIED} {{
{PARTS}{gather(product(1), size=32)}{END}}}
"""
    nested = (
        "  %nested = (s32[], f32[8,8]{1,0}, f32[64]{0}) while(%carried), condition=%test, "
        f"body=%inner, {TRIPS % 3}\n"
    )
    body = nested + gather(other(5), n=2) + product(6)
    assert overlapped_fraction(loop(body, more=inner), MESH) == 960 / (960 + 640)
    # Without a product of its own the outer loop is no layer loop: its gather does not count.
    body = nested + gather(other(5), n=2)
    assert overlapped_fraction(loop(body, more=inner), MESH) == 1.0


def test_what_is_outside_of_layer_loops_does_not_count():
    body = gather(product(1))
    assert overlapped_fraction(loop(body, after=gather(other(2), size=4096, n=2)), MESH) == 1.0


def test_a_product_before_or_after_hides_nothing():
    assert overlapped_fraction(loop(product(1) + gather(other(1)) + product(2)), MESH) == 0.0


def test_synchronous_collectives_hide_nothing():
    bare = f"  %bare = f32[512]{{0}} all-gather(%w), {GROUP}\n"
    assert overlapped_fraction(loop(gather(product(1)) + bare), MESH) == 0.5
    assert overlapped_fraction(loop(bare + product(1)), MESH) is None
    marked = gather(product(1)).replace(
        GROUP, GROUP + ', backend_config={"collective_backend_config":{"is_sync":true}}'
    )
    assert overlapped_fraction(loop(marked), MESH) is None


def test_a_loop_of_unknown_length_is_unknown():
    text = loop(gather(product(1))).replace(", " + TRIPS % 10, "")
    assert overlapped_fraction(text, MESH) is None


def carried(before: str, after: str) -> str:
    """A body that ends a gather that the iteration before it has started."""
    kind = "(f32[64]{0}, f32[512]{0})"
    return f"""{HEAD}
%body (carried: {CARRIED}) -> {CARRIED} {{
  %carried = (s32[], f32[8,8]{{1,0}}, {kind}) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%carried), index=1
  %earlier = {kind} get-tuple-element(%carried), index=2
{before}  %done = f32[512]{{0}} all-gather-done(%earlier)
  %w = f32[64]{{0}} slice(%done), slice={{[0:64]}}
{product(8)}  %start = {kind} all-gather-start(%w), {GROUP}
{after}  ROOT %out = (s32[], f32[8,8]{{1,0}}, {kind}) tuple(%i, %x, %start)
}}

ENTRY %main (x: f32[8,8]) -> f32[8,8] {{
  %x = f32[8,8]{{1,0}} parameter(0)
  %i = s32[] constant(0)
  %w = f32[64]{{0}} broadcast(%i), dimensions={{}}
  %begin = {kind} all-gather-start(%w), {GROUP}
  %first = (s32[], f32[8,8]{{1,0}}, {kind}) tuple(%i, %x, %begin)
  %loop = {CARRIED} while(%first), condition=%test, body=%body, {TRIPS % 9}
  ROOT %y = f32[8,8]{{1,0}} get-tuple-element(%loop), index=1
}}
"""


@pytest.mark.parametrize(
    "before, after, share",
    [(product(1), other(1), 1.0), (other(1), product(1), 1.0), (other(1), other(2), 0.0)],
    ids=["from the top", "to the end", "not at all"],
)
def test_pipelined_from_one_iteration_to_the_next(before: str, after: str, share: float):
    assert overlapped_fraction(carried(before, after), MESH) == share


def test_handed_on_through_a_barrier():
    kind = "(f32[64]{0}, f32[512]{0})"
    held = f"  %held = {kind} opt-barrier(%earlier)\n"
    text = carried(held + product(1), other(1)).replace(
        "all-gather-done(%earlier)", "all-gather-done(%held)"
    )
    assert "(%held)" in text and overlapped_fraction(text, MESH) == 1.0


def test_without_loops_the_large_ones_count():
    """1 MiB sent: 2**20 * 8/7 / 8 elements of 4 bytes a device; below it nothing counts."""
    mib = 2**20 // 7 // 4 + 1
    body = gather(product(1), size=3 * mib, n=1) + gather(size=mib, n=2) + gather(size=64, n=3)
    assert overlapped_fraction(entry(body), MESH) == 0.75
    assert overlapped_fraction(entry(gather(product(1), size=64)), MESH) is None


@pytest.mark.parametrize(
    "line",
    [
        "  %p = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n",
        "  %p = f32[8,8]{1,0} convolution(%x, %x), dim_labels=bf_io->bf\n",
        '  %p = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"\n',
        '  %p = f32[8,8]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"\n',
        "  %p = f32[8,8]{1,0} call(%x, %x), to_apply=%gemm\n",
        "  %p = f32[8,8]{1,0} conditional(%i, %x, %x), branch_computations={%test, %gemm}\n",
    ],
    ids=["dot", "convolution", "cublasLt", "cublas", "call", "branch"],
)
def test_forms_of_a_product(line: str):
    assert overlapped_fraction(loop(gather(line)), MESH) == 1.0


def test_a_wrapped_collective():
    more = f"""
%wrapped (v: f32[512]) -> f32[64] {{
  %v = f32[512]{{0}} parameter(0)
  ROOT %scatter = f32[64]{{0}} reduce-scatter(%v), {GROUP}, dimensions={{0}}, to_apply=%sum
}}
"""
    kind = "((f32[512]{0}), f32[64]{0})"
    begin = f"""  %v = f32[512]{{0}} broadcast(%i), dimensions={{}}
  %begin = {kind} async-start(%v), calls=%wrapped
"""
    end = f"""  %update = {kind} async-update(%begin)
  %end = f32[64]{{0}} async-done(%update)
"""
    assert overlapped_fraction(loop(begin + product(1) + end, more=more), MESH) == 1.0
    assert overlapped_fraction(loop(begin + end + product(1), more=more), MESH) == 0.0


def test_a_chain_of_fusions():
    """XLA:TPU: a fusion that starts the gather, one that computes meanwhile, one that ends it."""
    full, chain = "f32[512]{0}", f'{GROUP}, frontend_attributes={{chain_id="1"}}'
    mention = f"  %g = {full} all-gather(%v), {chain}\n"

    def fused(name: str, root: str) -> str:
        return f"""
%{name} (v: f32[64]) -> {full} {{
  %v = f32[64]{{0}} parameter(0)
{mention}{root}}}
"""

    mark = "  ROOT %c = f32[512]{0} custom-call(%g), custom_call_target="
    more = (
        fused("opens", f'{mark}"AsyncCollectiveStart"\n')
        + fused("goes_on", f"  %p = f32[8,8]{{1,0}} dot(%v, %v)\n  ROOT %t = {full} copy(%g)\n")
        + fused("closes", f'{mark}"AsyncCollectiveDone"\n')
    )
    begin = f"  %begin = {full} fusion(%w), kind=kCustom, calls=%opens\n"
    middle = f"  %on = {full} fusion(%begin), kind=kOutput, calls=%goes_on\n"
    end = f"  %end = {full} fusion(%on), kind=kCustom, calls=%closes\n"
    assert overlapped_fraction(loop(begin + middle + end, more=more), MESH) == 1.0
    bare = begin + end.replace("%on", "%begin") + product(1)
    assert overlapped_fraction(loop(bare, more=more), MESH) == 0.0
