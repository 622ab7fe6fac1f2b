"""A file of DeepSpeed's can run nothing and read no other file, and is whole or refused."""

import functools
import os
import pickle
import random
import shutil
import subprocess
import zipfile
from collections import OrderedDict

import numpy as np
import pytest

from jzero.checkpoint.deepspeed.archive import Tensor
from jzero.checkpoint.deepspeed.pickles import Record, load
from jzero.errors import JzeroError


def save(path, pickled: bytes, compression=zipfile.ZIP_STORED, **storages: bytes):
    """A file as torch.save lays it out."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/byteorder", b"little")
        for name, data in storages.items():
            archive.writestr(f"archive/data/{name.removeprefix('_')}", data)
    return path


class Calls:
    """Pickled as a call."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


EVIL = [
    (os.system, ("touch {}",), "system"),
    (eval, ("open('{}', 'w')",), "eval"),
    (exec, ("open('{}', 'w')",), "exec"),
    (open, ("{}", "w"), "open"),
    (subprocess.check_output, (["touch", "{}"],), "check_output"),
    (getattr, ({}, "pop"), "getattr"),
    (functools.partial, (print,), "partial"),
    (OrderedDict.fromkeys, ([1],), "getattr|fromkeys"),
]


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("function, args, named", EVIL, ids=[named for *_, named in EVIL])
def test_a_name_that_is_not_on_the_list_is_refused_and_nothing_runs(
    tmp_path, function, args, named, protocol
):
    canary = tmp_path / "canary"
    args = [arg.format(canary) if isinstance(arg, str) else arg for arg in args]
    content = {"module": OrderedDict(a=[{"deep": Calls(function, *args)}])}
    path = save(tmp_path / "evil.pt", pickle.dumps(content, protocol=protocol))
    with pytest.raises(JzeroError, match=rf"evil.pt: its pickle names \S*({named}), .*the list"):
        load(path)
    assert not canary.exists()


FLOATS = b"ctorch\nFloatStorage\n"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
RECORD = b"cdeepspeed.utils.tensor_fragment\nfragment_address\n"


def storage(key=b"S'0'\n", size=b"I4\n", kind=FLOATS) -> bytes:
    return b"(S'storage'\n" + kind + key + b"S'cpu'\n" + size + b"tQ"


def tensor(held=None, start=b"I0\n", shape=b"(I2\nI2\nt", strides=b"(I2\nI1\nt") -> bytes:
    return REBUILD + b"(" + (held or storage()) + start + shape + strides + b"I00\n(dtR"


def test_a_tensor_is_mapped_from_its_file(tmp_path):
    values = np.arange(4, dtype=np.float32)
    column = tensor(start=b"I1\n", shape=b"(I2\nt", strides=b"(I2\nt")
    pickled = b"(l" + tensor() + b"a" + column + b"a."
    whole, part = load(save(tmp_path / "good.pt", pickled, _0=values.tobytes()))
    np.testing.assert_array_equal(whole.read(), values.reshape(2, 2))
    np.testing.assert_array_equal(part.read(), values[1::2])
    assert not whole.read().flags.writeable


HARMFUL = {
    "a tensor beyond its storage": tensor(start=b"I1\n"),
    "a tensor larger than its storage": tensor(shape=b"(I9999\nI9999\nt", strides=b"(I0\nI0\nt"),
    "strides below zero": tensor(start=b"I3\n", strides=b"(I-2\nI-1\nt"),
    "as many strides as dimensions": tensor(strides=b"(I1\nt"),
    "a storage longer than its member": tensor(storage(size=b"I400\n")),
    "a storage that is missing": tensor(storage(key=b"S'1'\n")),
    "a storage elsewhere": tensor(storage(key=b"S'../../data.pkl'\n")),
    "a storage of no dtype": tensor(storage(kind=b"S'object'\n")),
    "a storage without a description": b"S'0'\nQ",
    # A pickle may set attributes of what it made; not these, which say where to read.
    "a tensor sent to another file": tensor() + b"(dS'storage'\nNsb",
    "a storage sent to another file": storage() + b"(dS'file'\nS'/etc/passwd'\nsb",
    "a function given attributes": REBUILD + b"(dS'run'\nNsb",
    "a class given attributes": RECORD + b"(dS'size'\nNsb",
    "slots of an object": RECORD + b"(tR(N(dS'x'\nNstb",
    "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\xff",
    "a list that ends nowhere": b"(lp0\n(",
    "calling a number": b"I1\n(tR",
}


@pytest.mark.parametrize("harm", HARMFUL)
def test_a_pickle_that_is_not_torchs_is_refused(tmp_path, harm):
    path = save(tmp_path / "bad.pt", HARMFUL[harm] + b".", _0=bytes(16))
    with pytest.raises(JzeroError, match="bad.pt: its pickle is damaged"):
        load(path)


def test_objects_are_records_and_shadow_nothing(tmp_path):
    record = RECORD + b"(tR(dS'start'\nI3\nsb"
    shadowed = b"ccollections\nOrderedDict\n(tR(dS'items'\nNsb"
    found, mapping = load(save(tmp_path / "good.pt", b"(l" + record + b"a" + shadowed + b"a."))
    assert isinstance(found, Record) and vars(found) == {"start": 3}
    assert list(mapping.items()) == []


@pytest.mark.parametrize(
    "damage, says",
    [
        (lambda path, data: path.write_bytes(data[: len(data) // 2]), "not a zip file"),
        (lambda path, data: path.write_bytes(b""), "not a zip file"),
        (lambda path, data: path.write_bytes(pickle.dumps(1, 2)), "before PyTorch 1.6"),
        (lambda path, data: save(path, b"N.", zipfile.ZIP_DEFLATED), "data.pkl is compressed"),
        (lambda path, data: zipfile.ZipFile(path, "w").close(), "has no data.pkl"),
        (lambda path, data: path.write_bytes(data.replace(b"little", b"big!!!")), "Bad CRC"),
    ],
)
def test_a_file_that_is_not_whole_is_refused(saves, tmp_path, damage, says):
    path = tmp_path / "rank.pt"
    shutil.copy(saves / "stage1/step4/mp_rank_00_model_states.pt", path)
    damage(path, path.read_bytes())
    with pytest.raises(JzeroError, match=rf"rank.pt: cannot be read as a file of .*{says}"):
        load(path)


def test_a_member_whose_checksum_is_of_nothing_is_refused(saves, tmp_path):
    """A zip that says a member has no bytes, of which one is changed."""
    path = tmp_path / "rank.pt"
    shutil.copy(saves / "stage1/step4/mp_rank_00_model_states.pt", path)
    with zipfile.ZipFile(path) as archive:
        info = next(x for x in archive.infolist() if "/data/" in x.filename and x.file_size > 16)
    data = bytearray(path.read_bytes())
    entry = data.rindex(info.filename.encode()) - 46  # in the list at the end
    data[entry + 16 : entry + 24] = bytes(8)  # the checksum and the length as stored
    data[info.header_offset + 14 : info.header_offset + 22] = bytes(8)
    path.write_bytes(data)
    with pytest.raises(JzeroError, match=f"{info.filename} has two lengths"):
        load(path)


def plain(found):
    """What was loaded, comparable, with the values of tensors."""
    if isinstance(found, dict):
        return {key: plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [plain(value) for value in found]
    if isinstance(found, Tensor):
        return found.shape, found.dtype, found.read().tobytes()
    return vars(found) if isinstance(found, Record) else found


def test_no_flipped_byte_goes_unseen(saves, tmp_path):
    original = saves / "stage3_bf16/step4/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    want, data, seen = plain(load(original)), original.read_bytes(), 0
    choose, path = random.Random(0), tmp_path / "rank.pt"
    for _ in range(300):
        place = choose.randrange(len(data))
        changed = bytes([data[place] ^ choose.randrange(1, 256)])
        path.write_bytes(data[:place] + changed + data[place + 1 :])
        try:
            assert plain(load(path)) == want, place  # in what a zip says of times, or fills up with
        except JzeroError as error:
            assert str(path) in str(error)
            seen += 1
    assert seen > 200
