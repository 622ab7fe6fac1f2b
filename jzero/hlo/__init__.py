"""Reading compiled programs: their collectives, with loops multiplied out, and their memory."""

from jzero.hlo.collectives import (
    Collective,
    bytes_by,
    collectives,
    count_by,
    elements_by,
    total,
)
from jzero.hlo.memory import Memory, memory
from jzero.hlo.overlap import overlapped_fraction
from jzero.hlo.sites import Site, sites
from jzero.hlo.text import Module, Program, parse

__all__ = [
    "Collective",
    "Memory",
    "Module",
    "Program",
    "Site",
    "bytes_by",
    "collectives",
    "count_by",
    "elements_by",
    "memory",
    "overlapped_fraction",
    "parse",
    "sites",
    "total",
]
