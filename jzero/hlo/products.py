"""Where a compiled program multiplies matrices, in whatever form its compiler gave the product."""

import re

from jzero.hlo.text import Computation, Instruction, Module

_OPCODES = frozenset({"dot", "convolution", "scaled-dot", "ragged-dot"})
_LIBRARY = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|cublas|conv)[^"]*"', re.IGNORECASE)


class Products:
    """Which instructions and computations of a module hold a matrix product."""

    def __init__(self, module: Module):
        self._module = module
        self._known: dict[tuple[str, bool], bool] = {}

    def in_instruction(self, instruction: Instruction, loops: bool = True) -> bool:
        """Whether it is a product, or a fusion, a call, a branch or a loop that holds one.

        Arguments:
          instruction: of the module.
          loops: whether what a `while` holds counts too.
        """
        if instruction.opcode in _OPCODES:
            return True
        if instruction.opcode == "custom-call" and _LIBRARY.search(instruction.attributes):
            return True
        names = (*instruction.called, *instruction.branches)
        if instruction.body is not None:
            names = (instruction.body,) if loops else ()
        return any(self.in_computation(name, loops) for name in names)

    def in_computation(self, name: str, loops: bool = True) -> bool:
        """The same of a whole computation; of a name that is not there, False."""
        key = name, loops
        if key not in self._known:
            self._known[key] = False  # HLO has no recursion; a text that has ends here
            computation = self._module.computations.get(name)
            self._known[key] = computation is not None and self._any(computation, loops)
        return self._known[key]

    def _any(self, computation: Computation, loops: bool) -> bool:
        return any(self.in_instruction(each, loops) for each in computation.instructions)
