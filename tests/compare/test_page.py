"""The page: it shows every figure, true to scale, and needs nothing but itself."""

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import numpy as np
import pytest
from comparisons import COMMAND, GB, RESULT, ROWS, SENT, TARGET

from jzero.compare.page import bars, page
from jzero.compare.page.palette import DARK, FILLS, LIGHT, Theme, contrast, ink
from jzero.compare.page.pieces import of_memory
from jzero.compare.page.svg import WIDTHS, Chart, framed, room_for
from jzero.compare.page.words import headline
from jzero.compare.row import Row

PAGE = page(RESULT, TARGET, COMMAND)
PIECES = ("parameters", "optimizer", "gradients", "gathered", "activations", "temporaries")


def drawn(chart: Chart) -> ET.Element:
    return ET.fromstring(framed(chart, "chart"))


def share(element: ET.Element, name: str) -> float:
    return float(element.attrib[name].removesuffix("%")) / 100


def areas(chart: Chart) -> list[tuple[str, float, float, str]]:
    """Of each part of a bar: its colour's name, its left edge and width, and its title."""
    found = []
    for rect in drawn(chart).iter("rect"):
        name = rect.attrib["class"].split()[0]
        if name != "track":
            words = rect.findtext("title") or ""
            found.append((name, share(rect, "x"), share(rect, "width"), words))
    return found


def test_bars_are_as_long_as_their_figures():
    found = areas(bars.memory(ROWS, RESULT.memory_bytes))
    expected = [piece for row in ROWS for piece in of_memory(row)]
    assert len(found) == len(expected) == 1 + 3 + 5 + 6
    for (name, _, width, _), piece in zip(found, expected, strict=True):
        assert name == piece.fill
        assert width == pytest.approx(piece.bytes / (1.01 * 210 * GB), abs=2e-5)


def test_the_parts_of_a_bar_lie_side_by_side():
    found = areas(bars.memory([ROWS[3]], None))
    for (_, left, width, _), (_, after, _, _) in itertools.pairwise(found):
        assert left + width == pytest.approx(after, abs=2e-5)
    assert [name for name, *_ in found] == list(PIECES)


def test_the_capacity_is_a_line_in_the_same_scale():
    chart = bars.memory(ROWS, RESULT.memory_bytes)
    places = [share(line, "x1") for line in drawn(chart).iter("line")]
    assert places == [pytest.approx(80 / (1.01 * 210), abs=2e-5)] * (1 + len(ROWS))
    assert "80.0 GB in a device" in framed(chart, "chart")
    assert not list(drawn(bars.memory(ROWS, None)).iter("line"))


def test_small_bars_are_drawn_large_and_the_capacity_named():
    chart = bars.memory(ROWS[3:], 80 * GB)
    assert list(drawn(chart).iter("line"))
    chart = bars.memory(ROWS[3:], 800 * GB)
    assert not list(drawn(chart).iter("line"))
    assert "800.0 GB in a device, further to the right" in framed(chart, "chart")
    assert sum(width for *_, width, _ in areas(chart)) == pytest.approx(1 / 1.01, abs=1e-4)


def test_a_peak_that_is_not_split_is_its_state_and_one_rest():
    parameters, optimizer, rest = of_memory(ROWS[1])
    assert (parameters.bytes, optimizer.bytes) == (26 * GB, 19 * GB + 5)
    assert rest.label == "the rest, undivided"
    assert sum(piece.bytes for piece in of_memory(ROWS[1])) == ROWS[1].peak_bytes
    cells = row_of("Memory of a device, in GB", "1")
    assert cells["gradients"] == cells["activations"] == "unknown"
    assert cells["the rest, undivided"] == "28.11"


def test_traffic_is_as_long_as_its_figures_and_by_collective():
    found = areas(bars.traffic(ROWS, 1, elements=False))
    of_stage_3 = [each for each in found if each[3].startswith("Stage 3")]
    assert [each[0] for each in of_stage_3] == ["all-gather", "reduce-scatter"]
    assert of_stage_3[0][2] / of_stage_3[1][2] == pytest.approx(44.98 / 22.78, abs=1e-3)
    words = framed(bars.traffic(ROWS, 1, elements=False), "chart")
    assert "67.76 GB and more, unknown" in words
    assert "ratio 2.975" in words and "the paper&#x27;s: 2" in words


def test_axes_are_named_where_there_are_several():
    other = replace(SENT[0], axes=("tensor",))
    chart = bars.traffic([replace(ROWS[3], collectives=(*SENT[:2], other))], 1, elements=False)
    names = [title for *_, title in areas(chart)]
    assert any("all-gather over tensor" in name for name in names)


def test_a_refused_stage_is_shown_as_such():
    assert "refused for memory" in framed(bars.memory(ROWS, 80 * GB), "chart")
    cells = row_of("Memory of a device, in GB", "0")
    assert (cells["fits"], cells["peak"], cells["arguments"]) == ("refused", "210.00", "unknown")
    assert "Stage 0: the compiler refuses the program: it needs &lt;210 GB&gt;." in PAGE
    unknown = Row(stage=0, fits=False, error="the compiler refuses the program")
    assert "no figure" in framed(bars.memory([unknown], 80 * GB), "chart")
    assert "no figure" in framed(bars.traffic([unknown], 1, elements=False), "chart")


def test_every_figure_is_in_a_table():
    values = {int(value) for value in re.findall(r'<data value="(\d+)">', PAGE)}
    names = ("argument_bytes", "temp_bytes", "alias_bytes", "peak_bytes", "host_bytes")
    for row in ROWS:
        wanted = [getattr(row, name) for name in names] + [row.comm_bytes]
        wanted += list((row.peak_split or {}).values())
        wanted += [] if row.state_bytes is None else [sum(row.state_bytes.values())]
        wanted += [each.bytes for each in row.collectives or ()]
        wanted += [each.bytes for each in row.largest or ()]
        assert {figure for figure in wanted if figure is not None} <= values
    cells = row_of("Traffic of a device in an optimizer step, over ZeRO and replica axes", "2")
    assert list(cells.values()) == ["67.76", "2.975", "2", "98.7%", "6.2 s"]
    for each in SENT[:2]:
        assert f"<td>{each.count}</td>" in PAGE and f"<td>{each.elements:,}</td>" in PAGE
    cells = row_of("The largest buffers at the peak, arguments left out", "3")
    assert list(cells.values()) == ["2.00", "bf16[40,5120]", "fusion", "jit(f)/&lt;dot&gt;"]
    cells = row_of("Transfers, in the order of the schedule", "all-gather, for the next iteration")
    assert cells["carries"] == "2 arrays: layers/a, layers/b"
    assert (cells["sent"], cells["products meanwhile"]) == ("1.50 GB", "1")


def row_of(caption: str, head: str) -> dict[str, str]:
    """Column -> cell, of the first row of a table with this caption that begins so."""
    for table in re.findall(rf"<table><caption>{re.escape(caption)}</caption>.*?</table>", PAGE):
        columns = re.findall(r'<th scope="col">(.*?)</th>', table)
        for row in re.findall(r'<tr><th scope="row">(.*?)</tr>', table):
            first, *cells = re.split(r"</t[hd]>(?:<td>)?", row)[:-1]
            if first == head:
                words = [re.sub(r"<.*?>", "", cell) for cell in cells]
                return dict(zip(columns[1:], words, strict=True))
    raise AssertionError(f"no row {head!r} below {caption!r}")


def test_what_users_write_is_text():
    assert "<b>" not in PAGE and "<GPUs>" not in PAGE and "<every>" not in PAGE
    assert "a/&lt;b&gt;&amp;c.py:llama" in PAGE
    assert COMMAND in unescape(PAGE)


def test_the_page_needs_nothing_else():
    for sign in ("http:", "https:", "src=", "url(", "@import", "<script", "javascript:"):
        assert sign not in PAGE
    assert re.findall(r'href="(.*?)"', PAGE) == ["data:,"]
    assert len(PAGE) < 200_000


def test_every_chart_has_a_name_and_says_what_it_shows():
    charts = re.findall(r'<svg class="chart".*?>', PAGE)
    assert len(charts) == 2 + 2 * 3
    assert all('role="img"' in chart for chart in charts)
    for names in re.findall(r'aria-labelledby="(.*?)"', PAGE):
        for name in names.split():
            assert PAGE.count(f'id="{name}"') == 1


def test_the_foot_says_how_it_was_made():
    foot = unescape(PAGE[PAGE.index("How this page was made") :])
    for words in (COMMAND, "JAX 0.10.2", "jaxlib", *RESULT.xla_flags, RESULT.environment):
        assert words in foot


HEADLINES = [
    (ROWS, "Stage 2 is the first that fits: 50.6 of 80.0 GB."),
    (ROWS[2:], "Every stage fits: 50.6 of 80.0 GB at stage 2, 25.5 at stage 3."),
    (ROWS[:2], "No stage fits: stage 1 needs 73.1 of 80.0 GB."),
    (ROWS[:1], "The compiler refuses every stage for memory."),
    (ROWS[3:], "Stage 3 fits: 25.5 of 80.0 GB."),
    (
        (replace(ROWS[1], fits=True, mem_fraction=0.92), ROWS[0], ROWS[3]),
        "Stage 1 is the first that fits: 73.1 of 80.0 GB, if JAX may take 92% of the memory. "
        "Stage 3 fits without: 25.5.",
    ),
]


@pytest.mark.parametrize(("rows", "said"), HEADLINES)
def test_the_headline_is_the_result(rows: tuple[Row, ...], said: str):
    assert headline(replace(RESULT, rows=rows)) == said


def test_without_a_capacity_the_headline_names_the_peaks():
    rows = tuple(replace(row, fits=None) for row in ROWS[2:])
    said = headline(replace(RESULT, rows=rows, memory_bytes=None))
    assert said == "Peak memory of a device, in GB: 50.6 at stage 2, 25.5 at stage 3."


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(theme: Theme):
    for name in ("text", "muted", "capacity"):
        assert contrast(theme[name], theme["surface"]) >= 4.5
        assert contrast(theme[name], theme["page"]) >= 4.5
    for name in FILLS:
        assert contrast(theme[name], theme["surface"]) >= 3
        assert contrast(theme[name], ink(theme[name])) >= 4.5


# Simulated dichromacy, of linear RGB (Machado, Oliveira and Fernandes, 2009).
SIGHT = {
    "all": np.eye(3),
    "no red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "no green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "no blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
# Linear RGB to the cones of Oklab (Ottosson, 2020), and from their roots to Oklab.
CONES = [[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]
OKLAB = [[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]]


def seen(colour: str, sight: str) -> np.ndarray:
    """A colour in Oklab, as eyes without one kind of cone see it."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    return np.array(OKLAB) @ np.cbrt(np.array(CONES) @ seen)


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("sight", list(SIGHT))
def test_colours_are_told_apart_without_seeing_all_of_them(theme: Theme, sight: str):
    for names, least in ((PIECES, 0.085), (("all-gather", "reduce-scatter", "all-reduce"), 0.12)):
        for one, other in itertools.combinations(names, 2):
            apart = np.linalg.norm(seen(theme[one], sight) - seen(theme[other], sight))
            assert apart >= least, (one, other)


def test_words_are_shown_where_there_is_room_for_them():
    assert room_for("12.0", 0.5) == ""
    assert room_for("optimizer state 12.0", 0.3) == f"at{WIDTHS[1]}"
    assert room_for("optimizer state 12.0", 0.01) is None
