"""Which arrays of a program each array is made from, and how: a graph over all computations.

Tuples are taken apart, and loops, calls, fusions and asynchronous pairs are followed: only arrays
and the ways between them are left. A computation is there once, however many call it: what flows in
from one caller may flow out to another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from jzero.hlo.buffers import Value
from jzero.hlo.sites import OPS
from jzero.hlo.text import Computation, Instruction, Module, Shape
from jzero.hlo.ways import Way, ways

Edge = tuple[int, int, Way]
Piece = tuple[int, tuple[int, ...]]


class Flow:
    """The arrays of a program, as numbers, and the ways between them.

    Attributes:
      module: the program.
      shapes: of each array.
      at: the computation, and the instruction in it, that gives each array.
      sources: for each array those that it is made from, each with its way.
      uses: for each array those that are made from it.
      pieces: for an array that others were packed into, these, and what is cut out for each.
    """

    def __init__(self, module: Module):
        self.module = module
        self.shapes: list[Shape] = []
        self.at: list[tuple[Computation, Instruction]] = []
        self._first: dict[tuple[str, str], int] = {}
        for computation in module.computations.values():
            for each in computation.instructions:
                self._first[computation.name, each.name] = len(self.shapes)
                self.shapes += each.shapes
                self.at += [(computation, each)] * len(each.shapes)
        self.sources: list[list[tuple[int, Way]]] = [[] for _ in self.shapes]
        self.uses: list[list[tuple[int, Way]]] = [[] for _ in self.shapes]
        self.pieces: dict[int, list[Piece]] = {}
        for computation in module.computations.values():
            for each in computation.instructions:
                for source, target, way in self._edges(computation, each):
                    self.sources[target].append((source, way))
                    self.uses[source].append((target, way))

    def results(self, within: Computation, instruction: Instruction) -> range:
        """The arrays that an instruction gives, a tuple's in order."""
        first = self._first[within.name, instruction.name]
        return range(first, first + len(instruction.shapes))

    def array(self, value: Value) -> int | None:
        """The number of a value of a buffer assignment; None where the text does not show it."""
        computation = self.module.computations.get(value.computation)
        instruction = computation and computation.by_name.get(value.instruction)
        if computation is None or instruction is None:
            return None
        return self.results(computation, instruction)[value.element]

    def moved(self, within: Computation, collective: Instruction) -> list[Piece]:
        """(operand, results) for each array that a collective moves; several where it is packed."""
        return [
            piece
            for operand, result in self._moved(within, collective)
            for piece in self.pieces.get(operand, [(operand, (result,))])
        ]

    def lead(self, array: int, after: int, source: int, way: Way) -> None:
        """Lets an array be made from `source` in the place of another array."""
        self.uses[array] = [use for use in self.uses[array] if use[0] != after]
        self.sources[after] = [each for each in self.sources[after] if each[0] != array]
        self.uses[source].append((after, way))
        self.sources[after].append((source, way))

    def reach(
        self,
        starts: Iterable[int],
        follow: Callable[[int, int, Way], bool],
        *,
        back: bool = False,
    ) -> set[int]:
        """All arrays that some lead to, themselves included.

        Arguments:
          starts: arrays.
          follow: follow(array, next, way), whether to go on from one to the next.
          back: against the flow, to what the arrays are made from.
        """
        edges = self.sources if back else self.uses
        seen = set(starts)
        pending = list(seen)
        while pending:
            array = pending.pop()
            for after, way in edges[array]:
                if after not in seen and follow(array, after, way):
                    seen.add(after)
                    pending.append(after)
        return seen

    def loops(self) -> Iterator[Iterator[tuple[int, int, int, int]]]:
        """For each loop its carried arrays: (initial, in the body, as it ends, after the loop)."""
        for computation in self.module.computations.values():
            for loop in computation.instructions:
                body = self._body(loop)
                if body is not None:
                    yield zip(
                        self._operands(computation, loop)[0],
                        self._parameters(body)[0],
                        self.results(body, body.root),
                        self.results(computation, loop),
                        strict=False,
                    )

    def _edges(self, within: Computation, instruction: Instruction) -> Iterator[Edge]:
        """All that flows into an instruction, and into the computations that it runs."""
        opcode = instruction.opcode
        results, operands = self.results(within, instruction), self._operands(within, instruction)
        if opcode == "get-tuple-element":
            whole = within.by_name[instruction.operands[0]]
            index = int(instruction.attribute("index") or 0)
            yield from _all(operands[0][sum(whole.widths[:index]) :], results)
        elif opcode.endswith("-done"):
            whole = within.by_name[instruction.operands[0]]
            yield from _all(operands[0][_in_front(opcode, whole, len(results)) :], results)
        elif opcode == "while":
            body = self._body(instruction)
            if body is not None:
                parameter, root = self._parameters(body)[0], self.results(body, body.root)
                yield from _all(operands[0], parameter)
                yield from _all(root, parameter)
                yield from _all(root, results)
        elif opcode == "conditional":
            for name, operand in zip(instruction.branches, operands[1:], strict=False):
                yield from self._call(name, [operand], results)
        elif opcode in ("fusion", "call") and instruction.called:
            yield from self._call(instruction.called[0], operands, results)
        elif opcode.removesuffix("-start") in OPS:
            moved = self._moved(within, instruction)
            (way, *_) = ways(instruction)
            yield from ((source, target, way) for source, target in moved)
            yield from _all(_flat(operands), results[: len(results) - len(moved)])
        elif opcode.endswith("-start") and instruction.called:
            yield from _all(_flat(operands), results)
            yield from self._call(instruction.called[0], operands, results[instruction.widths[0] :])
        elif opcode in ("tuple", "opt-barrier") or opcode.endswith("-update"):
            yield from _all(_flat(operands), results)
        else:
            for operand, way in zip(operands, ways(instruction), strict=True):
                yield from ((source, target, way) for source in operand for target in results)

    def _moved(self, within: Computation, collective: Instruction) -> list[tuple[int, int]]:
        operands = _flat(self._operands(within, collective))
        results = self.results(within, collective)
        # A start may give its operands again, in front of its results.
        again = len(operands) if len(results) >= 2 * len(operands) else 0
        return list(zip(operands, results[again:], strict=False))

    def _call(self, name: str, operands: Sequence[range], results: range) -> Iterator[Edge]:
        called = self.module.computations.get(name)
        if called is not None:
            parameters = self._parameters(called)
            for number, operand in enumerate(operands):
                yield from _all(operand, parameters.get(number, ()))
            yield from _all(self.results(called, called.root), results)

    def _operands(self, within: Computation, instruction: Instruction) -> list[range]:
        return [self.results(within, each) for each in within.operands(instruction)]

    def _parameters(self, computation: Computation) -> dict[int, range]:
        return {
            int(each.argument): self.results(computation, each)
            for each in computation.instructions
            if each.opcode == "parameter"
        }

    def _body(self, instruction: Instruction) -> Computation | None:
        return self.module.computations.get(instruction.body or "")


def _flat(ranges: Iterable[range]) -> list[int]:
    return [array for each in ranges for array in each]


def _all(sources: Iterable[int], targets: Iterable[int]) -> Iterator[Edge]:
    """One to one, as they are."""
    return ((a, b, Way.SAME) for a, b in zip(sources, targets, strict=False))


def _in_front(opcode: str, start: Instruction, results: int) -> int:
    """How many arrays stand in front of the results in the tuple of a start."""
    if opcode == "copy-done":
        return 0
    if opcode.removesuffix("-done") in OPS:
        return results if len(start.shapes) >= 2 * results else 0
    return start.widths[0]
