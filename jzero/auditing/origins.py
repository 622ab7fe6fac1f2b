"""Where a program's arrays come from and where they go, and so what each is.

A program does not speak of weights, gradients and activations. They follow from its flow:

* A weight is made from the state alone; or, after the optimizer's update, it ends in the state.
* A gradient ends in the state, element by element: no product, no lookup and no sum on the way.
* What is made from reduced gradients outside of autodiff is the optimizer's own, as in Muon.
* An activation is made from the batch, and is none of these.
"""

from collections.abc import Iterable, Sequence
from enum import Enum

from jzero.auditing.arguments import SMALL, Arguments, Role
from jzero.hlo.flow import Flow
from jzero.hlo.passes import FORWARD
from jzero.hlo.text import Instruction
from jzero.hlo.ways import Way, same

_REDUCTIONS = ("all-reduce", "reduce-scatter")


class Kind(Enum):
    """What a collective moves."""

    WEIGHT = "weights"
    GRADIENT = "gradients"
    UPDATE = "update"
    ACTIVATION = "activations"
    SMALL = "small"  # a loss, a norm, a count, and none of the above
    UNKNOWN = "unknown"


class Origins:
    """Where a program's arrays come from, and where they go.

    Arguments:
      flow, known: of the program.
      small: elements up to which what is no weight and no gradient is small; by default 1024, or
        where that is less a sixteenth of the largest array of state: toy models have toy batches.
    """

    def __init__(self, flow: Flow, known: Arguments, small: int | None = None):
        self._flow = flow
        largest = max(
            (flow.shapes[each.array].elements for each in known.of(Role.STATE)), default=0
        )
        self._small = min(SMALL, largest // 16 or SMALL) if small is None else small
        self._names = {each.array: each.name for each in known.all}
        # Without an output that is state, its gradients cannot be told from activations.
        self._may_be_gradients = known.has_backward and not known.state_outputs
        state, batch, unsure = (
            [each.array for each in known.of(role)]
            for role in (Role.STATE, Role.BATCH, Role.UNSURE)
        )
        self._ends_in_state = flow.reach(known.state_outputs, _each, back=True)
        views = flow.reach(state, same)
        # A loop over whole steps carries the state: each time round it is state again.
        again = {
            (after, inside)
            for loop in flow.loops()
            for first, inside, after, last in loop
            if first in views and last in self._ends_in_state
        }

        def within_step(array: int, after: int, _: Way) -> bool:
            return (array, after) not in again

        self._from_state, self._from_batch, self._from_unsure = (
            flow.reach(each, within_step) for each in (state, batch, unsure)
        )
        self._of_state = flow.reach(state, lambda *edge: within_step(*edge) and _each(*edge))
        products = {
            after
            for array in self._from_batch | self._from_unsure
            for after, way in flow.uses[array]
            if way is Way.PRODUCT
        }
        self._from_product = flow.reach(products, within_step)
        used = [array for array, uses in enumerate(flow.uses) if _in_product(uses)]
        self._meets_product = flow.reach(
            used,
            lambda after, array, way: within_step(array, after, way),
            back=True,
        )
        self._reaches_state = flow.reach(known.state_outputs, lambda *_: True, back=True)
        self._from_gradient = flow.reach(self._reduced_gradients(), within_step)

    def kind(
        self, op: str, operand: int, results: Sequence[int], elements: int, op_name: str
    ) -> Kind:
        """What a collective moves.

        Arguments:
          op: its opcode.
          operand, results: arrays.
          elements: of the full tensor.
          op_name: the JAX operation behind it.
        """
        of_state = self.is_of_state(operand)
        if of_state and operand in self._of_state:
            return Kind.WEIGHT
        if not self._ends_in_state.isdisjoint(results):
            updated = operand in self._of_state and op not in _REDUCTIONS
            return Kind.WEIGHT if updated else Kind.GRADIENT
        if elements <= self._small or self._is_of_scalars(operand):
            return Kind.SMALL
        if of_state:
            return Kind.WEIGHT
        to_state = not self._reaches_state.isdisjoint(results)
        if to_state and self._meets_product.isdisjoint(results):
            return Kind.GRADIENT  # summed after it was sent, as where gradients travel quantised
        if operand in self._from_gradient and FORWARD not in op_name:
            return Kind.UPDATE if op_name else Kind.UNKNOWN
        of_unsure = operand in self._from_unsure and operand in self._from_product
        if self._may_be_gradients or not (of_unsure or operand in self._from_batch):
            return Kind.UNKNOWN
        return Kind.ACTIVATION

    def is_of_state(self, array: int) -> bool:
        """Whether an array is made from the state alone."""
        unsure = array in self._from_batch or array in self._from_unsure
        return array in self._from_state and not unsure

    def names(self, array: int) -> tuple[str, ...]:
        """The arguments whose elements an array has."""
        found = self._flow.reach([array], same, back=True)
        return tuple(sorted(self._names[each] for each in found & self._names.keys()))

    def _reduced_gradients(self) -> list[int]:
        module, made = self._flow.module, self._from_batch | self._from_unsure
        return [
            result
            for computation in module.computations.values()
            for each in computation.instructions
            if each.opcode.removesuffix("-start") in _REDUCTIONS
            for operand, results in self._flow.moved(computation, each)
            for result in results
            if operand in made and result in self._ends_in_state
        ]

    def _is_of_scalars(self, array: int) -> bool:
        """Whether it is nothing but single numbers side by side, such as each leaf's norm."""
        parts = self._flow.reach([array], same, back=True)
        ends = [
            part for part in parts if all(w is not Way.SAME for _, w in self._flow.sources[part])
        ]
        return all(self._flow.shapes[part].elements <= 1 for part in ends)

    def maker(self, array: int) -> Instruction | None:
        """The operation that made an array, back through mere moves; None where it has no name."""
        instruction = self._flow.at[array][1]
        while not _is_one_operation(instruction):
            moves = [source for source, way in self._flow.sources[array] if way is Way.SAME]
            if len(moves) != 1:
                return None
            array = moves[0]
            instruction = self._flow.at[array][1]
        return None if instruction.opcode == "parameter" else instruction


def _is_one_operation(instruction: Instruction) -> bool:
    # Of a combined collective the name is "jit(step)/(mul:dot_general)".
    return bool(instruction.source) and ":" not in instruction.source.rsplit("/", 1)[-1]


def _each(_: int, __: int, way: Way) -> bool:
    return way in (Way.SAME, Way.EACH)


def _in_product(uses: Iterable[tuple[int, Way]]) -> bool:
    return any(way is Way.PRODUCT for _, way in uses)
