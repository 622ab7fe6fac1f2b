"""Reading a compiled program's schedule: each loop's iteration, and the whole around them."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jax.sharding import AbstractMesh, Mesh

from jzero.compare.schedule.leaves import leaves
from jzero.compare.schedule.parts import Part, Schedule, Step, Transfer, shortened
from jzero.hlo.flops import Flops
from jzero.hlo.known import added_up, product
from jzero.hlo.loops import trip_count
from jzero.hlo.passes import phase
from jzero.hlo.products import Products
from jzero.hlo.sites import Site, sites
from jzero.hlo.spans import Callers, span
from jzero.hlo.text import Computation, Instruction, Module, Program, parse

MOST = 300
"""Steps of a part that are kept."""

# What XLA writes down and no device does.
_FREE = frozenset({"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all"})
_MOVED = frozenset({"get-tuple-element", "tuple", "bitcast", "copy", "opt-barrier"})


def schedule(
    program: Program, mesh: Mesh | AbstractMesh, names: Mapping[str, str] | None = None
) -> Schedule:
    """Reads what a compiled program computes and sends, in the order of its schedule.

    A loop whose body holds a matrix product or a collective is a part of its own: one iteration of
    it. What a branch holds stays with the branch.

    Arguments:
      program: a compiled function, its text or what `parse` read of it; scheduled.
      mesh: the mesh it was compiled for.
      names: what to call the mesh's axes instead.

    Returns:
      The parts; at most `MOST` steps of each.

    Raises:
      JzeroError: `program` is text that holds no HLO module.
    """
    module = parse(program)
    return _Reader(module, sites(module, mesh), names or {}).read()


Place = tuple[str, str]
"""A computation and an instruction in it."""


@dataclass
class _Draft:
    """A part in the making; `sent` are the steps of its transfers, by the place where they are."""

    trips: int | None
    runs: int | None
    instructions: list[tuple[Computation, Instruction]]
    sent: dict[Place, list[Step]] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    phases: set[str] = field(default_factory=set)


class _Reader:
    def __init__(self, module: Module, found: list[Site], names: Mapping[str, str]):
        self.module = module
        self.names = names
        self.flops = Flops(module)
        self.products = Products(module)
        self.callers = Callers(module)
        # Combined tensors of several dtypes are a site for each dtype.
        self.sites: dict[Place, dict[str, Site]] = {}
        for site in found:
            self.sites.setdefault((site.computation, site.name), {})[site.dtype] = site
        self.sending = {
            each
            for computation, _ in self.sites
            for each in (computation, *(above.name for above, _ in self.callers.above(computation)))
        }
        self.drafts: list[_Draft] = []
        self.home: dict[str, int] = {}  # of a computation: the part that it is in
        self.loops: dict[Place, int] = {}

    def read(self) -> Schedule:
        self.take_up(self.module.entry, 1, 1)
        for found in self.sites.values():
            self.place(list(found.values()))
        # From the inside out: what is in a loop decides what the loop around it is.
        parts = [self.finished(draft) for draft in reversed(self.drafts)]
        return Schedule(tuple(reversed(parts)))

    def take_up(self, name: str, trips: int | None, runs: int | None) -> int:
        """Makes a part of a computation, and parts of the loops in it. Returns its number."""
        number = len(self.drafts)
        self.drafts.append(_Draft(trips, runs, list(self.flat(name))))
        for within, each in self.drafts[number].instructions:
            self.home.setdefault(within.name, number)
            body = each.body
            if body is not None and (body in self.sending or self.products.in_computation(body)):
                trips = trip_count(self.module, within, each)
                again = self.take_up(body, trips, product(runs, trips))
                self.loops[within.name, each.name] = again
        return number

    def flat(self, name: str) -> Iterator[tuple[Computation, Instruction]]:
        """A computation's instructions, those that it calls in their place."""
        computation = self.module.computations[name]
        for each in computation.instructions:
            if each.opcode == "call":
                yield from itertools.chain.from_iterable(map(self.flat, each.called))
            else:
                yield computation, each

    def place(self, found: list[Site]) -> None:
        """Puts a collective where it starts and where it ends, or where it runs all at once."""
        computation = self.module.computations[found[0].computation]
        instruction = computation.by_name[found[0].name]
        above = [(computation, instruction), *self.callers.above(computation.name)]
        under_way = span(self.module, self.callers, computation, instruction)
        if under_way is not None:
            within = next(c for c, each in above if each is under_way.start)
            if within.name in self.home:
                order = within.instructions
                start = next(i for i, each in enumerate(order) if each is under_way.start)
                end = start + 1 + len(under_way.between)
                done = order[end % len(order)]
                draft = self.drafts[self.home[within.name]]
                transfer = self.transfer(draft, found, _moved_on(within, done))
                self.put(draft, (within.name, under_way.start.name), "start", transfer)
                self.put(draft, (within.name, done.name), "done", transfer)
                return
        for within, each in above:
            if within.name in self.home:  # a loop's condition is in no part
                draft = self.drafts[self.home[within.name]]
                self.put(draft, (within.name, each.name), "send", self.transfer(draft, found))
                return

    def put(self, draft: _Draft, place: Place, kind: str, transfer: int) -> None:
        draft.sent.setdefault(place, []).append(Step(kind, index=transfer))

    def transfer(self, draft: _Draft, found: list[Site], moved_on: bool = False) -> int:
        """Adds to a part's transfers. Returns its number."""
        sizes = [site.bytes if site.count == draft.runs else None for site in found]
        tensors = sum(len(site.operands) for site in found)
        carried = leaves(found[0].source)
        draft.sources.append(found[0].source)
        draft.transfers.append(
            Transfer(
                op=found[0].op,
                axes=tuple(self.names.get(axis, axis) for axis in found[0].axes),
                dtype="+".join(site.dtype for site in found),
                bytes=added_up(sizes),
                tensors=tensors,
                leaves=carried if len(carried) == tensors else (),
                for_next=moved_on and draft is not self.drafts[0],
            )
        )
        return len(draft.transfers) - 1

    def finished(self, draft: _Draft) -> Part:
        steps: list[Step] = []
        for within, each in draft.instructions:
            sent = draft.sent.get((within.name, each.name), [])
            steps += [step for step in sent if step.kind == "start"]
            steps += self.computed(draft, within, each, alone=not sent)
            steps += [step for step in sent if step.kind != "start"]
        phase = "step" if draft is self.drafts[0] else _phase_of_loop(draft)
        kept, left_out = shortened(steps, MOST)
        return Part(phase, draft.trips, kept, tuple(draft.transfers), left_out)

    def computed(
        self, draft: _Draft, within: Computation, each: Instruction, alone: bool
    ) -> Iterator[Step]:
        if (within.name, each.name) in self.loops:
            index = self.loops[within.name, each.name]
            draft.phases |= self.drafts[index].phases
            yield Step("loop", self.flops.of(within, each), index=index)
        elif found := self.flops.product(within, each):
            phase = _phase(each.name, found.source or each.source)
            draft.phases.add(phase)
            flops = self.flops.of(within, each)
            yield Step("product", flops, dtype=found.dtype, phase=phase, name=found.name)
        elif alone and each.opcode not in _FREE and not each.opcode.endswith(("-done", "-update")):
            yield Step("other")


def _phase(name: str, source: str) -> str:
    # The model's own remat is in the source, XLA's in the name.
    return "recomputed" if ".remat" in name else phase(source)


def _phase_of_loop(draft: _Draft) -> str:
    if {"forward", "backward"} <= draft.phases:
        return "micro-batch"
    if draft.phases & {"backward", "recomputed"}:
        return "backward"
    if "forward" in draft.phases:
        return "forward"
    return "update" if any("zero_update" in source for source in draft.sources) else ""


def _moved_on(within: Computation, done: Instruction) -> bool:
    """Whether a body only hands a result on to the next iteration."""
    values = {done.name}
    for each in within.instructions:
        if not values.isdisjoint(each.operands):
            if each.opcode not in _MOVED:
                return False
            values.add(each.name)
    return within.root.name in values
