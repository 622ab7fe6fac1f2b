"""Which pass of autodiff an operation belongs to, by the name that JAX gave it."""

FORWARD, BACKWARD = "jvp(", "transpose("
"""What JAX writes into the names of operations under autodiff, and of those of its second pass."""

AGAIN = "rematted_computation"
"""What JAX writes into the names of operations that backward does again."""


def phase(op_name: str) -> str:
    """ "forward", "recomputed", "backward", or "" outside of autodiff.

    >>> phase("jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot_general")
    'recomputed'
    """
    if AGAIN in op_name:
        return "recomputed"
    if BACKWARD in op_name:
        return "backward"
    return "forward" if FORWARD in op_name else ""
