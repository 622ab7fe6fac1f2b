"""How bytes and shares are written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """A decimal unit of bytes and its binary neighbour."""

    name: str
    size: int
    binary_name: str
    binary_size: int

    def decimal(self, count: float) -> str:
        return f"{count / self.size:,.2f}"

    def binary(self, count: float) -> str:
        return f"{count / self.binary_size:,.2f}"

    def both(self, count: float) -> str:
        return f"{self.decimal(count)} {self.name} ({self.binary(count)} {self.binary_name})"


_UNITS = (
    Unit("GB", 10**9, "GiB", 2**30),
    Unit("MB", 10**6, "MiB", 2**20),
    Unit("kB", 10**3, "KiB", 2**10),
)


def size(count: int) -> str:
    """Bytes in the unit that suits them, decimal and binary.

    >>> size(26 * 10**9)
    '26.00 GB (24.21 GiB)'
    """
    return unit_for(count).both(count)


def percent(share: float) -> str:
    """A share in whole percent, or less than one.

    >>> percent(0.6), percent(0.0001)
    ('60%', 'under 1%')
    """
    return "under 1%" if 0 < share < 0.01 else f"{share:.0%}"


def unit_for(count: int) -> Unit:
    """The unit in which the largest of some figures is at least 1."""
    return next((unit for unit in _UNITS if count >= unit.size), _UNITS[-1])
