"""Safetensors files: what is written can be read elsewhere, and what is wrong is never read."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh

import jzero
from jzero.checkpoint import (
    DamagedCheckpoint,
    Facts,
    Reader,
    chunks,
    export_safetensors,
    import_safetensors,
    manifest,
    write_leaves,
)
from jzero.checkpoint.safetensors import folder
from jzero.checkpoint.safetensors.file import DTYPES, Spec, create, read_header
from jzero.checkpoint.safetensors.name_map import load
from jzero.checkpoint.safetensors.pieces import left_out, pieces
from jzero.errors import JzeroError


def numbers(shape, dtype, start=0):
    count = int(np.prod(shape))
    return (np.arange(start, start + count) % 50).reshape(shape).astype(jnp.dtype(dtype))


@pytest.fixture
def file(tmp_path):
    """A file with a matrix, a scalar and a tensor without elements."""
    values = {"w": numbers((3, 5), "bfloat16"), "z": numbers((), "float32", 7)}
    values["none"] = numbers((0, 4), "float32")
    path = tmp_path / "model.safetensors"
    places = create(path, {name: Spec(x.shape, x.dtype.name) for name, x in values.items()})
    for name, x in values.items():
        places[name].write(x)
    return path, values


def rewrite(path, change):
    """Changes a file's header as Python data; its tensors stay as they are."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    text = change(json.loads(data[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


# --- one file


def test_values_come_back(file):
    path, values = file
    found = read_header(path)
    assert found.keys() == values.keys()
    for name, x in values.items():
        read = found[name].read()
        assert read.dtype == x.dtype and read.shape == x.shape
        assert read.tobytes() == x.tobytes()
    assert all(tensor.offset % tensor.read().itemsize == 0 for tensor in found.values())


def test_values_of_another_shape_or_dtype_are_not_written(file):
    path, values = file
    place = read_header(path)["w"]
    for wrong in (values["w"].T, values["w"].astype(np.float16)):
        with pytest.raises(ValueError, match="w: .* is not"):
            place.write(wrong)


@pytest.mark.parametrize("code", DTYPES)
def test_every_dtype_is_what_the_library_takes_it_for(tmp_path, code):
    library = pytest.importorskip("safetensors", reason="the safetensors library is not installed")
    x = numbers((2, 3), DTYPES[code])
    place = create(tmp_path / "x", {"x": Spec(x.shape, x.dtype.name)})["x"]
    place.write(x)
    [(name, entry)] = library.deserialize((tmp_path / "x").read_bytes())
    assert (name, entry["dtype"], entry["shape"]) == ("x", code, [2, 3])
    assert bytes(entry["data"]) == x.tobytes()


def test_what_the_library_writes_is_read(tmp_path):
    library = pytest.importorskip(
        "safetensors.numpy", reason="the safetensors library is not installed"
    )
    values = {"a": numbers((2, 3), "float32"), "b": numbers((5,), "int8"), "c": np.float16(3)}
    values["c"] = np.asarray(values["c"])
    library.save_file(values, tmp_path / "x.safetensors", metadata={"who": "me"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: x.read().tolist() for name, x in found.items()} == {
        name: x.tolist() for name, x in values.items()
    }


def test_a_dtype_that_the_format_has_not_is_refused(tmp_path):
    with pytest.raises(JzeroError, match="w is int4, which safetensors files cannot hold"):
        create(tmp_path / "x", {"w": Spec((2,), "int4")})


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda h: {**h, "w": {**h["w"], "data_offsets": [0, 30]}}, "w begins over the tensor"),
        (lambda h: {**h, "w": {**h["w"], "data_offsets": [8, 38]}}, "w begins after a gap"),
        (lambda h: {n: t for n, t in h.items() if n != "w"}, "of which 30 are no one's"),
        (
            lambda h: {**h, "w": {**h["w"], "shape": [3, 4]}},
            r"w has 30 bytes, but BF16 \[3, 4\] is 24",
        ),
        (lambda h: {**h, "w": {**h["w"], "shape": [-3, -5]}}, "are not whole numbers"),
        (lambda h: {**h, "w": {**h["w"], "dtype": "F4"}}, "w is 'F4'; readable are F64, F32"),
        (lambda h: {**h, "w": {"dtype": "BF16"}}, "w has no dtype, shape and data_offsets"),
        (lambda h: [], "its header is not an object"),
        (lambda h: b'{"w": 1, "w": 2}', "it names 'w' twice"),
        (lambda h: b"{", "is not a safetensors file"),
        (lambda h: b"\xff", "is not a safetensors file"),
        (lambda h: b"[" * 100_000, "is not a safetensors file"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(file, change, message):
    path, _ = file
    rewrite(path, change)
    with pytest.raises(JzeroError, match=f"{path}.*{message}"):
        read_header(path)


@pytest.mark.parametrize(
    "size, message", [(3, "is not a"), (20, "header alone"), (-1, "cut short")]
)
def test_a_file_that_is_cut_short_is_refused(file, size, message):
    path, _ = file
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(JzeroError, match=f"{path}: .*{message}"):
        read_header(path)


def test_a_file_with_more_than_its_tensors_is_refused(file):
    path, _ = file
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(JzeroError, match="of which 1 are no one's"):
        read_header(path)


# --- a folder


def make(tmp_path, most, shapes):
    (tmp_path / "m").mkdir()
    specs = {name: Spec(shape, "float32") for name, shape in shapes.items()}
    for start, (name, place) in enumerate(folder.create_files(tmp_path / "m", specs, most).items()):
        place.write(numbers(specs[name].shape, "float32", start))
    return tmp_path / "m"


LAYERS = {f"layers.{n}.w": (10,) for n in range(12)}


def test_several_files_have_an_index(tmp_path):
    at = make(tmp_path, 160, LAYERS)
    index = json.loads((at / folder.INDEX).read_text())
    assert index["metadata"] == {"total_size": 480}
    files = [f"model-{n:05}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(path.name for path in at.iterdir()) == [*files, folder.INDEX]
    assert list(index["weight_map"]) == list(LAYERS)
    assert [index["weight_map"][f"layers.{n}.w"] for n in (0, 3, 4, 11)] == [
        files[0], files[0], files[1], files[2],
    ]  # fmt: skip
    assert folder.find([at]).keys() == folder.find([at / folder.INDEX]).keys() == LAYERS.keys()
    assert folder.find([at / name for name in files]).keys() == LAYERS.keys()


def test_a_tensor_larger_than_a_file_has_one_to_itself(tmp_path):
    at = make(tmp_path, 50, {"a": (10,), "b": (1000,), "c": (10,)})
    assert len(list(at.glob("*.safetensors"))) == 3


def test_one_file_has_no_index(tmp_path):
    at = make(tmp_path, 480, LAYERS)
    assert [path.name for path in at.iterdir()] == [folder.ONE]
    assert folder.find([at]).keys() == LAYERS.keys()


def missing(at):
    (at / "model-00002-of-00003.safetensors").unlink()


def elsewhere(at):
    index = at / folder.INDEX
    index.write_text(index.read_text().replace("model-00001", "../m/model-00001"))


def no_index(at):
    (at / folder.INDEX).write_text('{"weight_map": []}')


def both(at):
    (at / "model-00001-of-00003.safetensors").rename(at / folder.ONE)


def several_without_an_index(at):
    (at / folder.INDEX).unlink()


def pickles(at):
    for path in at.iterdir():
        path.unlink()
    (at / "pytorch_model-00001-of-00002.bin").write_bytes(b"\x80\x04")


def nothing(at):
    for path in at.iterdir():
        path.unlink()


@pytest.mark.parametrize(
    "break_it, message",
    [
        (missing, "index.json: names model-00002-of-00003.safetensors, which is missing"),
        (elsewhere, "index.json: names '../m/model-00001.*', which is not a file beside it"),
        (no_index, "index.json: is not an index"),
        (both, "has both model.safetensors and model.safetensors.index.json"),
        (several_without_an_index, "3 .safetensors files, but no model.safetensors.index.json"),
        (pickles, "00002.bin: is a pickle, which can run code .*; convert it to safetensors"),
        (nothing, "has no .safetensors files"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(tmp_path, break_it, message):
    at = make(tmp_path, 160, LAYERS)
    break_it(at)
    with pytest.raises(JzeroError, match=message):
        folder.find([at])


def test_an_index_that_names_a_tensor_in_another_file_is_refused(tmp_path):
    at = make(tmp_path, 160, LAYERS)
    first, second = (at / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(JzeroError, match="says that layers.4.w is in model-00002.*but it is not"):
        folder.find([at])


def test_a_name_in_two_files_and_a_pickle_by_name_are_refused(tmp_path, file):
    path, _ = file
    again = tmp_path / "again.safetensors"
    again.write_bytes(path.read_bytes())
    with pytest.raises(JzeroError, match=f"is in both {path} and {again}"):
        folder.find([path, again])
    (tmp_path / "x.bin").write_bytes(b"")
    with pytest.raises(JzeroError, match="x.bin: is a pickle"):
        folder.find([tmp_path / "x.bin"])
    with pytest.raises(JzeroError, match="nowhere: no such file or folder"):
        folder.find([Path("nowhere")])


# --- a name map

LEAVES = {"embed": (6, 4), "layers/w": (3, 4, 8), "layers/norm": (3, 4), "heads/0/w": (4, 2, 2)}
RULES = [
    {"ours": "embed", "theirs": ["tokens.weight", "head.weight"]},
    {"ours": "layers/w", "theirs": "layers.{layer}.w", "transpose": True},
    {"ours": "layers/norm", "theirs": "layers.{layer}.norm"},
    {"ours": "heads/{n}/w", "theirs": "head{n}", "reshape": [4, 4], "transpose": [1, 0]},
    {"ours": None, "theirs": "layers.{layer}.inv_freq"},
]


def test_leaves_are_cut_and_turned_and_put_together_again():
    found = {piece.theirs[0]: piece for piece in pieces(RULES, LEAVES)}
    assert {name: piece.their_shape for name, piece in found.items()} == {
        "tokens.weight": (6, 4),
        **{f"layers.{n}.w": (8, 4) for n in range(3)},
        **{f"layers.{n}.norm": (4,) for n in range(3)},
        "head0": (4, 4),
    }
    assert found["tokens.weight"].theirs == ("tokens.weight", "head.weight")
    ours = numbers((4, 8), "float32")
    theirs = found["layers.1.w"].to_theirs(ours)
    np.testing.assert_array_equal(theirs, ours.T)
    np.testing.assert_array_equal(found["layers.1.w"].to_ours(theirs), ours)
    assert (found["layers.1.w"].leaf, found["layers.1.w"].index) == ("layers/w", (1,))
    ours = numbers((4, 2, 2), "float32")
    theirs = found["head0"].to_theirs(ours)
    np.testing.assert_array_equal(theirs, ours.reshape(4, 4).T)
    np.testing.assert_array_equal(found["head0"].to_ours(theirs), ours)


def test_an_order_of_three_dimensions_turns_back():
    rule = {"ours": "k", "theirs": "k", "transpose": [2, 0, 1]}
    [piece] = pieces([rule], {"k": (2, 3, 4)})
    ours = numbers((2, 3, 4), "float32")
    assert piece.to_theirs(ours).shape == piece.their_shape == (4, 2, 3)
    np.testing.assert_array_equal(piece.to_ours(piece.to_theirs(ours)), ours)


def test_without_a_map_names_and_shapes_are_jzeros_own():
    assert [(p.theirs, p.their_shape) for p in pieces(None, LEAVES)] == [
        ((leaf,), shape) for leaf, shape in LEAVES.items()
    ]


def test_experts_of_layers_are_counted_by_two_words():
    rule = {"ours": "w", "theirs": "layers.{layer}.experts.{expert}.w", "transpose": True}
    found = pieces([rule], {"w": (2, 3, 4, 5)})
    assert [p.theirs[0] for p in found][::5] == ["layers.0.experts.0.w", "layers.1.experts.2.w"]
    assert {p.their_shape for p in found} == {(5, 4)}


def test_leaves_and_tensors_can_be_left_out():
    without = [*RULES[1:], {"ours": "embed", "theirs": None}]
    assert "embed" not in {piece.leaf for piece in pieces(without, LEAVES)}
    names = ["layers.2.inv_freq", "layers.x.inv_freq", "layers.2.w"]
    assert left_out(RULES, LEAVES, names) == {"layers.2.inv_freq"}


@pytest.mark.parametrize(
    "rules, message",
    [
        (RULES[1:], "no rule for embed; to leave a leaf out give it null as `theirs`"),
        (
            [*RULES, {"ours": "bias", "theirs": "bias"}],
            "'bias' is not a leaf; there are embed, layers/w, layers/norm, heads/0/w",
        ),
        ([*RULES, {"ours": "embed", "theirs": "e"}], "two rules are for the leaf 'embed'"),
        (
            [{"ours": "embed", "theirs": "layers.1.norm"}, *RULES[1:]],
            "'layers.1.norm' is given twice, for 'embed' and 'layers/norm'",
        ),
        (
            [{**RULES[0], "reshape": [5, 5]}, *RULES[1:]],
            r"embed: \[6, 4\] cannot be reshaped to \[5, 5\]",
        ),
        (
            [{**RULES[0], "transpose": [0, 2]}, *RULES[1:]],
            r"embed: transpose \[0, 2\] is no order of the dimensions of \[6, 4\]",
        ),
        (
            [*RULES[:2], {**RULES[2], "transpose": True}, *RULES[3:]],
            r"layers/norm: \[4\] has no two dimensions to swap",
        ),
        (
            [{"ours": "embed", "theirs": "a.{b}.{c}.{d}"}, *RULES[1:]],
            r"embed has shape \[6, 4\]: no leading dimension for each of b, c, d",
        ),
        ([{"ours": "embed"}], "rule 1 is .*; give ours and theirs"),
        ([{**RULES[0], "permute": True}], "rule 1 is .*; give ours and theirs"),
        ([{"ours": 1, "theirs": "x"}], "rule 1: ours is a name or null"),
        ([{"ours": None, "theirs": None}], "rule 1: neither ours nor theirs is named"),
        ([{**RULES[0], "transpose": "yes"}], "rule 1: transpose is true, or the order"),
        ([{**RULES[0], "reshape": [-1, 4]}], "rule 1: reshape is a shape"),
        ([{"ours": "layers/{n}/w", "theirs": "w"}], "rule 1: 'layers/{n}/w' has words in braces"),
        ([{"ours": "e", "theirs": ["a.{n}", "b"]}], "rule 1: names that are tied have the same"),
        ({"embed": "tokens"}, "name map: dict; give a list of rules"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(rules, message):
    with pytest.raises(JzeroError, match=message):
        pieces(rules, LEAVES)


def test_a_map_from_a_file(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(RULES))
    assert pieces(load(str(tmp_path / "map.json")), LEAVES) == pieces(RULES, LEAVES)
    (tmp_path / "names.py").write_text(
        "def rules(leaves):\n"
        "    return [{'ours': leaf, 'theirs': leaf.upper()} for leaf in leaves]\n"
        "def broken(leaves):\n"
        "    raise KeyError('embed')\n"
    )
    found = pieces(load(f"{tmp_path}/names.py:rules"), LEAVES)
    assert [piece.theirs for piece in found] == [(leaf.upper(),) for leaf in LEAVES]
    with pytest.raises(JzeroError, match="names.py:broken raised KeyError: 'embed'"):
        pieces(load(f"{tmp_path}/names.py:broken"), LEAVES)
    with pytest.raises(JzeroError, match="names.py has no function 'other'"):
        load(f"{tmp_path}/names.py:other")
    with pytest.raises(JzeroError, match="no such file: .*none.json"):
        load(f"{tmp_path}/none.json")
    (tmp_path / "bad.json").write_text("[")
    with pytest.raises(JzeroError, match="bad.json: is not JSON"):
        load(f"{tmp_path}/bad.json")


# --- out of a checkpoint

STACK = {
    "params/embed": numbers((6, 4), "float32"),
    "params/layers/w": numbers((3, 4, 8), "float32", 3) / 7,
    "params/layers/norm": numbers((3, 4), "bfloat16", 1),
    "params/heads/0/w": numbers((4, 2, 2), "float32"),
    "params/table": numbers((5,), "int32"),
    "optimizer/0/mu/embed": numbers((6, 4), "float32"),
}
NAMES = [*RULES, {"ours": "table", "theirs": "table"}]


def save(root, leaves=STACK, step=3, **facts):
    """A step folder with these arrays."""
    arrays = [(name, x.shape, x.dtype.name, x) for name, x in leaves.items()]
    return write_leaves(root, step, arrays, Facts(**facts))


def values_in(out):
    return {name: np.asarray(tensor.read()) for name, tensor in folder.find([out]).items()}


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


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    save(tmp_path / "run")

    def full(self, values):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jzero.checkpoint.safetensors.file.Tensor.write", full)
    with pytest.raises(OSError, match="No space left"):
        export_safetensors(tmp_path / "run", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# --- into a checkpoint


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
