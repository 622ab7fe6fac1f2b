"""SVG as text: elements, and charts that keep their letters' size at any width.

Lengths along a chart are percentages of its width, heights and letters are pixels: so a chart is
not scaled but laid out anew on a narrow screen. What only a wide one has room for carries a class
`atN`, and is shown where the chart is at least N pixels wide.
"""

from dataclasses import dataclass
from html import escape

WIDTHS = (420, 560, 720, 900, 1040)
"""Widths from which more is shown."""

NARROWEST = 300
"""The width that every chart must do with."""

_LETTER = 0.6
"""Mean width of a letter, in units of its size: on the safe side for the usual fonts."""


@dataclass(frozen=True)
class Chart:
    """A drawing without its frame.

    Attributes:
      title, description: what it is, and what it shows, in words.
      height: in pixels.
      content: SVG elements.
    """

    title: str
    description: str
    height: int
    content: str


def tag(name: str, *children: str, **attributes: object) -> str:
    """An element; children are markup, attributes are escaped ("class_" is "class").

    >>> tag("rect", x="5%", class_="a<b")
    '<rect x="5%" class="a&lt;b"/>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = "".join(children)
    return f"<{name}{given}>{inside}</{name}>" if inside else f"<{name}{given}/>"


def text(words: str, x: float, y: float, class_: str = "", anchor: str = "start") -> str:
    """Words at a share `x` of the width."""
    return tag("text", escape(words), x=percent(x), y=y, class_=class_ or None, text_anchor=anchor)


def area(
    left: float, right: float, y: float, height: float, class_: str, title: str = "", **more: object
) -> str:
    """A rectangle between two shares of the width, with a title that shows under the pointer."""
    return tag(
        "rect",
        *_named(title),
        x=percent(left),
        y=y,
        width=percent(max(0.0, right - left)),
        height=height,
        class_=class_,
        **more,
    )


def upright(x: float, top: float, bottom: float, class_: str, title: str = "") -> str:
    """A vertical line at a share of the width."""
    ends = {"x1": percent(x), "x2": percent(x), "y1": top, "y2": bottom}
    return tag("line", *_named(title), class_=class_, **ends)


def _named(title: str) -> tuple[str, ...]:
    return (tag("title", escape(title)),) if title else ()


def percent(share: float) -> str:
    return f"{100 * share:.3f}".rstrip("0").rstrip(".") + "%"


def room_for(words: str, share: float, size: float = 13) -> str | None:
    """The class of words that must lie within a share of a chart's width.

    Returns:
      "" where they always fit, `atN` where they do from a width of N on, None where they never do.
    """
    if share <= 0:
        return None
    needed = (len(words) * size * _LETTER + 8) / share
    if needed <= NARROWEST:
        return ""
    return next((f"at{width}" for width in WIDTHS if needed <= width), None)


def framed(chart: Chart, name: str) -> str:
    """A chart as an element of a page, as wide as what it stands in.

    Arguments:
      chart: the drawing.
      name: unique in the page, for the references of its title.
    """
    return tag(
        "svg",
        tag("title", escape(chart.title), id=f"{name}-title"),
        tag("desc", escape(chart.description), id=f"{name}-text"),
        chart.content,
        class_="chart",
        width="100%",
        height=chart.height,
        role="img",
        aria_labelledby=f"{name}-title {name}-text",
    )
