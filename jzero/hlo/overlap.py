"""How much of a program's traffic has computation to hide behind, from its schedule."""

from jax.sharding import AbstractMesh, Mesh

from jzero.hlo.products import Products
from jzero.hlo.sites import Site, sites
from jzero.hlo.spans import Callers, is_start, span
from jzero.hlo.text import Module, Program, parse

LARGE = 2**20
"""Bytes from which a collective counts in a program without layer loops."""


def overlapped_fraction(program: Program, mesh: Mesh | AbstractMesh) -> float | None:
    """Of the bytes that a program's layers send, the share with a matrix product meanwhile.

    Counted are collectives in layer loops: a `while` whose own body, without the loops nested in
    it, holds a matrix product. A program without such a loop, its layers unrolled, counts every
    collective that sends 1 MiB or more. A collective overlaps where at least one matrix product
    (dot, convolution, a library's call, or a fusion with one) is scheduled between its start and
    its done.

    Arguments:
      program: a compiled function, its text or what `parse` read of it; scheduled.
      mesh: the mesh it was compiled for.

    Returns:
      The share, 0 to 1, of ring bytes, loops multiplied out; None where the schedule has no
      asynchronous collectives, where nothing is sent there, or where a loop's length is not known.

    Raises:
      JzeroError: `program` is text that holds no HLO module.
    """
    module = parse(program)
    return _Reader(module).fraction(sites(module, mesh))


class _Reader:
    def __init__(self, module: Module):
        self.module = module
        self.products = Products(module)
        self.callers = Callers(module)

    def fraction(self, found: list[Site]) -> float | None:
        if not any(self.is_asynchronous(site) for site in found):
            return None
        if self.has_layer_loops():
            found = [site for site in found if self.in_layer_loop(site)]
        else:
            found = [site for site in found if site.bytes is None or site.bytes >= LARGE]
        total = hidden = 0
        for site in found:
            if site.bytes is None or site.count is None:
                return None
            total += site.bytes * site.count
            hidden += site.bytes * site.count * self.overlaps(site)
        return hidden / total if total else None

    def has_layer_loops(self) -> bool:
        return any(
            each.body is not None and self.products.in_computation(each.body)
            for computation in self.module.computations.values()
            for each in computation.instructions
        )

    def in_layer_loop(self, site: Site) -> bool:
        body = next((c.body for _, c in self._above(site) if c.body is not None), None)
        return body is not None and self.products.in_computation(body, loops=False)

    def is_asynchronous(self, site: Site) -> bool:
        _, instruction = self._at(site)
        return is_start(self.module, instruction) or any(
            is_start(self.module, caller) for _, caller in self._above(site)
        )

    def overlaps(self, site: Site) -> bool:
        computation, instruction = self._at(site)
        found = span(self.module, self.callers, computation, instruction)
        return found is not None and any(map(self.products.in_instruction, found.between))

    def _at(self, site: Site):
        computation = self.module.computations[site.computation]
        return computation, computation.by_name[site.name]

    def _above(self, site: Site):
        return self.callers.above(site.computation)
