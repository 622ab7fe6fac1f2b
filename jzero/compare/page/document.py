"""The page: one file, without scripts, that needs nothing but a browser."""

import importlib.metadata
import importlib.resources
import platform
from html import escape
from string import Template

from jzero.compare.page import bars, tables
from jzero.compare.page.markup import details, figure, legend, listing, paragraph, section
from jzero.compare.page.overlaps import overlaps
from jzero.compare.page.palette import DARK, LIGHT, Theme, rules, variables
from jzero.compare.page.pieces import keys, of_memory, of_traffic
from jzero.compare.page.rates import Rates
from jzero.compare.page.svg import WIDTHS
from jzero.compare.page.words import headline
from jzero.compare.row import Result
from jzero.targets import Target
from jzero.units import size

_PLUGINS = {"gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin"), "tpu": ("libtpu",)}
_TERMS = (
    "Ratio: what is sent over ZeRO and replica axes, in units of ψ × 2 bytes × (N-1)/N, with ψ the "
    "parameters of a tensor shard and N the ZeRO group. Hidden: of the bytes sent in layer loops, "
    "those with a matrix product to run meanwhile; – where there is nothing of the kind."
)
_ELEMENTS = " XLA:CPU sends bf16 as f32, so here the ratio counts elements."


def page(found: Result, target: Target | None, command: str) -> str:
    """A comparison as an HTML page.

    Arguments:
      found: the figures.
      target: the devices, for their peak rates; None where these are not known.
      command: what was typed.

    Returns:
      The page, for one file.
    """
    template = importlib.resources.files("jzero.compare.page") / "template.html"
    rates = Rates.of(target, found.mesh)
    sections = [_memory(found), _traffic(found), overlaps(found, rates), _made(found, command)]
    return Template(template.read_text(encoding="utf-8")).substitute(
        title=escape(f"{found.model} on {found.target}: jzero compare"),
        light=_variables(LIGHT),
        dark=_variables(DARK),
        paint=rules(),
        room=_room(),
        model=escape(found.model),
        target=escape(found.target),
        headline=escape(headline(found)),
        about=escape(_about(found)),
        sections="\n".join(sections),
    )


def _about(found: Result) -> str:
    mesh = " × ".join(f"{name}={count}" for name, count in found.mesh.items())
    has = "" if found.memory_bytes is None else f" with {size(found.memory_bytes)} each"
    return (
        f"{found.parameters:,} parameters; {found.devices:,} × {found.description}{has}; "
        f"mesh {mesh}; micro-batch {found.micro_batch}, accumulation {found.accumulate}. "
        f"Read from the programs that XLA made of the train step."
    )


def _memory(found: Result) -> str:
    notes = [
        f"Stage {row.stage}: {each}."
        for row in found.rows
        for each in (*([row.error] if row.error else []), *(row.notes or ()))
    ]
    said = "".join(f"<li>{escape(note)}</li>" for note in (*notes, *found.notices))
    return section(
        "Memory",
        "The most bytes that a device has in use at once, and what they are.",
        figure(bars.memory(found.rows, found.memory_bytes), "memory"),
        legend(keys(map(of_memory, found.rows))),
        tables.memory(found),
        details("The largest buffers", tables.largest(found.rows)),
        f"<ul>{said}</ul>" if said else "",
    )


def _traffic(found: Result) -> str:
    elements = found.platform == "cpu"
    return section(
        "Traffic",
        "What a device sends in an optimizer step, on a ring, by kind of collective.",
        figure(bars.traffic(found.rows, found.accumulate, elements), "traffic"),
        legend(keys(map(of_traffic, found.rows))),
        tables.stages(found),
        paragraph(_TERMS + _ELEMENTS * elements, "muted"),
        details("Every kind of collective", tables.collectives(found.rows)),
    )


def _made(found: Result, command: str) -> str:
    line = ""
    if found.environment:
        line = paragraph(
            "This JAX takes some of them in the environment alone. A run needs this before it "
            "starts:"
        ) + listing(found.environment)
    return section(
        "How this page was made",
        "",
        listing(command),
        paragraph(f"{', '.join(_versions(found))}."),
        paragraph("XLA options:"),
        listing("\n".join(found.xla_flags) or "none"),
        line,
    )


def _versions(found: Result) -> list[str]:
    there = [f"JAX {found.jax}"]
    for name in ("jzero", "jaxlib", "flax", "optax", *_PLUGINS.get(found.platform, ())):
        try:
            there.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return [*there, f"Python {platform.python_version()}"]


def _variables(theme: Theme) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in variables(theme).items())


def _room() -> str:
    """Rules that show words of class `atN`, and hide those of `belowN`, from a width of N on."""
    hidden = ", ".join(f".at{width}" for width in WIDTHS)
    shown = "\n".join(
        f"@container (min-width: {width}px) {{ .at{width} {{ display: inline; }} "
        f".below{width} {{ display: none; }} }}"
        for width in WIDTHS
    )
    return f"{hidden} {{ display: none; }}\n{shown}"
