"""Out of a checkpoint: every parameter, under the names asked for, or nothing at all."""

import jax.numpy as jnp
import numpy as np
import pytest
from weights import NAMES, STACK, save, values_in

from jzero.checkpoint import (
    DamagedCheckpoint,
    Facts,
    Reader,
    chunks,
    export_safetensors,
    manifest,
    write_leaves,
)
from jzero.checkpoint.safetensors import folder
from jzero.cli import main
from jzero.errors import JzeroError


def test_every_parameter_is_exported_and_nothing_else(tmp_path):
    save(tmp_path / "run")
    done = export_safetensors(tmp_path / "run", tmp_path / "out")
    found = values_in(tmp_path / "out")
    assert found.keys() == {n.removeprefix("params/") for n in STACK if n.startswith("params/")}
    for name, x in found.items():
        assert x.dtype == STACK[f"params/{name}"].dtype
        np.testing.assert_array_equal(x, STACK[f"params/{name}"])
    assert (done.step, done.files, done.tensors) == (3, ("model.safetensors",), 5)
    assert done.bytes == sum(x.nbytes for x in found.values())


def test_what_a_model_needs_beside_parameters_is_named(tmp_path, capsys):
    """Batch statistics: an export that lost them in silence would give other results."""
    weights = {"params/w": np.ones((2, 3), np.float32)}
    count = np.array(4, np.uint32)
    others = {"variables/norm/mean": np.ones(3, np.float32), "variables/rngs/count": count}
    save(tmp_path / "run", weights | others)
    assert main(["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "not in it, since they are no parameters: norm/mean\n" in said


def test_an_export_has_their_names_and_shapes(tmp_path):
    save(tmp_path / "run")
    export_safetensors(tmp_path / "run", tmp_path / "out", name_map=NAMES, max_shard_bytes=200)
    assert (tmp_path / "out" / folder.INDEX).is_file()
    found = values_in(tmp_path / "out")
    np.testing.assert_array_equal(found["tokens.weight"], STACK["params/embed"])
    np.testing.assert_array_equal(found["head.weight"], STACK["params/embed"])
    for n in range(3):
        np.testing.assert_array_equal(found[f"layers.{n}.w"], STACK["params/layers/w"][n].T)
        np.testing.assert_array_equal(found[f"layers.{n}.norm"], STACK["params/layers/norm"][n])
    np.testing.assert_array_equal(found["head0"], STACK["params/heads/0/w"].reshape(4, 4).T)
    assert len(found) == 2 + 3 + 3 + 1 + 1


@pytest.mark.parametrize("layers", [1, 2])
def test_a_stack_is_read_by_the_chunk(tmp_path, monkeypatch, layers):
    monkeypatch.setattr(chunks.chunk_shape, "__defaults__", (layers * 64 * 128 * 4,))
    stack = np.random.default_rng(0).normal(size=(4, 64, 128)).astype(np.float32)
    at = save(tmp_path / "run", {"params/w": stack})
    assert manifest.read(at).leaves["params/w"].chunk == (layers, 64, 128)
    reads = []
    region = Reader.region
    monkeypatch.setattr(Reader, "region", lambda *a: reads.append(a[2][0]) or region(*a))
    rules = [{"ours": "w", "theirs": "{layer}.w", "transpose": True}]
    export_safetensors(tmp_path / "run", tmp_path / "out", name_map=rules)
    assert [part.stop - part.start for part in reads] == [layers] * (4 // layers)
    for name, x in values_in(tmp_path / "out").items():
        np.testing.assert_array_equal(x, stack[int(name[0])].T)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_exported_in_the_dtype_asked_for(tmp_path, dtype):
    save(tmp_path / "run")
    export_safetensors(tmp_path / "run", tmp_path / "out", dtype=dtype)
    for name, x in values_in(tmp_path / "out").items():
        before = STACK[f"params/{name}"]
        assert x.dtype == (before.dtype if name == "table" else jnp.dtype(dtype))
        np.testing.assert_array_equal(x, before.astype(x.dtype))


def test_a_weight_that_a_dtype_cannot_hold_is_refused(tmp_path):
    save(tmp_path / "run", {"params/w": np.array([1.0, -7e4, np.inf], np.float32)})
    with pytest.raises(JzeroError, match="w has 7e.04, beyond the largest float16, 65504"):
        export_safetensors(tmp_path / "run", tmp_path / "out", dtype="float16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export_safetensors(tmp_path / "run", tmp_path / "out", dtype="bfloat16")
    assert values_in(tmp_path / "out")["w"][2] == np.inf  # what is not finite stays so


def test_a_damaged_step_leaves_no_export_and_names_the_one_before(tmp_path):
    save(tmp_path / "run", step=1)
    at = save(tmp_path / "run", step=2)
    chunk = next((at / "arrays" / "params%2Flayers%2Fw").glob("c*"))
    data = bytearray(chunk.read_bytes())
    data[5] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(
        DamagedCheckpoint, match=f"layers%2Fw/{chunk.name}.*before it is 1"
    ) as error:
        export_safetensors(tmp_path / "run", tmp_path / "out")
    assert (error.value.step, error.value.before) == (2, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export_safetensors(tmp_path / "run", tmp_path / "out", step=1)


def test_a_tensor_has_not_the_name_of_a_files_notes(tmp_path):
    save(tmp_path / "run", {"params/w": np.zeros(3, np.float32)})
    rules = [{"ours": "w", "theirs": "__metadata__"}]
    with pytest.raises(JzeroError, match="'__metadata__' is no name for a tensor"):
        export_safetensors(tmp_path / "run", tmp_path / "out", name_map=rules)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_a_key_is_no_tensor(tmp_path):
    arrays = [("params/key", (), "key<fry>", np.zeros(2, np.uint32))]
    write_leaves(tmp_path / "run", 1, arrays, Facts())
    with pytest.raises(JzeroError, match="key is key<fry>, which safetensors files cannot hold"):
        export_safetensors(tmp_path / "run", tmp_path / "out")


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "run")

    def full(self, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jzero.checkpoint.safetensors.file.Tensor.write", full)
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
