"""The steps of tests/traffic and the network of tests/training serve here too."""

import sys
from pathlib import Path

import pytest

from jzero import targets
from jzero.errors import JzeroError

sys.path += [str(Path(__file__).parent.parent / name) for name in ("traffic", "training")]


@pytest.fixture(params=["cpu:8", "h100:8"])
def target(request: pytest.FixtureRequest) -> str:
    """Each target in turn; the GPU's is skipped where its compiler is not installed."""
    try:
        targets.devices(targets.parse(request.param))
    except JzeroError as error:
        pytest.skip(str(error))
    return request.param
