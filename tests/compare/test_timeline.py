"""A schedule at peak rates: when transfers are through, where a device waits, how it is drawn."""

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from comparisons import GB, SCHEDULE, TARGET, gather, product, scatter

from jzero import targets
from jzero.compare.page.play import Played, play
from jzero.compare.page.rates import Rates
from jzero.compare.page.svg import framed
from jzero.compare.page.timeline import timeline
from jzero.compare.schedule.parts import Part, Schedule, Step, Transfer

RATES = Rates(TARGET, {"data": 8})
PLAYED = play(SCHEDULE, RATES)


def step(*steps: Step, sent: tuple[Transfer, ...] = ()) -> Played:
    return play(Schedule((Part("step", 1, steps, sent),)), RATES)[0]


def spans(run: Played) -> list[tuple[float, float, float, float]]:
    return [(each.begin, each.end, each.sends, each.sent) for each in run.flights]


START, DONE, SEND = (Step(kind, index=0) for kind in ("start", "done", "send"))


def test_a_transfer_behind_longer_products_costs_nothing():
    run = step(START, product(5), DONE, sent=(gather(3),))
    assert (run.length, run.waits) == (5, ())
    assert spans(run) == [(0, 5, 0, 3)]
    assert run.flights[0].meanwhile.products == 1


def test_a_device_waits_for_what_its_products_do_not_cover():
    run = step(product(1), START, product(2), DONE, product(1), sent=(gather(3),))
    assert (run.length, run.waits) == (5, ((3, 4),))
    assert (run.flights[0].waited, run.flights[0].meanwhile.computing) == (1, 2)
    assert (run.totals.computing, run.totals.sending) == (4, 3)


def test_a_synchronous_transfer_is_waited_for():
    assert step(product(1), SEND, sent=(gather(3),)).waits == ((1, 4),)


def test_transfers_take_turns_on_the_links():
    second = (Step("start", index=1), Step("done", index=1))
    run = step(START, second[0], product(1), DONE, second[1], sent=(gather(3), scatter(2)))
    assert spans(run) == [(0, 3, 0, 3), (0, 5, 3, 5)]


def test_a_loop_is_played_in_its_steady_state():
    # The first iteration has nothing to wait for; from the second on each waits for the one before:
    # 4 s on the links, from 5 s on, so 3 s into the next iteration, which has computed for 1 s.
    backward = PLAYED[2]
    assert (backward.length, backward.waits) == (6 + 2, ((1, 3),))
    before, after = backward.flights
    assert (before.before, before.begin, before.end, before.sent) == (True, 0, 3, 3)
    assert (after.after, after.begin, after.end, after.sends) == (True, 7, 8, 7)


def test_the_whole_holds_all_iterations_of_its_loops():
    whole, forward, backward = PLAYED
    assert forward.length == 3 and forward.waits == ()
    assert whole.length == 3 + 40 * 3 + 2 + 40 * 8 + 5
    assert whole.totals.computing == 40 * 3 + 2 + 40 * 6
    assert whole.totals.products == 40 * 2 + 1 + 40 * 3
    assert whole.exact


def test_fp32_products_take_twice_as_long():
    assert step(product(1, dtype="f32")).length == 2


def test_what_is_not_known_is_said():
    assert not step(Step("product", None)).exact
    assert not step(SEND, sent=(gather(None),)).exact
    unknown = Part("", None, (product(1),), ())
    whole = Part("step", 1, (Step("loop", index=1),), ())
    assert not play(Schedule((whole, unknown)), RATES)[0].exact
    assert not play(Schedule((replace(whole, steps=(), left_out=(1, 2)),)), RATES)[0].exact


def test_without_rates_the_order_is_left():
    whole = play(SCHEDULE, None)[0]
    assert whole.length == whole.totals.computing == (40 * 3 + 2 + 40 * 6) * 1e12
    assert whole.waits == () and whole.totals.sending == 0


def test_links_of_a_node_are_faster_than_those_between_nodes():
    many = targets.parse("h100:64")
    link, network = many.link_bytes_per_s or 0, many.network_bytes_per_s or 0
    rates = Rates(many, {"replica": 8, "data": 4, "tensor": 2})
    assert rates.ring(("data",)) == rates.ring(("tensor",)) == link
    assert rates.ring(("replica",)) == rates.ring(()) == min(link, 8 * network)
    assert Rates.of(targets.parse("cpu:8"), {"data": 8}) is None
    assert Rates.of(None, {"data": 8}) is None


def shapes(number: int, timed: bool = True) -> list[tuple[str, float, float]]:
    """Class, left edge and right edge of what is drawn, in seconds."""
    played = PLAYED if timed else play(SCHEDULE, None)
    chart = timeline(SCHEDULE, played, number, timed)
    whole = played[number].length
    found = []
    for rect in ET.fromstring(framed(chart, "chart")).iter("rect"):
        left, width = (float(rect.attrib[key].rstrip("%")) / 100 for key in ("x", "width"))
        found.append((rect.attrib["class"], left * whole, (left + width) * whole))
    return found


def about(begin: float, end: float, whole: float = 8):
    return pytest.approx(begin, abs=whole * 1e-4), pytest.approx(end, abs=whole * 1e-4)


def test_work_and_waits_are_drawn_where_they_are():
    assert shapes(2)[:4] == [
        ("track", *about(0, 8)),
        ("recomputed gap", *about(0, 1)),
        ("backward gap", *about(3, 7)),
        ("backward gap", *about(7, 8)),
    ]
    assert ("wait", *about(1, 3)) in shapes(2)


def test_a_transfer_across_iterations_is_drawn_at_both_ends():
    found = [shape for shape in shapes(2) if shape[0] == "reduce-scatter"]
    assert found == [("reduce-scatter", *about(0, 3)), ("reduce-scatter", *about(7, 8))]
    content = timeline(SCHEDULE, PLAYED, 2, True).content
    assert "◂" in content and "▸" in content
    forward = timeline(SCHEDULE, PLAYED, 1, True).content
    assert "◂" not in forward and "all-gather 1.5 GB, for the next iteration" in forward


def test_the_time_on_the_links_is_solid_within_the_transfer():
    assert ("all-gather window edge-all-gather", *about(1, 3, 3)) in shapes(1)
    assert ("all-gather", *about(1, 2.5, 3)) in shapes(1)


def test_a_loop_and_what_it_sends_are_drawn_in_the_whole():
    content = timeline(SCHEDULE, PLAYED, 0, True).content
    assert "forward × 40" in content and "backward × 40" in content
    assert "40 all-gathers, 60.0 GB" in content
    assert "on the links for 50% of the loop" in content


def test_small_transfers_are_not_drawn():
    sent = (gather(3), replace(gather(3), bytes=GB // 1000))
    part = Part("step", 1, (SEND, Step("send", index=1), product(1)), sent)
    found = Schedule((part,))
    assert timeline(found, play(found, RATES), 0, True).content.count('class="all-gather"') == 1


def test_without_rates_a_synchronous_transfer_is_a_mark():
    part = Part("step", 1, (product(1), SEND, SEND, product(1)), (gather(3),))
    found = Schedule((part,))
    content = timeline(found, play(found, None), 0, False).content
    assert content.count("mark edge-all-gather") == 1 and "2 all-gathers, 6.0 GB" in content
    assert "2 TFLOP" in content
