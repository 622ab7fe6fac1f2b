"""A comparison as a PNG picture: the page's bars, on a ground of their own."""

import importlib
import io
import re
import textwrap
from collections.abc import Sequence
from html import escape
from typing import Any

from jzero.compare.page import bars
from jzero.compare.page.palette import LIGHT, Theme, rules, variables
from jzero.compare.page.pieces import NAMES, Piece, keys, of_memory, of_traffic
from jzero.compare.page.svg import WIDTHS, tag
from jzero.compare.page.words import headline
from jzero.compare.row import Result
from jzero.errors import JzeroError

WIDTH = 1000
"""Pixels of the drawing across; the picture has `_ZOOM` times as many."""

_ZOOM, _COLOURS = 1.5, 64

_MARGIN = 28
_PLOT = WIDTH - 2 * _MARGIN
_FONTS = "DejaVu Sans, Liberation Sans, Noto Sans, Arial, Helvetica, sans-serif"


def picture(found: Result) -> bytes:
    """Draws a comparison's memory and traffic.

    Arguments:
      found: the figures.

    Returns:
      A PNG file's content.

    Raises:
      JzeroError: what draws is not installed, or this machine has no font to write with.
    """
    resvg, images = _extra("resvg_py"), _extra("PIL.Image")
    drawing = _drawing(found)
    drawn = bytes(resvg.svg_to_bytes(svg_string=drawing, zoom=_ZOOM))
    if drawn == bytes(resvg.svg_to_bytes(svg_string=_without_words(drawing), zoom=_ZOOM)):
        raise JzeroError(
            "--png: there is no font to write with on this machine; install one, such as DejaVu "
            "(fonts-dejavu-core on Debian and Ubuntu)"
        )
    image = images.open(io.BytesIO(drawn)).convert("RGB")
    file = io.BytesIO()
    # Few colours make a small file: all else are shades between letters and ground.
    image.quantize(_COLOURS, dither=images.Dither.NONE).save(file, "PNG", optimize=True)
    return file.getvalue()


def require_extra() -> None:
    """Before anything is compiled: raises as `picture` does where what draws is not installed."""
    _extra("resvg_py")
    _extra("PIL.Image")


def _extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise JzeroError(
            '--png needs an extra: pip install ".[png]" in a clone of jzero'
        ) from error


def _without_words(drawing: str) -> str:
    return re.sub(r"<text\b.*?</text>", "", drawing)


def _drawing(found: Result) -> str:
    """One SVG document, with its colours in it."""
    said = textwrap.wrap(headline(found), 84)
    sub = f"{found.model} on {found.target}: {found.devices:,} × {found.description}, "
    shapes = [
        *(_line(words, _MARGIN + 20 + 24 * i, "title") for i, words in enumerate(said)),
        _line(f"{sub}JAX {found.jax}", _MARGIN + 20 + 24 * len(said), "muted"),
    ]
    y = _MARGIN + 44 + 24 * len(said)
    memory = bars.memory(found.rows, found.memory_bytes)
    traffic = bars.traffic(found.rows, found.accumulate, found.platform == "cpu")
    for chart, pieces in ((memory, of_memory), (traffic, of_traffic)):
        shapes.append(_line(chart.title, y + 14, "strong"))
        y += 30
        shapes.append(tag("svg", chart.content, x=_MARGIN, y=y, width=_PLOT, height=chart.height))
        y += chart.height
        shapes += _keys(keys(map(pieces, found.rows)), y + 18)
        y += 56
    ground = tag("rect", width=WIDTH, height=y, fill=LIGHT["surface"])
    style = tag("style", escape(_style(LIGHT), quote=False))
    return tag(
        "svg",
        style,
        ground,
        *shapes,
        xmlns="http://www.w3.org/2000/svg",
        width=WIDTH,
        height=y,
        font_family=_FONTS,
    )


def _line(words: str, y: int, class_: str) -> str:
    return tag("text", escape(words), x=_MARGIN, y=y, class_=class_)


def _keys(used: Sequence[str], y: int) -> list[str]:
    """What the colours mean, in a row."""
    shapes, x = [], _MARGIN
    for key in used:
        words = NAMES[key]
        shapes.append(
            tag("rect", x=x, y=y - 11, width=13, height=13, class_=Piece("", key, 0).paint)
        )
        shapes.append(tag("text", escape(words), x=x + 20, y=y, class_="muted"))
        x += 44 + round(7.8 * len(words))
    return shapes


def _style(theme: Theme) -> str:
    """The page's rules, without variables and for one width."""
    colours = variables(theme)
    written = re.sub(r"var\(--([\w-]+)\)", lambda match: colours[match[1]], rules())
    hidden = [f".at{width}" for width in WIDTHS if width > _PLOT]
    hidden += [f".below{width}" for width in WIDTHS if width <= _PLOT]
    return f"{written}\n.title {{ font-size: 17px; font-weight: 600; }}\n" + (
        f"{', '.join(hidden)} {{ display: none; }}"
    )
