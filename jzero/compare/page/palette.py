"""Colours, light and dark: told apart by colour-blind eyes, and legible on what they lie on."""

from collections.abc import Mapping

Theme = Mapping[str, str]
"""Name -> "#rrggbb"."""

FILLS = (
    "parameters",
    "optimizer",
    "gradients",
    "gathered",
    "activations",
    "temporaries",
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "other-collective",
    "forward",
    "recomputed",
    "backward",
)
"""Names of areas that text may lie on."""

LIGHT: Theme = {
    "page": "#f6f7f9",
    "surface": "#ffffff",
    "text": "#1a202c",
    "muted": "#57606e",
    "line": "#d8dde5",
    "capacity": "#c01f2e",
    "parameters": "#315fcf",
    "optimizer": "#cd780e",
    "gradients": "#045a27",
    "gathered": "#0c9cdb",
    "activations": "#6b0f5e",
    "temporaries": "#878787",
    "all-gather": "#0c9cdb",
    "reduce-scatter": "#045a27",
    "all-reduce": "#cd780e",
    "other-collective": "#878787",
    "forward": "#46536b",
    "recomputed": "#8a94a6",
    "backward": "#2b3344",
}
DARK: Theme = {
    "page": "#0f1217",
    "surface": "#171b22",
    "text": "#e8ebf1",
    "muted": "#a3adbd",
    "line": "#333b48",
    "capacity": "#ff7a85",
    "parameters": "#5383f6",
    "optimizer": "#e19b26",
    "gradients": "#59c1ae",
    "gathered": "#9cddfe",
    "activations": "#c867b4",
    "temporaries": "#686868",
    "all-gather": "#9cddfe",
    "reduce-scatter": "#59c1ae",
    "all-reduce": "#e19b26",
    "other-collective": "#686868",
    "forward": "#9aa7be",
    "recomputed": "#66728a",
    "backward": "#d5dceb",
}


def luminance(colour: str) -> float:
    """Relative luminance, 0 to 1 (WCAG 2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2).

    >>> round(contrast("#000000", "#ffffff"))
    21
    """
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink(fill: str) -> str:
    """The colour of text on an area: black or white, whichever is the more legible."""
    return max("#000000", "#ffffff", key=lambda colour: contrast(colour, fill))


def variables(theme: Theme) -> dict[str, str]:
    """A theme's colours, and as `ink-NAME` the colour of text on each area."""
    return {**theme, **{f"ink-{name}": ink(theme[name]) for name in FILLS}}


def rules() -> str:
    """CSS rules that paint SVG by class, from the variables."""
    areas = "\n".join(
        f".{name} {{ fill: var(--{name}); }} .ink-{name} {{ fill: var(--ink-{name}); }}"
        for name in FILLS
    )
    return f"{areas}\n{_MARKS}"


_MARKS = """\
svg text { fill: var(--text); font-size: 13px; }
svg text.muted, svg tspan.muted { fill: var(--muted); }
svg .strong { font-weight: 600; }
svg .small { font-size: 11.5px; }
.track { fill: var(--line); fill-opacity: 0.45; }
.capacity { stroke: var(--capacity); stroke-width: 2; }
svg text.capacity-text { fill: var(--capacity); font-weight: 600; }
.axis { stroke: var(--line); stroke-width: 1; }
.gap { stroke: var(--surface); stroke-width: 1; }
.ghost { fill-opacity: 0.5; stroke: var(--temporaries); stroke-width: 1; }
.window { fill-opacity: 0.3; }
.mark { stroke-width: 4; }
.edge-all-gather { stroke: var(--all-gather); }
.edge-reduce-scatter { stroke: var(--reduce-scatter); }
.edge-all-reduce { stroke: var(--all-reduce); }
.edge-other-collective { stroke: var(--other-collective); }
.wait { fill: none; stroke: var(--capacity); stroke-width: 1.5; stroke-dasharray: 3 2; }
.mixed { fill: var(--muted); }
.tick { stroke: var(--muted); stroke-width: 1; }"""
