"""What an instruction does with the elements of each of its operands."""

from enum import Enum

from jzero.hlo.text import Instruction


class Way(Enum):
    """What becomes of an array's elements on the way into another array."""

    SAME = "moved, cast, cut out, or put beside others"
    EACH = "computed with, one by one"
    MIXED = "summed, or spread"
    PRODUCT = "multiplied as a matrix, looked up, or given to a kernel that nothing is known of"
    INDEX = "used to say where, or whether"


_SAME = frozenset(
    "all-gather all-to-all bitcast bitcast-convert collective-broadcast collective-permute "
    "concatenate convert copy domain dynamic-slice dynamic-update-slice opt-barrier "
    "pad ragged-all-to-all reduce-precision reshape reverse select slice "
    "transpose tuple".split()
)
_EACH = frozenset(
    "abs add all-reduce and atan2 cbrt ceil clamp compare complex cosine divide erf exponential "
    "exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply "
    "negate not or popcnt power real reduce-scatter remainder round-nearest-afz "
    "round-nearest-even rsqrt shift-left shift-right-arithmetic shift-right-logical sign sine sqrt "
    "stochastic-convert subtract tan tanh xor".split()
)
_MIXED = frozenset({"broadcast", "map", "reduce", "reduce-window"})
# The operands from this one on say where.
_INDEXED_FROM = {"dynamic-slice": 1, "dynamic-update-slice": 2}
# Custom calls of the compilers' own that hand their operands on: between memories, and around a
# collective that a TPU runs as a chain of fusions.
_HANDS_ON = ("MoveTo", "PinToDevice", "annotate_device_placement", "AsyncCollective")


def same(_: int, __: int, way: Way) -> bool:
    """Follows an array where it is moved, cast or cut out, in `Flow.reach`."""
    return way is Way.SAME


def ways(instruction: Instruction) -> tuple[Way, ...]:
    """The way of each operand into an instruction's result.

    Arguments:
      instruction: one that calls no computation but to reduce with.

    Returns:
      A way for each operand. What is not known is a kernel's: `Way.PRODUCT`.
    """
    count, opcode = len(instruction.operands), instruction.opcode.removesuffix("-start")
    if opcode == "select":
        return (Way.INDEX, Way.SAME, Way.SAME)
    if opcode == "gather":
        return (Way.PRODUCT, Way.INDEX)
    if opcode == "scatter":  # n arrays, where to, n arrays of updates
        arrays = count // 2
        return (Way.EACH,) * arrays + (Way.INDEX,) + (Way.PRODUCT,) * arrays
    if opcode in _INDEXED_FROM:
        values = _INDEXED_FROM[opcode]
        return (Way.SAME,) * values + (Way.INDEX,) * (count - values)
    if opcode == "custom-call":
        own = any(f'custom_call_target="{mark}' in instruction.attributes for mark in _HANDS_ON)
        return (Way.SAME if own else Way.PRODUCT,) * count
    for way, opcodes in ((Way.SAME, _SAME), (Way.EACH, _EACH), (Way.MIXED, _MIXED)):
        if opcode in opcodes:
            return (way,) * count
    return (Way.PRODUCT,) * count
