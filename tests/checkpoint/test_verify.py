"""Every kind of damage to every kind of file is found, and named with the step to go back to."""

import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import mesh
from states import files_of, random_step

import jzero
from jzero.checkpoint import DamagedCheckpoint, complete_before, restore, verify

STEPS = (10, 20, 30)


def init(key):
    return {"w": jnp.zeros((13, 6)), "b": jnp.zeros(6), "empty": jnp.zeros((0, 2))}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Three complete steps, and the setup that fits them."""
    zero = jzero.Zero(stage=3, mesh=mesh(8))
    zero.setup_for(init, optax.adamw(1e-3))
    root = tmp_path_factory.mktemp("checkpoints")
    for step in STEPS:
        random_step(root, zero, step)
    return root, zero.setup


@pytest.fixture
def root(made, tmp_path):
    return shutil.copytree(made[0], tmp_path / "checkpoints")


METADATA, CHUNK = "arrays/params%2Fw/zarr.json", "arrays/params%2Fw/c.0.0"
SCALAR = "arrays/progress%2Fstep/c"
OTHER = {  # of the same kind
    "manifest.json": "../step_00000020/manifest.json",
    METADATA: "arrays/params%2Fb/zarr.json",
    CHUNK: "arrays/optimizer%2F0%2Fmu%2Fw/c.0.0",
    SCALAR: "arrays/progress%2Fskipped/c",
}


def missing(folder, file):
    (folder / file).unlink()


def empty(folder, file):
    (folder / file).write_bytes(b"")


def cut_short(folder, file):
    (folder / file).write_bytes((folder / file).read_bytes()[:-3])


def longer(folder, file):
    (folder / file).write_bytes((folder / file).read_bytes() + b"\0")


def flipped(folder, file):
    data = bytearray((folder / file).read_bytes())
    data[0] ^= 4
    (folder / file).write_bytes(data)


def zeroed(folder, file):
    (folder / file).write_bytes(bytes(len((folder / file).read_bytes())))


def swapped(folder, file):
    """In its place lies another one, which is sound in itself."""
    shutil.copy(folder / OTHER[file], folder / file)


PROBLEM = {
    missing: "is missing",
    empty: "has 0 bytes, |is cut short",
    cut_short: "has .* bytes, .* were written|is cut short",
    longer: "has .* bytes, .* were written|was changed|is cut short",
    flipped: "was changed|is not what was written|is cut short",
    zeroed: "is not what was written|is cut short",
    swapped: "is not what was written|has .* bytes|belongs to step 20",
}


@pytest.mark.parametrize("file", list(OTHER))
@pytest.mark.parametrize("damage", PROBLEM)
def test_damage_is_named(made, root, damage, file):
    folder = root / "step_00000030"
    damage(folder, file)
    for look in (verify, lambda folder: restore(folder, made[1])):
        with pytest.raises(DamagedCheckpoint, match=PROBLEM[damage]) as caught:
            look(folder)
        error = caught.value
        assert (error.step, error.file, error.before) == (30, file, 20)
        assert str(error).startswith(f"{folder} is damaged: {file} ")
        assert "the last complete step before it is 20" in str(error)
    if (damage, file) not in [(flipped, CHUNK), (flipped, SCALAR)]:
        with pytest.raises(DamagedCheckpoint):
            verify(folder, quick=True)


def test_every_file_of_a_step_is_looked_at(made, root):
    """So no kind of file is forgotten above: whichever one is changed, it is named."""
    folder = root / "step_00000030"
    verify(folder)
    files = files_of(folder)
    assert len(files) > 20
    for file in files:
        whole = (folder / file).read_bytes()
        flipped(folder, file)
        with pytest.raises(DamagedCheckpoint) as caught:
            verify(folder)
        assert caught.value.file == file
        (folder / file).write_bytes(whole)
    verify(folder)


def test_the_step_to_go_back_to_is_whole_itself(made, root):
    missing(root / "step_00000030", CHUNK)
    missing(root / "step_00000020", METADATA)
    assert complete_before(root / "step_00000030") == 10
    (root / "step_00000025").mkdir()
    (root / ".unfinished-00000026-ab").mkdir()
    (root / "step_00000010" / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint, match="no complete step is before it") as caught:
        verify(root / "step_00000030")
    assert caught.value.before is None


def test_what_is_not_read_is_not_in_the_way(made, root):
    """Weights can be had from a step whose optimizer state is lost."""
    folder = root / "step_00000030"
    shutil.rmtree(folder / "arrays" / "optimizer%2F0%2Fmu%2Fw")
    zero = jzero.Zero(stage=0, mesh=mesh(1))
    base = zero.init(init, optax.sgd(0.1))
    state = restore(folder, zero.setup, parts=("params",), base=base).state
    assert np.any(np.asarray(state.params["w"]))


def test_files_that_are_not_ours_do_no_harm(root):
    folder = root / "step_00000030"
    (folder / ".DS_Store").write_text("?")
    (folder / "arrays" / "params%2Fw" / "note.txt").write_text("?")
    verify(folder)
