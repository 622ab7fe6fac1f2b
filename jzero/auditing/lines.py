"""What a collective moves, in a line for people; alike ones together."""

import re
from collections.abc import Iterable
from dataclasses import replace

from jzero.auditing.moved import Moved
from jzero.hlo.known import added_up
from jzero.hlo.passes import BACKWARD, FORWARD
from jzero.hlo.text import Shape
from jzero.units import size


def merged(found: Iterable[Moved]) -> list[Moved]:
    """Adds up what differs in nothing but the instruction; the largest traffic first."""
    groups: dict[Moved, list[Moved]] = {}
    for each in found:
        key = replace(each, count=None, elements=None, bytes=None, name="", array=0)
        groups.setdefault(key, []).append(each)
    added = [
        replace(
            key,
            count=added_up(each.count for each in group),
            elements=added_up(each.elements for each in group),
            bytes=added_up(each.bytes for each in group),
        )
        for key, group in groups.items()
    ]
    return sorted(added, key=lambda each: -(each.bytes or 0))


def array(each: Moved) -> str:
    return str(Shape(each.dtype, each.dims))


def held(found: Iterable[Moved]) -> int | None:
    """Bytes of full tensors, of all runs together; None where not known."""
    return added_up(
        None if each.elements is None else Shape(each.dtype, (each.elements,)).bytes
        for each in found
    )


def over(axes: Iterable[str]) -> str:
    names = ", ".join(axes)
    return "axes that cannot be told" if names == "unknown" else names or "no axis"


def times(count: int | None) -> str:
    if count is None:
        return "an unknown number of times"
    return "once" if count == 1 else f"{count:,} times"


def line(each: Moved, amount: int | None) -> str:
    """One line: `all-gather bf16[8,128] over data, 4 times, 7.34 MB (7.00 MiB): .../mul, a.py:24`.

    Arguments:
      each: what is moved.
      amount: bytes to tell.
    """
    figure = "" if amount is None else f", {size(amount)}"
    behind = [*each.arguments[:3], each.op_name, each.line]
    return (
        f"{each.op} {array(each)} over {over(each.axes)}, {times(each.count)}{figure}: "
        f"{', '.join(filter(None, behind)) or each.name}"
    )


def short(each: Moved) -> str:
    """What is behind it, in few words: `add_any, backward, model.py:24`."""
    name = re.split(r"[/:]", each.op_name)[-1].rstrip(")")
    if BACKWARD in each.op_name:
        name += ", backward"
    elif FORWARD in each.op_name:
        name += ", forward"
    return ", ".join(filter(None, [*each.arguments[:3], name, each.line])) or each.name
