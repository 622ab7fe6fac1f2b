"""The cast by bits is the cast: every kind of number, both signs."""

import jax
import ml_dtypes
import numpy as np

from jzero.rounding import to_bfloat16


def test_all_upper_halves_with_lower_halves_around_the_middle():
    upper = np.arange(2**16, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    given = (upper[:, None] | lower).view(np.float32)
    found = np.asarray(jax.jit(to_bfloat16)(given))
    with np.errstate(invalid="ignore", over="ignore"):
        want = given.astype(ml_dtypes.bfloat16)
    assert np.array_equal(np.isnan(found), np.isnan(given))
    number = ~np.isnan(given)
    assert np.array_equal(found.view(np.uint16)[number], want.view(np.uint16)[number])
