"""How leaves are cut into chunks."""

import math

import numpy as np
import pytest

from jzero.checkpoint.chunks import CHUNK_BYTES, chunk_shape, chunks_of
from jzero.checkpoint.zarr import leaf_entry, regions

SHAPES = [
    # shape, piece, bytes of an element
    ((50257, 768), (6283, 768), 4),
    ((50257, 768), (50257, 768), 4),
    ((40, 5120, 13824), (40, 640, 13824), 4),
    ((256024, 4096), (32003, 4096), 4),  # a prime number of rows
    ((33, 2500000), (33, 2500000), 4),
    ((5, 5000000), (5, 5000000), 4),
    ((97, 2**18), (13, 2**18), 4),
    ((9, 29000), (2, 29000), 4),
    ((10**9,), (10**9,), 1),
    ((3,), (1,), 4),
    ((), (), 4),
]


@pytest.mark.parametrize("shape, piece, itemsize", SHAPES)
def test_chunks(shape, piece, itemsize):
    """Even parts of the pieces, of a good size, that fill up next to nothing at the end."""
    chunk = chunk_shape(shape, piece, itemsize)
    for n, p, c in zip(shape, piece, chunk, strict=True):
        assert p % c == 0 or p == n
    size, whole = math.prod(chunk) * itemsize, math.prod(shape) * itemsize
    number = math.prod(chunks_of(shape, chunk))
    assert size <= CHUNK_BYTES
    assert size >= min(2**20, math.prod(piece) * itemsize / 2)
    assert number * size <= 1.01 * whole + 64


def test_regions_of_chunks_cover_a_leaf():
    entry = leaf_entry((50, 18), "int8", (7, 9))
    seen = np.zeros(entry.shape, int)
    for index in regions(entry):
        seen[index] += 1
    assert (seen == 1).all()
    assert list(regions(leaf_entry((0, 3), "int8"))) == []
