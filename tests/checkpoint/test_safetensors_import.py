"""Into a checkpoint: what was exported comes back, and what does not fit the model is named."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh
from weights import NAMES, STACK, save, values_in

import jzero
from jzero.checkpoint import Reader, export_safetensors, import_safetensors, manifest
from jzero.checkpoint.safetensors import folder
from jzero.checkpoint.safetensors.file import Spec, create
from jzero.errors import JzeroError


def model(dtype="float32"):
    def init(key):
        return {
            "embed": jnp.zeros((6, 4)),
            "layers": {"w": jnp.zeros((3, 4, 8)), "norm": jnp.zeros((3, 4))},
            "heads": [{"w": jnp.zeros((4, 2, 2))}],
            "table": jnp.zeros(5, jnp.int32),
        }

    mesh = AbstractMesh((1,), ("data",))
    zero = jzero.Zero(precision={"float32": "fp32", "bfloat16": "bf16"}[dtype], mesh=mesh)
    return zero.setup_for(init, optax.adam(1e-3), trainable=lambda path: "layers" in path)


@pytest.fixture
def theirs(tmp_path):
    """An export with a name map, in several files."""
    save(tmp_path / "run")
    out = tmp_path / "theirs"
    export_safetensors(tmp_path / "run", out, name_map=NAMES, max_shard_bytes=200)
    return out


def change(out, changes):
    """Writes the tensors again with some changed, or None to leave one out, in one file."""
    values = {**values_in(out), **changes}
    values = {name: np.asarray(x) for name, x in values.items() if x is not None}
    for path in out.iterdir():
        path.unlink()
    specs = {name: Spec(x.shape, x.dtype.name) for name, x in values.items()}
    for name, place in create(out / folder.ONE, specs).items():
        place.write(values[name])


def test_an_import_is_what_was_exported(tmp_path, theirs):
    done = import_safetensors(theirs, tmp_path / "again", model(), name_map=NAMES)
    held = manifest.read(done.folder)
    assert done.folder == tmp_path / "again" / "step_00000000"
    assert held.facts.source == f"imported from {theirs}"
    reader = Reader(done.folder, held)
    assert set(held.leaves) == {name for name in STACK if name.startswith("params/")}
    for name in held.leaves:
        np.testing.assert_array_equal(reader.region(name), STACK[name], err_msg=name)
    # norms were bfloat16; all that is trained is kept in fp32.
    assert held.leaves["params/layers/norm"].dtype == "float32"
    assert (done.leaves, dict(done.cast)) == (5, {("bfloat16", "float32"): 3})


def test_what_is_not_trained_is_kept_in_the_compute_dtype(tmp_path, theirs):
    done = import_safetensors(theirs, tmp_path / "again", model("bfloat16"), name_map=NAMES)
    leaves = manifest.read(done.folder).leaves
    assert leaves["params/embed"].dtype == "bfloat16"
    assert leaves["params/layers/w"].dtype == "float32"


def test_one_of_tied_tensors_is_enough_and_others_must_be_equal(tmp_path, theirs):
    change(theirs, {"head.weight": None, "layers.0.inv_freq": np.zeros(2, np.float32)})
    done = import_safetensors(theirs, tmp_path / "a", model(), name_map=NAMES)
    assert done.left_out == ("layers.0.inv_freq",)
    other = STACK["params/embed"] + 1
    change(theirs, {"head.weight": other})
    with pytest.raises(
        JzeroError, match="head.weight differs from tokens.weight, but embed is both"
    ):
        import_safetensors(theirs, tmp_path / "b", model(), name_map=NAMES)
    change(theirs, {"tokens.weight": None})
    done = import_safetensors(theirs, tmp_path / "c", model(), name_map=NAMES)
    read = Reader(done.folder, manifest.read(done.folder)).region("params/embed")
    np.testing.assert_array_equal(read, other)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"layers.1.w": None}, "the model needs layers.1.w, which the files do not have"),
        ({"bias": np.zeros(3)}, "the files have bias, which no leaf takes"),
        (
            {"layers.1.w": np.zeros((4, 8), np.float32)},
            r"layers.1.w is \[4, 8\] for \[8, 4\] of layers/w",
        ),
        ({"table": np.zeros(5, np.float32)}, "table is float32 for int32 of table"),
        ({"layers.1.w": np.zeros((8, 4), np.int8)}, "layers.1.w is int8 for float32 of layers/w"),
    ],
)
def test_tensors_that_do_not_fit_the_model_are_named(tmp_path, theirs, changes, message):
    change(theirs, changes)
    with pytest.raises(JzeroError, match=message):
        import_safetensors(theirs, tmp_path / "again", model(), name_map=NAMES)
    assert not (tmp_path / "again").exists()


def test_an_import_goes_where_no_checkpoint_is(tmp_path, theirs):
    with pytest.raises(JzeroError, match=r"run: has checkpoints \(step 3\); give a new folder"):
        import_safetensors(theirs, tmp_path / "run", model(), name_map=NAMES)
