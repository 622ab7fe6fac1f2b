"""What a compiler says when a program does not fit, and the bytes that it names."""

import re

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d,]+(?:\.\d+)?)\s*([KMGT]?)(?:iB|B)?"
# Most telling first. The first two are XLA:TPU's; the last is an allocator's, as on a GPU.
_NEEDS = (
    rf"\({_SIZE}\) exceeds available HBM",
    rf"Used\s+{_SIZE}\s+of\s+[\d.,]+\s*[KMGT]?(?:iB|B)?\s+hbm",
    rf"(?:to allocate|[Aa]llocating) {_SIZE}",
)
_HAS = (
    rf"exceeds available HBM \({_SIZE}\)",
    rf"Used\s+[\d.,]+\s*[KMGT]?(?:iB|B)?\s+of\s+{_SIZE}\s+hbm",
    rf"exceeds the memory limit of {_SIZE}",
)


def is_refused(error: BaseException) -> bool:
    """Whether a compiler refused a program for memory."""
    return "RESOURCE_EXHAUSTED" in str(error)


def needed(message: str) -> int | None:
    """The bytes that a refused program would need; None where the message has none.

    >>> needed("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
    ...        "temporaries (2.50K) exceeds available HBM (2.00K).")
    2560
    """
    return _first(_NEEDS, message)


def there(message: str) -> int | None:
    """The bytes that the message says there are.

    >>> there("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 2.50K of 2.00K hbm")
    2048
    """
    return _first(_HAS, message)


def _first(patterns: tuple[str, ...], message: str) -> int | None:
    for pattern in patterns:
        found = re.search(pattern, message)
        if found:
            return round(float(found[1].replace(",", "")) * _UNITS[found[2]])
    return None
