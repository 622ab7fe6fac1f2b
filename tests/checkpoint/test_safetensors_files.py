"""Safetensors files: what is written can be read elsewhere, and what is wrong is never read."""

import json
from pathlib import Path

import numpy as np
import pytest
from weights import numbers

from jzero.checkpoint.safetensors import folder
from jzero.checkpoint.safetensors.file import DTYPES, Spec, create, read_header
from jzero.errors import JzeroError


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


@pytest.mark.parametrize("name", ["__metadata__", "\ud800"])
def test_a_name_that_the_format_has_not_is_refused(tmp_path, name):
    with pytest.raises(JzeroError, match="is no name for a tensor .* with a name map"):
        create(tmp_path / "x", {name: Spec((2,), "int8")})
    assert not (tmp_path / "x").exists()


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
