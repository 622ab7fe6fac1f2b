"""Which leaves of the model a collective carries, from the scopes that jzero's step runs it in."""

import re

# XLA writes the sources of collectives that it combined as prefix/(one:two:three).
_COMBINED = re.compile(r"(.*?/|)\((.*)\)")
# Gathers of updated parameters are named too, but JAX traces equal ones once, under one name.
_SCOPES = re.compile(r"zero_reduce_scatter/(.+)/reduce_scatter|zero_read/(.+)/zero_gather")


def leaves(source: str) -> tuple[str, ...]:
    """Paths of leaves, one for each array that is carried.

    Arguments:
      source: a collective's `op_name`.

    Returns:
      The paths; () for a program that is not jzero's, or a collective of no leaf's.

    >>> leaves("jit(f)/jvp(zero_read/(embed/table)/zero_gather/all_gather:"
    ...        "head/kernel)/zero_gather/all_gather)")
    ('embed/table', 'head/kernel')
    """
    combined = _COMBINED.fullmatch(source)
    pieces = [combined[1] + each for each in combined[2].split(":")] if combined else [source]
    found = [_SCOPES.search(piece) for piece in pieces]
    return tuple(next(filter(None, match.groups())).rstrip(")") for match in found if match)
