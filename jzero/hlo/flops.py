"""Floating-point operations of a compiled program's matrix products, from their shapes alone."""

import math
import re
from dataclasses import dataclass

import numpy as np

from jzero.hlo.known import added_up, product
from jzero.hlo.loops import trip_count
from jzero.hlo.products import Products
from jzero.hlo.text import Computation, Instruction, Module

_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")
# A library's product writes the same into its back-end notes.
_CONTRACTED_BY_LIBRARY = re.compile(r'"lhs_contracting_dimensions"\s*:\s*\[([\d",\s]*)\]')
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"\bbatch_group_count=(\d+)")


@dataclass(frozen=True)
class Product:
    """A matrix product, or the first of several that an instruction holds.

    Attributes:
      dtype: of its first operand, as HLO spells it; "" where unknown.
      name: its result, and the size of what it sums over where that is known.
      source: the JAX operation behind it.
    """

    dtype: str
    name: str
    source: str


class Flops:
    """Operations of each instruction of a module: products alone, two for a multiply-add."""

    def __init__(self, module: Module):
        self._module = module
        self._products = Products(module)
        self._known: dict[str, int | None] = {}

    def of(self, within: Computation, instruction: Instruction) -> int | None:
        """Operations of one run of an instruction, loops multiplied out.

        Arguments:
          within: the computation that holds it, where its operands' shapes are found.
          instruction: of the module.

        Returns:
          0 where it holds no product; None where it holds one that cannot be counted.
        """
        if not self._products.in_instruction(instruction):
            return 0
        if instruction.opcode in ("dot", "scaled-dot"):
            return _dot(within, instruction, _CONTRACTED)
        if instruction.opcode == "convolution":
            return _convolution(within, instruction)
        if instruction.body is not None:
            trips = trip_count(self._module, within, instruction)
            once = self._of_computation(instruction.body)
            return product(trips, once)
        if instruction.opcode == "conditional":
            each = [self._of_computation(name) for name in instruction.branches]
            return each[0] if len(set(each)) == 1 else None
        if instruction.called:
            return added_up(self._of_computation(name) for name in instruction.called)
        return _dot(within, instruction, _CONTRACTED_BY_LIBRARY)

    def product(self, within: Computation, instruction: Instruction) -> Product | None:
        """The first product that an instruction is or holds; None where it holds none."""
        if not self._products.in_instruction(instruction):
            return None
        for name in (*instruction.called, *instruction.branches, *filter(None, [instruction.body])):
            inner = self._module.computations.get(name)
            found = inner and (self.product(inner, each) for each in inner.instructions)
            first = next(filter(None, found or ()), None)
            if first is not None:
                return first
        operand = within.by_name.get(instruction.operands[0])
        result = instruction.shapes[0]
        name = str(result)
        flops = self.of(within, instruction)
        if flops and result.elements:
            name += f" over {flops // (2 * result.elements):,}"
        return Product(operand.shapes[0].dtype if operand else "", name, instruction.source)

    def _of_computation(self, name: str) -> int | None:
        if name not in self._known:
            found = self._module.computations.get(name)
            instructions = found.instructions if found else ()
            self._known[name] = found and added_up(self.of(found, each) for each in instructions)
        return self._known[name]


def _dot(within: Computation, dot: Instruction, pattern: re.Pattern[str]) -> int | None:
    left, contracted = _operand(within, dot, 0), pattern.search(dot.attributes)
    if left is None or contracted is None:
        return None
    dims = [int(dim) for dim in re.findall(r"\d+", contracted[1])]
    # A library's call gives its workspace beside the product: the product comes first.
    return 2 * dot.shapes[0].elements * math.prod(left[dim] for dim in dims)


def _convolution(within: Computation, convolution: Instruction) -> int | None:
    """As XLA counts it: kernel positions that meet padding or holes are left out."""
    left, kernel = _operand(within, convolution, 0), _operand(within, convolution, 1)
    labels = _LABELS.search(convolution.attributes)
    if left is None or kernel is None or labels is None:
        return None
    of_left, of_kernel, of_out = labels.groups()
    out = convolution.shapes[0].dims
    groups = _GROUPS.search(convolution.attributes)
    batch = left[of_left.index("b")] // (int(groups[1]) if groups else 1)
    meetings = math.prod(
        _meetings(left[of_left.index(str(dim))], out[of_out.index(str(dim))], window)
        for dim, window in enumerate(_windows(convolution, len(left) - 2))
    )
    features = kernel[of_kernel.index("i")] * out[of_out.index("f")]
    return 2 * batch * features * meetings


def _windows(convolution: Instruction, count: int) -> list[dict[str, int]]:
    """Of each spatial dimension: size, stride, low padding and dilations, by XLA's names."""
    text = _WINDOW.search(convolution.attributes)
    fields = dict(field.split("=") for field in text[1].split()) if text else {}

    def numbers(key: str, otherwise: int) -> list[int]:
        parts = fields[key].split("x") if key in fields else [str(otherwise)] * count
        return [int(part.split("_")[0]) for part in parts]

    names = {"size": 1, "stride": 1, "pad": 0, "lhs_dilate": 1, "rhs_dilate": 1}
    columns = {name: numbers(name, otherwise) for name, otherwise in names.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def _meetings(left: int, out: int, window: dict[str, int]) -> int:
    """How many pairs of an output and a kernel position there are that read a true element."""
    at = np.arange(out)[:, None] * window["stride"] - window["pad"]
    at = at + np.arange(window["size"]) * window["rhs_dilate"]
    true = (at >= 0) & (at % window["lhs_dilate"] == 0) & (at // window["lhs_dilate"] < left)
    return int(np.sum(true))


def _operand(within: Computation, instruction: Instruction, number: int) -> tuple[int, ...] | None:
    found = within.by_name.get(instruction.operands[number])
    return found.shapes[0].dims if found else None
