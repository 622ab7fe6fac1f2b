"""Every collective of a compiled program, once each, with what it moves and how often it runs."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from jax.sharding import AbstractMesh, Mesh

from jzero.hlo.fused import begins, is_fused_reduce_scatter
from jzero.hlo.groups import UNKNOWN, axes_of_groups, axes_of_pairs, groups, pairs
from jzero.hlo.known import product
from jzero.hlo.loops import trip_count
from jzero.hlo.text import Computation, Instruction, Module, Program, Shape, parse

OPS = frozenset(
    {
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    }
)
_IN_GROUPS_OF_PARTITIONS = frozenset({"all-to-all", "ragged-all-to-all", "collective-broadcast"})


@dataclass(frozen=True)
class Site:
    """One collective where it stands in the program; sizes are for one device and one run of it.

    Attributes:
      op: HLO opcode, `-start` removed; a TPU's fused all-reduce-scatter is a reduce-scatter.
      axes: mesh axes it runs over, in mesh order; ("unknown",) where they cannot be told.
      dtype: as HLO spells it.
      count: runs per call of the program, loops multiplied out; None where that is not known.
      elements: of the full tensor (of the operand for all-reduce and others); None if unknown.
      bytes: what a ring sends from one device; None where groups or volume are not known.
      operands: the shapes that one device puts in.
      name: the instruction's name.
      source: the JAX operation behind it (`op_name`).
      computation: the computation that holds it.
    """

    op: str
    axes: tuple[str, ...]
    dtype: str
    count: int | None
    elements: int | None
    bytes: int | None
    operands: tuple[Shape, ...]
    name: str
    source: str
    computation: str


def sites(program: Program, mesh: Mesh | AbstractMesh) -> list[Site]:
    """Finds every collective of a compiled program.

    A collective that the compiler split (start and done, a chain of fusions) is one site; where it
    combined tensors of several dtypes, there is one site for each dtype. The two branches of a
    conditional count once where they send the same, and otherwise have `count` None.

    Arguments:
      program: a compiled function, its text, or that text as `parse` read it.
      mesh: the mesh it was compiled for; positions in `mesh.devices.flat` are its device numbers.

    Returns:
      The sites, in the order in which the program reaches them.

    Raises:
      JzeroError: `program` is text that holds no HLO module.
    """
    module = parse(program)
    return _Walk(module, dict(mesh.shape)).computation(module.entry)


class _Walk:
    """Visits each computation once and multiplies what it found by how often it is called."""

    def __init__(self, module: Module, shape: Mapping[str, int]):
        self.module = module
        self.shape = shape
        self.seen: dict[str, list[Site]] = {}

    def computation(self, name: str) -> list[Site]:
        if name not in self.seen:
            computation = self.module.computations.get(name)
            self.seen[name] = (
                [
                    site
                    for instruction in computation.instructions
                    for site in self.instruction(computation, instruction)
                ]
                if computation
                else []
            )
        return self.seen[name]

    def instruction(self, within: Computation, instruction: Instruction) -> list[Site]:
        opcode = instruction.opcode
        if opcode.endswith(("-done", "-update")):
            return []
        op = opcode.removesuffix("-start")
        if op in OPS:
            return self.collective(within, instruction, op) if begins(within, instruction) else []
        if opcode == "while":
            trips = trip_count(self.module, within, instruction)
            tests = None if trips is None else trips + 1
            return [
                _times(site, runs)
                for name, runs in ((instruction.condition, tests), (instruction.body, trips))
                for site in self.computation(name or "")
            ]
        if opcode == "conditional":
            return _either([self.computation(name) for name in instruction.branches])
        found = [site for name in instruction.called for site in self.computation(name)]
        if is_fused_reduce_scatter(instruction):
            return [_as_reduce_scatter(site) for site in found]
        return found

    def collective(self, within: Computation, instruction: Instruction, op: str) -> list[Site]:
        operands = _operand_shapes(within, instruction)
        axes, width = self.devices(instruction, op)
        by_dtype: dict[str, list[Shape]] = {}
        for shape in operands:
            by_dtype.setdefault(shape.dtype, []).append(shape)
        return [
            Site(
                op=op,
                axes=axes,
                dtype=dtype,
                count=1,
                elements=_full(op, sum(shape.elements for shape in shapes), width),
                bytes=_ring(op, sum(shape.bytes for shape in shapes), width),
                operands=tuple(shapes),
                name=instruction.name,
                source=instruction.source,
                computation=within.name,
            )
            for dtype, shapes in by_dtype.items()
        ]

    def devices(self, instruction: Instruction, op: str) -> tuple[tuple[str, ...], int | None]:
        """The mesh axes of a collective and how many devices are in a group."""
        module, attributes = self.module, instruction.attributes
        devices = module.partitions * module.replicas
        if devices != math.prod(self.shape.values()):
            return UNKNOWN, _width(groups(attributes, devices))
        if op == "collective-permute":
            moves = pairs(attributes)
            return (UNKNOWN if moves is None else axes_of_pairs(moves, self.shape)), None
        found = groups(attributes, devices)
        if found is None:
            return UNKNOWN, None
        by_partition = (
            "use_global_device_ids=true" in attributes
            or (op in _IN_GROUPS_OF_PARTITIONS and "channel_id=" in attributes)
            or len(found[0]) == devices
        )
        if not by_partition:
            # The numbers are replicas'. There is one: with a channel, {0} means all partitions.
            if module.replicas > 1:
                return UNKNOWN, None
            everyone = (tuple(range(devices)),)
            alone = tuple((position,) for position in range(devices))
            found = everyone if "channel_id=" in attributes else alone
        return axes_of_groups(found, self.shape), _width(found)


def _width(found: tuple[tuple[int, ...], ...] | None) -> int | None:
    return max(len(group) for group in found) if found else None


def _full(op: str, elements: int, width: int | None) -> int | None:
    if op != "all-gather":
        return elements
    return None if width is None else elements * width


def _ring(op: str, operand: int, width: int | None) -> int | None:
    """Bytes one device sends, from the bytes of its operand and the size of its group."""
    if op in ("collective-permute", "collective-broadcast"):
        return operand
    if width is None or op == "ragged-all-to-all":  # the latter's volume is data
        return None
    if op == "all-gather":
        return operand * (width - 1)
    return (2 if op == "all-reduce" else 1) * operand * (width - 1) // width


def _times(site: Site, runs: int | None) -> Site:
    return replace(site, count=product(site.count, runs))


def _either(branches: list[list[Site]]) -> list[Site]:
    sent = [
        Counter((site.op, site.axes, site.dtype, site.elements, site.count) for site in branch)
        for branch in branches
    ]
    if all(each == sent[0] for each in sent):
        return branches[0] if branches else []
    return [replace(site, count=None) for branch in branches for site in branch]


def _operand_shapes(within: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    # From the operands, because the results of start, tuple and wrapped forms differ by version.
    return tuple(shape for each in within.operands(instruction) for shape in each.shapes)


def _as_reduce_scatter(site: Site) -> Site:
    if site.op != "all-reduce":
        return site
    return replace(site, op="reduce-scatter", bytes=None if site.bytes is None else site.bytes // 2)
