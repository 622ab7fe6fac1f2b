"""The page in a real browser, light and dark, narrow and wide."""

from collections.abc import Iterator

import pytest
from browser import Browser, find, running
from comparisons import COMMAND, RESULT, TARGET

from jzero.compare.page import page
from jzero.compare.page.palette import DARK, LIGHT

THEMES = {"light": LIGHT, "dark": DARK}
WINDOWS = [(width, scheme) for width in (360, 1600) for scheme in THEMES]

# Words of charts that are shown: their text, box, and the box of the chart around them.
WORDS = """
[...document.querySelectorAll("svg.chart text")].filter(text => text.getClientRects().length)
  .map(text => {
    const box = text.getBoundingClientRect(), chart = text.ownerSVGElement;
    const [around, id] = [chart.getBoundingClientRect(), chart.getAttribute("aria-labelledby")];
    return {words: text.textContent, chart: id, left: box.left, right: box.right, top: box.top,
            bottom: box.bottom, first: around.left, last: around.right};
  })
"""

# Words that are shown on a bar and do not lie within one of the colour that they are written for.
ASTRAY = """
[...document.querySelectorAll("svg.chart text[class^=ink-]")].filter(text => {
  const box = text.getBoundingClientRect(), fill = text.classList[0].replace("ink-", "");
  return box.width && ![...text.ownerSVGElement.querySelectorAll("rect." + fill)].some(rect => {
    const bar = rect.getBoundingClientRect();
    return bar.left <= box.left && box.right <= bar.right &&
           bar.top <= box.top && box.bottom <= bar.bottom;
  });
}).map(text => text.textContent)
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program = find()
    if program is None:
        pytest.skip("no browser of the Chromium family on the path, such as chromium")
    with running(program, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module", params=WINDOWS, ids=lambda window: f"{window[0]}-{window[1]}")
def shown(
    request: pytest.FixtureRequest, browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Browser, str]:
    """The page, loaded; and the colour scheme."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(page(RESULT, TARGET, COMMAND), encoding="utf-8")
    width, scheme = request.param
    browser.open(file, width, scheme)
    assert browser.value("innerWidth") == width
    return browser, scheme


def test_nothing_sticks_out(shown: tuple[Browser, str]):
    browser, _ = shown
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")
    browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert browser.value("document.documentElement.scrollWidth <= innerWidth")


def test_nothing_is_fetched_and_nothing_fails(shown: tuple[Browser, str]):
    browser, _ = shown
    asked = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url.partition(":")[0] for url in asked if not url.startswith("data:")] == ["file"]
    failed = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
    assert not [event for event in browser.events if event["method"] in failed]


def test_colours_follow_the_scheme(shown: tuple[Browser, str]):
    browser, scheme = shown
    for element, key in (("body", "page"), ("section", "surface")):
        colour = browser.value(
            f"getComputedStyle(document.querySelector('{element}')).backgroundColor"
        )
        assert colour == rgb(THEMES[scheme][key])
    bar = "getComputedStyle(document.querySelector('rect.optimizer')).fill"
    assert browser.value(bar) == rgb(THEMES[scheme]["optimizer"])


def test_words_in_charts_lie_within_and_not_on_each_other(shown: tuple[Browser, str]):
    browser, _ = shown
    words = browser.value(WORDS)
    assert len(words) > 40
    for each in words:
        over = 8 if each["words"] in "◂▸" else 1  # arrows point out of the chart
        assert each["first"] - over <= each["left"], each
        assert each["right"] <= each["last"] + over, each
    for number, one in enumerate(words):
        for other in words[number + 1 :]:
            apart = (
                one["chart"] != other["chart"]
                or one["right"] <= other["left"]
                or other["right"] <= one["left"]
                or one["bottom"] <= other["top"] + 2
                or other["bottom"] <= one["top"] + 2
            )
            assert apart, (one, other)


def test_words_in_bars_lie_within_their_bars(shown: tuple[Browser, str]):
    browser, _ = shown
    assert browser.value(ASTRAY) == []


def test_bars_are_to_scale_on_the_screen(shown: tuple[Browser, str]):
    browser, _ = shown
    of = "document.querySelectorAll('rect.optimizer')[{}].getBoundingClientRect().width"
    # Of stages 1 and 3; the first is a swatch below no bar.
    stage_1, stage_3 = browser.value(of.format(0)), browser.value(of.format(2))
    assert stage_1 > 20 and stage_1 == pytest.approx(stage_3, rel=1e-3)


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"
