"""Trip counts: the compiler's note, or the counter in the loop's condition."""

import pytest

from jzero.hlo.loops import trip_count
from jzero.hlo.text import parse

LOOP = """HloModule loop

%fused_compare {{
  %p = s32[] parameter(0)
  %c = s32[] constant({limit})
  ROOT %lt = pred[] compare(%p, %c), direction=LT
}}

%fused_add {{
  %p.1 = s32[] parameter(0)
  %c.1 = s32[] constant({step})
  ROOT %add.1 = s32[] add(%p.1, %c.1)
}}

%condition {{
  %state = (s32[], f32[8], s32[]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %end = s32[] get-tuple-element(%state), index=2
  %limit = s32[]{{:T(128)}} constant({limit})
  ROOT %test = pred[] {test}
}}

%body {{
  %state.1 = (s32[], f32[8], s32[]) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %x.1 = f32[8] get-tuple-element(%state.1), index=1
  %end.1 = s32[] get-tuple-element(%state.1), index=2
  %copy.1 = s32[]{{:S(6)}} copy(%i.1)
  %step = s32[] constant({step})
  %next = s32[] {next}
  ROOT %after = (s32[], f32[8], s32[]) tuple(%next, %x.1, %end.1)
}}

ENTRY %main {{
  %x = f32[8] parameter(0)
  %first = s32[] constant({first})
  %first.1 = s32[] copy(%first)
  %limit.1 = s32[] constant({limit})
  %before = (s32[], f32[8], s32[]) tuple(%first.1, %x, %limit.1)
  ROOT %while = (s32[], f32[8], s32[]) while(%before), condition=%condition, body=%body{note}
}}
"""
ADD = "add(%copy.1, %step)"


def trips(
    test: str, next: str = ADD, first: int = 0, limit: int = 5, step: int = 1, note: str = ""
) -> int | None:
    module = parse(
        LOOP.format(test=test, next=next, first=first, limit=limit, step=step, note=note)
    )
    main = module.computations["main"]
    return trip_count(module, main, main.root)


def test_the_compilers_note_wins():
    note = (
        ', backend_config={"known_trip_count":{"n":"7"},"known_init_step":{"init":"0","step":"1"}}'
    )
    assert trips("compare(%i, %limit), direction=LT", note=note) == 7


def test_a_constant_limit():
    assert trips("compare(%i, %limit), direction=LT") == 5
    assert trips("compare(%limit, %i), direction=GT") == 5
    assert trips("compare(%i, %limit), direction=LE") == 6
    assert trips("compare(%i, %limit), direction=LT", first=1, step=3, limit=8) == 3
    assert trips("compare(%i, %limit), direction=LT", first=9) == 0


def test_counting_down():
    test = "compare(%i, %limit), direction=GT"
    assert trips(test, first=6, limit=0, step=-2) == 3
    assert trips(test, next="subtract(%copy.1, %step)", first=6, limit=0, step=2) == 3


def test_a_limit_that_the_loop_carries_unchanged():
    assert trips("compare(%i, %end), direction=LT") == 5


def test_fused_condition_and_step():
    test = "fusion(%i), kind=kLoop, calls=%fused_compare"
    assert trips(test, next="fusion(%copy.1), kind=kLoop, calls=%fused_add") == 5


@pytest.mark.parametrize(
    ("test", "next"),
    [
        ("compare(%i, %limit), direction=NE", ADD),
        ("compare(%i, %limit), direction=LT", "multiply(%copy.1, %step)"),
        ("compare(%i, %limit), direction=LT", "add(%end.1, %step)"),
        ("custom-call(%i)", ADD),
    ],
)
def test_anything_else_is_unknown(test: str, next: str):
    assert trips(test, next) is None


def test_a_counter_that_runs_away_from_its_limit_is_unknown():
    assert trips("compare(%i, %limit), direction=LT", step=-1) is None
