"""Arrays in files: written with a bound on memory, read by region, whole or not at all."""

import itertools
import math
import resource
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from states import files_of

from jzero import JzeroError
from jzero.checkpoint import Facts, draft, folders, manifest, pieces, write_leaves
from jzero.checkpoint.files import chunk_entry, write_text
from jzero.checkpoint.store import Reader
from jzero.checkpoint.window import windowed
from jzero.errors import RunFailed

DTYPES = (
    "float32 bfloat16 float16 float64 int8 int32 int64 uint8 uint32 bool int4 uint4 int2 "
    "complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3 float8_e8m0fnu float4_e2m1fn"
).split()


def bits(shape, dtype, seed=0):
    rng, dtype = np.random.default_rng(seed), jnp.dtype(dtype)
    if dtype == np.bool_:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.name in ("int4", "uint4", "int2", "float4_e2m1fn"):
        return rng.integers(0, 2, shape).astype(dtype)
    data = rng.bytes(math.prod(shape) * dtype.itemsize)
    return np.frombuffer(data, dtype).reshape(shape)


def make(root, leaves, step=1, **options):
    """A step folder of arrays by name, and its reader."""
    host = ((name, x.shape, str(x.dtype), x) for name, x in leaves.items())
    folder = write_leaves(root, step, host, Facts(source="a test"), **options)
    return Reader(folder, manifest.read(folder))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    leaves = {"many": bits((5, 3), dtype), "one": bits((), dtype), "none": bits((0, 2), dtype)}
    reader = make(tmp_path, leaves)
    for name, x in leaves.items():
        found = reader.region(name)
        assert (found.shape, found.dtype) == (x.shape, x.dtype)
        assert found.tobytes() == x.tobytes()


def test_regions(tmp_path):
    x = bits((50, 7), "float32")
    reader = make(tmp_path, {"x": x})
    for rows, columns in itertools.product(
        [(0, 50), (13, 14), (7, 30), (49, 50)], [(0, 7), (2, 5)]
    ):
        index = slice(*rows), slice(*columns)
        assert np.array_equal(reader.region("x", index).view(np.uint32), x[index].view(np.uint32))


def test_zeros_are_written(tmp_path):
    """A chunk that is not there is damage, never zeros."""
    reader = make(tmp_path, {"x": np.zeros((4, 3), np.float32)})
    assert files_of(reader.folder)["arrays/x/c.0.0"] == 4 * 3 * 4 + 4


def test_other_programs_can_read_the_arrays(tmp_path):
    for step, dtype in enumerate(["bfloat16", "complex128"]):
        x = bits((50, 7), dtype)
        folder = make(tmp_path, {"params/a b%": x}, step).folder / "arrays" / "params%2Fa%20b%25"
        array = ts.open(
            {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(folder)}}
        ).result()
        assert array.dtype.name == dtype
        assert array.read().result().tobytes() == x.tobytes()


def test_names(tmp_path):
    """Any text is a leaf's name, long ones that begin alike too."""
    names = [
        "",
        ".",
        "..",
        "a/b",
        "a%2Fb",
        "ä",
        "x" * 300,
        "x" * 299 + "y",
        "a\\b",
        "c.0",
        "\ud800",
    ]
    leaves = {f"params/{name}": np.full(2, i) for i, name in enumerate(names)}
    reader = make(tmp_path, leaves)
    for name, x in leaves.items():
        assert np.array_equal(reader.region(name), x)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


class Job:
    """Counts what is held at once."""

    held = most = 0

    def __init__(self, size):
        self.size = size

    def start(self):
        Job.held += self.size
        Job.most = max(Job.most, Job.held)
        return self

    def result(self):
        return self


def test_work_in_flight_is_bounded():
    sizes = [30, 50, 10, 70, 200, 5, 5, 90]
    jobs = [Job(size) for size in sizes]
    for job, done in zip(jobs, windowed(((j.size, j.start) for j in jobs), 100), strict=True):
        assert done is job  # in order
        Job.held -= done.size
    assert Job.most == 200 and Job.held == 0


def test_what_an_interrupt_leaves_under_way_is_waited_for():
    """Else a file could come after its folder was taken away."""
    waited = []

    class Interrupted:
        def result(self):
            waited.append(self)
            if len(waited) == 1:
                raise KeyboardInterrupt

    first, second = Interrupted(), Interrupted()
    with pytest.raises(KeyboardInterrupt):
        list(windowed((50, lambda job=job: job) for job in (first, second)))
    assert waited == [first, first, second]


def test_leaves_may_be_made_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(windowed, "__defaults__", (1000,))
    alive = []

    def one(i):
        def make():
            alive.append(i)
            return np.full(200, i, np.float32)

        return make

    def leaves():
        for i in range(10):
            assert len(alive) >= i - 1  # none is made much before its turn
            yield f"x{i}", (200,), "float32", one(i)

    folder = write_leaves(tmp_path, 3, leaves(), Facts())
    reader = Reader(folder, manifest.read(folder))
    assert [reader.region(f"x{i}")[0] for i in range(10)] == list(range(10))


def test_host_arrays_that_are_not_what_they_were_said_to_be(tmp_path):
    x = np.zeros(3, np.float32)
    for shape, dtype, array in [((4,), "float32", x), ((3,), "bfloat16", lambda: x)]:
        with pytest.raises(JzeroError, match=r"w: expected .* found \(3,\) float32"):
            write_leaves(tmp_path, 1, [("w", shape, dtype, array)], Facts())
    with pytest.raises(JzeroError, match="two leaves are both named 'w'"):
        write_leaves(tmp_path, 1, [("w", (3,), "float32", x)] * 2, Facts())
    assert list(tmp_path.iterdir()) == []


def test_keys_are_given_as_their_data(tmp_path):
    key = jax.random.split(jax.random.key(1, impl="rbg"), 3)
    data = np.asarray(jax.random.key_data(key))
    folder = write_leaves(tmp_path, 1, [("k", (3,), str(key.dtype), data)], Facts())
    whole = manifest.read(folder)
    assert (whole.leaves["k"].shape, whole.leaves["k"].bytes) == ((3,), 48)
    assert np.array_equal(Reader(folder, whole).region("k"), data)


def test_a_step_that_is_there_is_replaced_only_if_asked(tmp_path):
    make(tmp_path, {"x": np.zeros(3)})
    with pytest.raises(JzeroError, match="is there already; save with overwrite=True"):
        make(tmp_path, {"x": np.ones(3)})
    assert make(tmp_path, {"x": np.ones(3)}, overwrite=True).region("x")[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize("moment", ["arrays", "manifest", "publish"])
def test_killed_while_writing(tmp_path, monkeypatch, moment):
    """Nothing of the step is seen, and it can be written again."""
    make(tmp_path, {"x": np.zeros(3)}, step=1)
    place = {
        "arrays": (pieces, "chunk_entry"),
        "manifest": (manifest, "write_text"),
        "publish": (folders, "sync"),
    }
    with monkeypatch.context() as patch:
        patch.setattr(*place[moment], killed)
        patch.setattr(draft.shutil, "rmtree", lambda *args, **options: None)
        with pytest.raises(Killed):
            make(tmp_path, {"x": np.ones(3)}, step=2)
    assert folders.published(tmp_path) == [1]
    assert len(list(tmp_path.iterdir())) == 2
    assert make(tmp_path, {"x": np.ones(3)}, step=2).region("x")[0] == 1
    folders.sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


class Killed(BaseException):
    pass


def killed(*args):
    raise Killed


def test_a_folder_that_vanishes_meanwhile(tmp_path, monkeypatch):
    root = tmp_path / "checkpoints"

    def vanish(path, text):
        shutil.rmtree(root)
        return write_text(path, text)

    monkeypatch.setattr(manifest, "write_text", vanish)
    with pytest.raises(RunFailed, match="step 2 was not saved below .*: the folder is gone"):
        make(root, {"x": np.zeros(3)}, step=2)
    assert not root.exists()


def test_pieces_that_vanish_meanwhile(tmp_path, monkeypatch):
    """What is published was there a moment before, every file of it."""

    def lose(path):
        found = chunk_entry(path)
        path.unlink()
        return found

    monkeypatch.setattr(pieces, "chunk_entry", lose)
    with pytest.raises(RunFailed, match="step 2 was not saved below .*: arrays/x/c.0 is missing"):
        make(tmp_path, {"x": np.zeros(3)}, step=2)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full(tmp_path):
    """Nothing is published or left behind, and the error says why, in the system's words."""
    make(tmp_path, {"x": np.zeros(3)}, step=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        with pytest.raises(RunFailed) as caught:
            make(tmp_path, {"x": np.zeros(3), "y": np.zeros(1000), "z": np.zeros(3)}, step=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert str(caught.value) == f"step 2 was not saved below {tmp_path}: File too large"
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_folder_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFailed, match="step 1 was not saved below .*file: Not a directory"):
        make(tmp_path / "file", {"x": np.zeros(3)})
