"""The page's building blocks: sections, figures, and what the colours mean."""

from collections.abc import Sequence
from html import escape

from jzero.compare.page.pieces import MEANINGS, NAMES, Piece
from jzero.compare.page.svg import Chart, framed


def section(title: str, said: str, *content: str) -> str:
    """A heading, a paragraph of words, and markup."""
    return f"<section><h2>{escape(title)}</h2>{paragraph(said)}{''.join(content)}</section>"


def paragraph(words: str, class_: str = "") -> str:
    """Words, or nothing where there are none."""
    given = f' class="{class_}"' if class_ else ""
    return f"<p{given}>{escape(words)}</p>" if words else ""


def figure(chart: Chart, name: str, caption: str = "") -> str:
    """A chart; `name` is unique in the page."""
    said = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{said}{framed(chart, name)}</figure>"


def legend(used: Sequence[str]) -> str:
    """What the colours of these keys mean."""
    each = "".join(
        f'<div><svg width="14" height="14" aria-hidden="true">'
        f'<rect width="14" height="14" class="{Piece("", key, 0).paint}"/></svg>'
        f"<dt>{escape(NAMES[key])}</dt><dd>{escape(MEANINGS[key])}</dd></div>"
        for key in used
    )
    return f'<dl class="keys">{each}</dl>'


def details(title: str, content: str) -> str:
    """Markup that a click unfolds."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def listing(words: str) -> str:
    """Text as it would stand in a terminal."""
    return f"<pre><code>{escape(words)}</code></pre>"
