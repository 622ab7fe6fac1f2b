"""A small network and the loop that trains it: what the tests of checkpoints save and restore."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jzero
from jzero.paths import flatten


class Net(nnx.Module):
    """Dropout, batch statistics, and widths that three devices do not divide."""

    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(5, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.down = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss_fn(model, batch, rng):
    noise = 0.01 * jax.random.normal(rng, batch["y"].shape)
    return jnp.mean((model(batch["x"]) - batch["y"] - noise.astype(batch["x"].dtype)) ** 2)


class Rows:
    """Batches of twelve shuffled rows, another order in each pass; `position` is where it is."""

    def __init__(self, position: int = 0, spikes: tuple[int, ...] = ()):
        rng = np.random.default_rng(0)
        self.x = rng.normal(size=(60, 5)).astype(np.float32)
        self.y = np.stack([np.sin(self.x.sum(1)), self.x[:, 0]], 1).astype(np.float32)
        self.position = position
        self.spikes = spikes  # batches that are far too large for fp16

    def __next__(self):
        epoch, place = divmod(self.position, 5)
        rows = np.random.default_rng(epoch).permutation(60)[12 * place : 12 * place + 12]
        scale = np.float32(1e30 if self.position in self.spikes else 1)
        self.position += 1
        return {"x": self.x[rows] * scale, "y": self.y[rows]}


def make_zero(devices: int = 3, **keywords) -> jzero.Zero:
    return jzero.Zero(mesh=Mesh(np.array(jax.devices()[:devices]), ("data",)), **keywords)


class Loop:
    """A training loop around a checkpointer, from its last checkpoint if it has one."""

    def __init__(self, folder: Path, zero: jzero.Zero | None = None, **keywords):
        self.zero = zero or make_zero(2, stage=3)
        self.checkpoints = self.zero.checkpointer(folder, **keywords)
        self.tx = optax.adam(1e-2)
        self.zero.setup_for(Net, self.tx)
        restored = self.checkpoints.restore()
        self.state = restored.state if restored else self.zero.init(Net, self.tx)
        self.rows = Rows(restored.data["position"] if restored else 0)
        self.step = self.zero.train_step(loss_fn)
        self.losses: list[float] = []

    def advance(self, **keywords) -> bool:
        """A step, and what `save` says after it."""
        self.state, metrics = self.step(self.state, next(self.rows))
        self.losses.append(float(metrics["loss"]))
        return self.checkpoints.save(self.state, {"position": self.rows.position}, **keywords)

    def run(self, steps: int) -> "Loop":
        with self.checkpoints:
            while int(self.state.step) < steps and not self.checkpoints.stopping:
                self.advance()
        return self


def leaves(state: jzero.State) -> dict[str, np.ndarray]:
    """Copies of all that a state holds, as bytes would be compared."""

    def copy(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.array(x).view(np.uint8) if x.ndim else np.array([x]).view(np.uint8)

    return {path: copy(x) for path, x in flatten(state).items()}


def assert_same(one: jzero.State, other: jzero.State) -> None:
    """Bit for bit, padding included: nothing must be in it that is not reproducible."""
    left, right = leaves(one), leaves(other)
    assert left.keys() == right.keys()
    for path in left:
        assert np.array_equal(left[path], right[path]), path
