"""Whole states on the host, compared bit by bit, and step folders of them."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jzero
from jzero import checkpoint
from jzero.checkpoint import manifest
from jzero.checkpoint.manifest import Facts, Manifest
from jzero.paths import flatten


def whole(zero: jzero.Zero, state: jzero.State) -> dict[str, np.ndarray]:
    """Every leaf of a state by its name in a checkpoint, of its true shape; of keys their data."""
    trees = {
        "params": zero.params(state),
        "optimizer": zero.opt_state(state),
        "variables": state.variables,
        "progress": {name: getattr(state, name) for name in ("step", "skipped", "rng", "scale")},
    }
    return {
        f"{part}/{path}": on_host(x)
        for part, tree in trees.items()
        for path, x in flatten(tree).items()
    }


def on_host(x: Any) -> np.ndarray:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.array(jax.random.key_data(x) if is_key else x)


def assert_same(found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    """The same leaves, in shape, dtype and every bit."""
    assert found.keys() == want.keys()
    for name, x in want.items():
        y = found[name]
        assert (y.shape, y.dtype) == (x.shape, x.dtype), name
        assert y.tobytes() == x.tobytes(), name


def save(root: Path, zero: jzero.Zero, state: jzero.State, **facts: Any) -> Path:
    """A step folder of a state."""
    return checkpoint.save_step(
        root,
        int(state.step),
        checkpoint.snapshot(checkpoint.entries(zero.setup, state).values()),
        checkpoint.facts_of(zero.setup, state, **facts),
        nonce=checkpoint.agree_nonce(),
    )


def random_step(root: Path, zero: jzero.Zero, step: int = 5) -> tuple[Path, dict[str, np.ndarray]]:
    """A step folder whose leaves are random bits, and these; `zero` is set up, no state exists."""
    rng, leaves = np.random.default_rng(0), {}
    for name, entry in checkpoint.entries(zero.setup, zero.setup.abstract_state()).items():
        leaves[name] = (entry.shape, entry.dtype, random_bits(rng, entry.array, entry.shape))
    step_name = leaves["progress/step"]
    leaves["progress/step"] = (*step_name[:2], np.array(step, np.int32))
    host = ((name, *leaf) for name, leaf in leaves.items())
    facts = Facts(dynamic_loss_scale=zero.setup.scaling.dynamic)
    folder = checkpoint.write_leaves(root, step, host, facts)
    return folder, {name: array for name, (_, _, array) in leaves.items()}


def random_bits(rng: np.random.Generator, like: Any, shape: tuple[int, ...]) -> np.ndarray:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        like = jax.eval_shape(jax.random.key_data, like)
        shape = like.shape
    if like.dtype == jnp.bool_:
        return np.asarray(rng.integers(0, 2, shape), bool)
    dtype = np.dtype(like.dtype)
    count = int(np.prod(shape))
    bits = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape).copy()
    if jnp.issubdtype(dtype, jnp.floating):
        # Signalling NaNs and subnormal numbers change in XLA itself, as soon as a program is run.
        with np.errstate(all="ignore"):
            bits[np.isnan(bits) | (np.abs(bits) < jnp.finfo(dtype).tiny)] = 0
    return bits


@contextmanager
def compilations() -> Iterator[list[str]]:
    """A list that gets a line for each program compiled in the block."""
    lines, handler, log = [], logging.Handler(), logging.getLogger("jax._src.dispatch")
    handler.emit = lambda record: lines.append(record.getMessage())
    found = []
    log.addHandler(handler)
    try:
        with jax.log_compiles():
            yield found
    finally:
        log.removeHandler(handler)
        found += [line for line in lines if "Finished XLA compilation" in line]


def setup_of(devices: int, stage: int) -> jzero.Zero:
    """A `Zero` laid out for two weights, one of them large enough for a file for each piece."""
    zero = jzero.Zero(
        stage=stage,
        precision="bf16",
        mesh=Mesh(np.array(jax.devices()[:devices]), ("data",)),
    )
    zero.setup_for(
        lambda key: {"w": jnp.zeros((13, 6)), "wide": jnp.zeros((8, 2**15))}, optax.adamw(1e-3)
    )
    return zero


def files_of(folder: Path) -> dict[str, int]:
    """The files of a step folder and their lengths."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def rewrite(folder: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Changes what a manifest says, with a checksum that fits."""
    manifest.write(folder, change(manifest.read(folder)))
