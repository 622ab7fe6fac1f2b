"""What a manifest says comes back, and one that is not whole or not ours is refused."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from jzero import JzeroError, checkpoint
from jzero.checkpoint import DamagedCheckpoint, Facts, manifest
from jzero.checkpoint.facts import as_json
from jzero.checkpoint.files import FileEntry
from jzero.checkpoint.manifest import Manifest
from jzero.checkpoint.zarr import leaf_entry

FACTS = Facts(
    stage=3,
    devices=8,
    mesh={"data": 8},
    config={"train_batch_size": 32, "lr": 1e-05},
    dynamic_loss_scale=True,
    applied_steps=49,
    data=({"rows": [1, 2]}, None),
)
MANIFEST = Manifest(
    50,
    {"params/w": leaf_entry((50, 3), "bfloat16", (7, 3)), "rng": leaf_entry((), "key<fry>")},
    {f"arrays/params%2Fw/c.{i}.0": FileEntry(46, 0xFFFFFFFF) for i in range(8)},
    FACTS,
)


GONE = object()
BROKEN = {
    "version": [GONE, None, "1", -1, True],
    "step": [GONE, None, "50", -50, 50.0],
    "leaves": [GONE, None, 5, [], {"params/w": 5}],
    "files": [GONE, None, 5, {"arrays/x": 5}, {"arrays/x": {"bytes": -1, "crc": 0}}],
    "facts": [GONE, None, 5, {}],
    "facts/data": [GONE, 5, [], {}, None],
    "facts/versions": [3, None],
    "facts/config": [5],
    "facts/mesh": [7, "data=8"],
    "facts/stage": ["[red]3[/red]", 3.5],
    "facts/source": [None],
    "facts/another": [1],
    "leaves/params w/shape": [GONE, None, "50", [50], [-50, 3], [10**12, 10**12], [1] * 40],
    "leaves/params w/dtype": [GONE, None, 5, "bogus", "O", ">f2", "float32", "M8[s]", "V2"],
    "leaves/params w/chunk": [GONE, None, [7], [0, 0], [1, 1], [-7, 3], [7, 3, 1]],
    "leaves/params w/bytes": [GONE, None, 0, -300, "300", 302],
    "leaves/params w": [
        {"shape": [3], "dtype": "object", "chunk": [3], "bytes": 24},
        {"shape": [1] * 40, "dtype": "int8", "chunk": [1] * 40, "bytes": 1},
        {"shape": [10**4], "dtype": "int8", "chunk": [10**4], "bytes": 10**4},
        {"shape": [10**4], "dtype": "int8", "chunk": [0], "bytes": 10**4},
        {"shape": [3, 0], "dtype": "int8", "chunk": [0, 0], "bytes": 0},
        {"shape": [3], "dtype": "key<fry>", "chunk": [2], "bytes": 8},
    ],
    "files/arrays params%2Fw c.0.0/bytes": [GONE, -1, "46", None],
    "leaves/rng/chunk": [[], [3], "2"],
}


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "step_00000050"
    place.mkdir()
    manifest.write(place, MANIFEST)
    return place


def test_all_of_it_comes_back(folder):
    assert manifest.read(folder) == MANIFEST
    assert {"jax", "numpy", "python"} <= MANIFEST.facts.versions.keys()
    assert MANIFEST.bytes == 300 + 8


def test_every_flipped_bit_is_noticed(folder):
    path = folder / "manifest.json"
    whole = path.read_bytes()
    exponent = whole.index(b"1e-05") + 1  # 1E-05 is the same number
    for i, bit in [(exponent, 5), *((i, i % 8) for i in range(0, len(whole), 7))]:
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
        with pytest.raises(DamagedCheckpoint, match="manifest.json was changed|is cut short"):
            manifest.read(folder)


NONE = [b"", b"{", b"\x00" * 500, b"[]", b"{}", b"\xff\xfe", b"[" * 100_000]


@pytest.mark.parametrize("text", NONE, ids=lambda text: str(text[:20]))
def test_what_is_no_manifest(folder, text):
    (folder / "manifest.json").write_bytes(text)
    with pytest.raises(DamagedCheckpoint, match="manifest.json is cut short or changed"):
        manifest.read(folder)


@pytest.mark.parametrize("where", BROKEN)
def test_what_cannot_be_is_damage_though_the_checksum_fits(folder, where):
    *keys, last = (key.replace(" ", "/") for key in where.split("/"))
    for value in BROKEN[where]:
        manifest.write(folder, MANIFEST)
        found = json.loads((folder / "manifest.json").read_text())
        inside = functools.reduce(lambda x, key: x[key], keys, found)
        inside[last] = value
        if value is GONE:
            del inside[last]
        sign(folder, found)
        with pytest.raises(
            DamagedCheckpoint, match="checksum that fits, but says what cannot be"
        ) as told:
            manifest.read(folder)
        assert "zip()" not in str(told.value)


def test_a_number_that_json_has_not(folder):
    """`inspect --json` could not show it."""
    found = json.loads((folder / "manifest.json").read_text())
    found["facts"]["config"] = {"lr": float("nan")}
    sign(folder, found)
    with pytest.raises(DamagedCheckpoint, match="is cut short or changed"):
        manifest.read(folder)


def sign(folder, found):
    """Writes a manifest with a checksum that fits."""
    rest = {key: value for key, value in found.items() if key != "checksum"}
    text = json.dumps({**rest, "checksum": manifest._checksum(rest)})
    (folder / "manifest.json").write_text(text)


def test_none_at_all(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="step_00000050 is damaged: manifest.json is miss"):
        manifest.read(folder)


def test_that_of_another_step(folder, tmp_path):
    other = tmp_path / "step_00000060"
    folder.rename(other)
    with pytest.raises(DamagedCheckpoint, match="belongs to step 50"):
        manifest.read(other)
    best = tmp_path / "best"  # a name of the user's own says no step
    other.rename(best)
    assert manifest.read(best).step == 50


def test_a_later_version_is_refused_with_both_numbers(folder, monkeypatch):
    monkeypatch.setattr(manifest, "VERSION", 2)
    manifest.write(folder, MANIFEST)
    monkeypatch.undo()
    with pytest.raises(JzeroError, match="version 2 of the format, and this jzero reads up to 1"):
        manifest.read(folder)
    with pytest.raises(JzeroError, match="version 2"):  # which is no damage
        checkpoint.verify(folder)


def test_another_format_is_refused(folder, monkeypatch):
    monkeypatch.setattr(manifest, "FORMAT", "something else")
    manifest.write(folder, MANIFEST)
    monkeypatch.undo()
    with pytest.raises(JzeroError, match="its format is 'something else'"):
        manifest.read(folder)


def test_it_is_plain_json(folder):
    found = json.loads((folder / "manifest.json").read_text())
    assert found["leaves"]["params/w"] == {
        "shape": [50, 3],
        "dtype": "bfloat16",
        "chunk": [7, 3],
        "bytes": 300,
    }
    assert found["facts"]["data"] == [{"rows": [1, 2]}, None]


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    "data, said",
    [
        ({1: 2}, "it has the key 1"),
        ((1, 2), "it is a tuple"),
        (b"here", "it is a bytes"),
        (object(), "it is a object"),
        (float("nan"), "it is nan"),
        ({"loader": {"epoch": 1, "row": np.int64(5)}}, "loader.row is a numpy.int64"),
        ({"order": [0, {"a": {3}}]}, r"order\[1\].a is a set"),
        ({"seed": 10**5000}, "seed is a number of 16610 bits"),
        (nested(10**5), "it is nested too deeply"),
    ],
)
def test_positions_that_would_not_come_back(data, said):
    """The first value that does not is named."""
    with pytest.raises(JzeroError, match=f"would not come back from JSON as it is: {said}; give"):
        as_json(data)


def test_what_is_said_of_a_run():
    zero, state = tiny()
    facts = checkpoint.facts_of(zero.setup, state, data={"row": 3})
    assert (facts.stage, facts.devices, facts.mesh) == (2, 8, {"data": 8})
    assert facts.config == zero.config.resolved()
    assert (facts.applied_steps, facts.data, facts.source) == (0, ({"row": 3},), "training")


def tiny():
    zero = jzero.Zero(stage=2)
    return zero, zero.init(lambda key: {"w": jnp.zeros(3)}, optax.sgd(0.1))
