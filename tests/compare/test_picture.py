"""The picture: to scale, small, on its own ground; and what is said where it cannot be drawn."""

import importlib
import io
import itertools
import sys

import numpy as np
import pytest
from comparisons import GB, RESULT

from jzero.compare.page import picture, require_extra
from jzero.compare.page.palette import LIGHT
from jzero.errors import JzeroError


@pytest.fixture
def images():
    """Pillow's Image, where the extra is installed."""
    pytest.importorskip("resvg_py", reason="the extra jzero[png] is not installed")
    return pytest.importorskip("PIL.Image", reason="the extra jzero[png] is not installed")


def test_the_picture_is_to_scale_and_small(images):
    file = picture(RESULT)
    assert file.startswith(b"\x89PNG") and len(file) < 60_000
    image = images.open(io.BytesIO(file))
    assert image.size[0] == 1500 and "transparency" not in image.info
    lengths = {name: longest(image.convert("RGB"), name) for name in ("optimizer", "gradients")}
    scale = 1.5 * (1000 - 2 * 28) / (1.01 * 210 * GB)
    assert lengths["optimizer"] == pytest.approx(19 * GB * scale, abs=4)
    assert lengths["gradients"] == pytest.approx(2.64 * GB * scale, abs=4)


def longest(image, name: str) -> int:
    """The longest unbroken stretch of a colour in a row of pixels of the upper half, in memory."""
    wanted = [int(LIGHT[name][i : i + 2], 16) for i in (1, 3, 5)]
    near = (np.abs(np.asarray(image)[: image.height // 2].astype(int) - wanted) <= 6).all(axis=2)
    runs = (len(list(run)) for row in near for colour, run in itertools.groupby(row) if colour)
    return max(runs)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    for draw in (require_extra, lambda: picture(RESULT)):
        with pytest.raises(
            JzeroError, match=r'^--png needs an extra: pip install "\.\[png\]" in a clone of jzero$'
        ):
            draw()


def test_without_a_font_it_says_so(images, monkeypatch: pytest.MonkeyPatch):
    resvg = importlib.import_module("resvg_py")
    drawn = resvg.svg_to_bytes
    monkeypatch.setattr(
        resvg, "svg_to_bytes", lambda **given: drawn(skip_system_fonts=True, **given)
    )
    with pytest.raises(JzeroError, match="^--png: there is no font to write with on this machine"):
        picture(RESULT)
