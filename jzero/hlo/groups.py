"""Which devices take part in a collective, and which mesh axes that is.

Device numbers in a compiled program are positions in its device assignment, that is in
`mesh.devices.flat`. XLA writes the groups as lists, `{{0,1},{2,3}}`; as a reshaped and transposed
count, `[4,2]<=[2,4]T(1,0)`; or as axes of a mesh of its own, `mesh['data'=4,'tensor'=2] {'data'}`.
Mesh axes are recognised by the groups they make, never by their names.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

Groups = tuple[tuple[int, ...], ...]

UNKNOWN = ("unknown",)

_LISTS = re.compile(r"replica_groups=(\{(?:\s*\{[\d,\s]*\},?)*\s*\})")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\((\[[\d,]+\](?:T\([\d,]+\))?|[\d,]+)\))?"
    r"\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=(\{(?:\s*\{[\d,\s]*\},?)*\s*\})")


@functools.lru_cache(maxsize=1024)
def groups(attributes: str, devices: int) -> Groups | None:
    """The groups written in an instruction's attributes; None where there are none to read.

    Arguments:
      attributes: the text after an instruction's operands.
      devices: how many devices run the program; an empty list means one group of all.

    Returns:
      One tuple of device positions for each group.
    """
    if found := _LISTS.search(attributes):
        return _lists(found[1]) or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        rows, width = _numbers(found[1])
        return _rows(_iota(found[2], found[3]).reshape(rows, width))
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    return None


def pairs(attributes: str) -> Groups | None:
    """The (source, target) positions of a collective-permute; None where there are none to read."""
    found = _PAIRS.search(attributes)
    return _lists(found[1]) if found else None


def axes_of_groups(found: Groups, shape: Mapping[str, int]) -> tuple[str, ...]:
    """The smallest set of mesh axes whose groups are exactly these, in mesh order.

    Arguments:
      found: groups of device positions.
      shape: the mesh's axes and their sizes in order (`mesh.shape`).

    Returns:
      The axes' names; () where each device is alone; ("unknown",) where no axes make them.
    """
    return _axes_of_groups(found, tuple(shape.items()))


@functools.lru_cache(maxsize=1024)
def _axes_of_groups(found: Groups, shape: tuple[tuple[str, int], ...]) -> tuple[str, ...]:
    wanted = {frozenset(group) for group in found}
    sizes = tuple(size for _, size in shape)
    real = [index for index, size in enumerate(sizes) if size > 1]
    for count in range(len(real) + 1):
        for chosen in itertools.combinations(real, count):
            if math.prod(sizes[index] for index in chosen) != len(found[0]):
                continue
            made = _along(np.arange(math.prod(sizes)).reshape(sizes), chosen)
            if {frozenset(group) for group in made} == wanted:
                return tuple(shape[index][0] for index in chosen)
    return UNKNOWN


def axes_of_pairs(found: Groups, shape: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which any source differs from its target, in mesh order."""
    sizes = tuple(shape.values())
    devices = math.prod(sizes)
    moved: set[int] = set()
    for pair in found:
        if len(pair) != 2 or max(pair) >= devices:
            return UNKNOWN
        source, target = (np.unravel_index(position, sizes) for position in pair)
        moved |= {i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b}
    return tuple(name for i, name in enumerate(shape) if i in moved)


def _mesh_groups(sizes: str, ids: str | None, used: str) -> Groups:
    shape = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", sizes)}
    devices = math.prod(shape.values())
    order = np.arange(devices)
    if ids is not None:
        iota = re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", ids)
        order = _iota(iota[1], iota[2]) if iota else np.array(_numbers(ids))
    # 'x':(2)4 is the part of axis x of size 4 that has 2 in front of it: cut the axis there.
    ranges: dict[str, list[tuple[int, int]]] = {}
    for name, before, size in re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", used):
        low = int(before or 1)
        ranges.setdefault(name, []).append((low, low * int(size or shape[name])))
    cut: list[int] = []
    chosen: list[int] = []
    for name, size in shape.items():
        inside = ranges.get(name, [])
        edges = sorted({1, size, *(edge for pair in inside for edge in pair)})
        for low, high in itertools.pairwise(edges):
            if any(a <= low and high <= b for a, b in inside):
                chosen.append(len(cut))
            cut.append(high // low)
    return _along(order.reshape(cut), chosen)


def _along(positions: np.ndarray, chosen: Sequence[int]) -> Groups:
    last = range(positions.ndim - len(chosen), positions.ndim)
    width = math.prod(positions.shape[index] for index in chosen)
    return _rows(np.moveaxis(positions, tuple(chosen), tuple(last)).reshape(-1, width))


def _iota(dims: str, order: str | None) -> np.ndarray:
    shape = _numbers(dims)
    count = np.arange(math.prod(shape)).reshape(shape)
    return (count.transpose(_numbers(order)) if order else count).reshape(-1)


def _rows(table: np.ndarray) -> Groups:
    return tuple(tuple(row) for row in table.tolist())


def _lists(text: str) -> Groups:
    return tuple(_numbers(inner) for inner in re.findall(r"\{([\d,\s]+)\}", text))


def _numbers(text: str | Iterable[str]) -> tuple[int, ...]:
    parts = text.split(",") if isinstance(text, str) else text
    return tuple(int(part) for part in parts)
