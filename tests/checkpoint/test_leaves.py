"""Every kind of leaf and every mesh: random bits go in, and come out of any layout unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from models import mesh
from states import assert_same, files_of, random_step, save, whole

import jzero
from jzero import checkpoint
from jzero.checkpoint import copies, manifest, restore
from jzero.checkpoint.snapshot import _piece_shape
from jzero.checkpoint.store import Reader


def init(key):
    """Odd shapes, every dtype that a leaf may have, and leaves without dims or elements."""
    low = jnp.bfloat16
    return {
        "embed": jnp.zeros((13, 10)),
        "layers": {"kernel": jnp.zeros((3, 7, 9)), "bias": jnp.zeros((3, 9))},
        "scalar": jnp.zeros(()),
        "empty": jnp.zeros((0, 4)),
        "frozen": {"table": jnp.zeros((11, 3), low), "flags": jnp.zeros(5, bool)},
        "ids": jnp.zeros((6, 2), jnp.int32),
        "bytes": jnp.zeros(3, jnp.uint8),
        "key": key,
        "no_keys": key[None][:0],
        "keys": jax.random.split(key, 3),
    }


def trainable(path):
    return not path.startswith("frozen")


def some(params):
    """A mask, and the labels of two transformations."""
    return {name: name in ("embed", "scalar") for name in params}


def labels(params):
    return {name: "a" if on else "b" for name, on in some(params).items()}


def two():
    return {"a": optax.adam(1e-3), "b": optax.sgd(0.1, momentum=0.9)}


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "nothing": lambda: optax.identity(),
    "sgd": lambda: optax.sgd(1e-3),  # only states without arrays
    "masked": lambda: optax.masked(optax.adam(1e-3), some),
    "multi_transform": lambda: optax.multi_transform(two(), labels),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=6, momentum=0.9),
    "muon": lambda: optax.contrib.muon(1e-3),
    "key": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.adam(1e-3)),
    "schedule": lambda: optax.adam(optax.linear_schedule(1e-3, 0.0, 10)),
}

# (stage, mesh sizes, axes) before and after.
LAYOUTS = [
    ((3, (8,), ("data",)), (1, (6,), ("data",))),
    ((1, (7,), ("data",)), (3, (2, 4), ("replica", "data"))),
    ((2, (4, 2), ("data", "replica")), (0, (3,), ("data",))),
    ((0, (8,), ("data",)), (3, (2, 3), ("data", "fsdp"))),
]


def make_zero(layout, precision="fp32", **keywords):
    stage, sizes, axes = layout
    return jzero.Zero(stage=stage, precision=precision, mesh=mesh(*sizes, names=axes), **keywords)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bits_go_through_two_layouts(optimizer, tmp_path):
    before, after = LAYOUTS[list(OPTIMIZERS).index(optimizer) % len(LAYOUTS)]
    tx, precision = OPTIMIZERS[optimizer](), "bf16" if optimizer in ("adamw", "muon") else "fp32"

    def zero_on(layout):
        zero = make_zero(layout, precision)
        zero.setup_for(init, tx, trainable=trainable)
        return zero

    first, second = zero_on(before), zero_on(after)
    folder, bits = random_step(tmp_path / "host", first)
    state = restore(folder, first.setup).state
    bits |= {name: x for name, x in whole(first, state).items() if "scale" in name}
    assert_same(whole(first, state), bits)
    assert_padding_is_zero(first, state)
    (tmp_path / "state").mkdir()
    folder = save(tmp_path / "state", first, state)
    checkpoint.verify(folder)
    assert_same(whole(second, restore(folder, second.setup).state), bits)
    saved = manifest.read(folder)
    assert {name: leaf.shape for name, leaf in saved.leaves.items() if not leaf.is_key} == {
        name: x.shape for name, x in bits.items() if not saved.leaves[name].is_key
    }


def assert_padding_is_zero(zero, state):
    for name, entry in checkpoint.entries(zero.setup, state).items():
        if entry.array.shape != entry.shape:
            stored = np.array(entry.array)
            stored[tuple(map(slice, entry.shape))] = 0
            assert not stored.any(), name


def test_the_compute_copy_is_the_master_cast(tmp_path):
    """It is not saved: it is made again, at stages 1 and 2 gathered and freed of padding."""
    for layout in ((0, (8,), ("data",)), (1, (7,), ("data",)), (2, (2, 3), ("replica", "data"))):
        zero = make_zero(layout, "bf16")
        zero.setup_for(init, optax.adamw(1e-3), trainable=trainable)
        folder, bits = random_step(tmp_path / str(layout[0]), zero)
        state = restore(folder, zero.setup).state
        for path in ("embed", "layers/kernel", "scalar"):
            want = bits[f"params/{path}"].astype(jnp.bfloat16)
            found = np.asarray(state.params[path])
            assert (found.shape, found.dtype) == (want.shape, want.dtype)
            assert found.tobytes() == want.tobytes()


def test_large_copies_are_gathered_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_BLOCK", 100)
    zero = make_zero((2, (7,), ("data",)), "bf16")
    zero.setup_for(init, optax.adamw(1e-3), trainable=trainable)
    folder, bits = random_step(tmp_path, zero)
    state = restore(folder, zero.setup).state
    for path in ("embed", "layers/kernel"):
        want = bits[f"params/{path}"].astype(jnp.bfloat16)
        assert np.array_equal(np.asarray(state.params[path]), want)


class Tensor(nnx.Module):
    def __init__(self, rngs):
        make = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(
            7,
            12,
            use_bias=False,
            rngs=rngs,
            kernel_init=nnx.with_partitioning(make, (None, "tensor")),
        )


@pytest.mark.parametrize("sizes, other", [((4, 2), (2, 4)), ((3, 2), (1, 6))])
def test_a_tensor_axis_may_change(sizes, other, tmp_path):
    zeros = []
    for stage, shape in ((3, sizes), (1, other)):
        zeros.append(make_zero((stage, shape, ("data", "tensor"))))
        zeros[-1].setup_for(Tensor, optax.adamw(1e-3))
    folder, _ = random_step(tmp_path / "host", zeros[0])
    state = restore(folder, zeros[0].setup).state
    assert len({str(x.index) for x in state.opt_state[0].mu["up"]["kernel"].addressable_shards}) > 2
    bits = whole(zeros[0], state)
    (tmp_path / "state").mkdir()
    folder = save(tmp_path / "state", zeros[0], state)
    assert_same(whole(zeros[1], restore(folder, zeros[1].setup).state), bits)


# What is on the disk.


def wide(key):
    return {"embed": jnp.zeros((5003, 130)), "up": jnp.zeros((3, 130, 517)), "bias": jnp.zeros(517)}


def wide_on(layout, precision="fp32"):
    zero = make_zero(layout, precision)
    zero.setup_for(wide, optax.adamw(1e-3), layer_axes={"up": 0})
    return zero


@pytest.mark.parametrize("stage, sizes", [(0, (1, 8)), (3, (1, 7)), (2, (2, 4)), (1, (1, 6))])
def test_size_on_disk(stage, sizes, tmp_path):
    """Neither padding nor replicas: at most 1.02 times the leaves' own bytes."""
    zero = wide_on((stage, sizes, ("replica", "data")))
    host, bits = random_step(tmp_path / "host", zero)
    state = restore(host, zero.setup).state
    (tmp_path / "state").mkdir()
    leaves = sum(x.nbytes for x in bits.values())
    for folder in (host, save(tmp_path / "state", zero, state)):
        size = sum(files_of(folder).values())
        assert 10e6 < leaves < size <= 1.02 * leaves
    pieces = checkpoint.snapshot(checkpoint.entries(zero.setup, state).values()).pieces
    assert leaves == sum(piece.data.nbytes for each in pieces.values() for piece in each)


def test_how_leaves_are_cut():
    """At the pieces of a stage that shards them, small ones of one process together."""
    for stage in (0, 3):
        setup = wide_on((stage, (8,), ("data",))).setup
        leaves = checkpoint.entries(setup, setup.abstract_state())
        assert _piece_shape(leaves["params/embed"]) == (626, 130)
        assert _piece_shape(leaves["params/bias"]) == (517,)


def test_each_piece_is_read_once_and_no_other(tmp_path, monkeypatch):
    first = make_zero((3, (8,), ("data",)))
    first.setup_for(init, optax.adamw(1e-3), trainable=trainable)
    folder, _ = random_step(tmp_path, first)
    reads = []
    start = Reader.start
    monkeypatch.setattr(
        Reader, "start", lambda self, *args: reads.append(args[:2]) or start(self, *args)
    )
    for layout, pieces in (((0, (8,), ("data",)), 1), ((3, (2, 4), ("replica", "data")), 4)):
        zero = make_zero(layout)
        zero.setup_for(init, optax.adamw(1e-3), trainable=trainable)
        reads.clear()
        restore(folder, zero.setup)
        mine = [index for name, index in reads if name == "optimizer/0/mu/embed"]
        assert len(mine) == pieces == len({str(index) for index in mine})
        rows = sorted((i[0].start, i[0].stop, i[1].stop - i[1].start) for i in mine)
        assert sum((stop - start) * columns for start, stop, columns in rows) == 13 * 10


# What a save keeps of a state.


def test_a_snapshot_is_no_view_of_the_state(tmp_path):
    zero = make_zero((3, (8,), ("data",)))
    zero.setup_for(init, optax.adamw(1e-3), trainable=trainable)
    folder, bits = random_step(tmp_path, zero)
    state = restore(folder, zero.setup).state
    entries = checkpoint.entries(zero.setup, state)
    snapshot = checkpoint.snapshot(entries.values())
    kept = [p.data for pieces in snapshot.pieces.values() for p in pieces]
    buffers = [
        np.asarray(x.data)
        for entry in entries.values()
        if not jnp.issubdtype(entry.array.dtype, jax.dtypes.prng_key)
        for x in entry.array.addressable_shards
    ]
    assert not any(np.shares_memory(a, b) for a in kept for b in buffers if b.size)
