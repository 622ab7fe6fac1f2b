"""One small network, in NNX, in Linen and as a plain pytree, and its training without jzero.

An embedding, residual MLP blocks with layer norms, and a head that may be tied to the embedding;
blocks in a scan or one after the other, rematerialised or not.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import jzero
from jzero.paths import flatten

KINDS = ("nnx", "linen", "plain")
ROWS, LENGTH = 32, 6


@dataclass(frozen=True)
class Net:
    """The network's shape and how it is written."""

    kind: str = "nnx"
    scanned: bool = True
    tied: bool = False
    remat: bool = False
    vocab: int = 48
    width: int = 16
    hidden: int = 24
    layers: int = 2

    @property
    def init(self) -> Any:
        """What `zero.init` takes."""
        if self.kind == "nnx":
            return lambda rngs: NnxNet(self, rngs)
        return LinenNet(self) if self.kind == "linen" else functools.partial(plain_init, self)

    @property
    def sample(self) -> Any:
        return jax.ShapeDtypeStruct((2, LENGTH), jnp.int32) if self.kind == "linen" else None

    def fresh(self, seed: int = 0) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
        """Weights as the model itself makes them, and logits(weights, tokens); no jzero."""
        return _fresh(self, seed)

    def logits(self, model: Any, tokens: jax.Array) -> jax.Array:
        """The logits of a model as jzero hands it to a loss function."""
        if self.kind == "plain":
            return plain_logits(self, jzero.gather, model, tokens)
        return model(tokens)

    def loss(self, model: Any, batch: Any, rng: Any = None) -> jzero.Mean:
        return jzero.Mean(*total_and_weight(self.logits(model, batch["tokens"]), batch))


@functools.cache
def _fresh(net: Net, seed: int) -> tuple[Any, Callable[[Any, Any], jax.Array]]:
    if net.kind == "nnx":
        graph, params, rest = nnx.split(NnxNet(net, nnx.Rngs(seed)), nnx.Param, ...)

        def logits(weights, tokens):
            state = jax.tree.map(lambda x: x, params)
            nnx.replace_by_pure_dict(state, weights)
            return nnx.merge(graph, state, rest)(tokens)

        return nnx.to_pure_dict(params), logits
    key = jax.random.key(seed)
    if net.kind == "linen":
        module = LinenNet(net)
        params = jax.jit(module.init)(key, jnp.zeros((2, LENGTH), jnp.int32))["params"]
        return params, lambda params, tokens: module.apply({"params": params}, tokens)
    params = jax.jit(functools.partial(plain_init, net))(key)
    return params, functools.partial(plain_logits, net, lambda tree: tree)


def total_and_weight(logits, batch):
    """Cross entropy of the next token, summed with weights, and the sum of the weights."""
    logits, labels = logits[:, :-1].astype(jnp.float32), batch["tokens"][:, 1:]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return (losses * batch["weight"][:, 1:]).sum(), batch["weight"][:, 1:].sum()


def make_batch(step: int, vocab: int = 48, rows: int = ROWS, fill: int = 0) -> dict[str, Any]:
    """Tokens [rows, LENGTH] and weights that differ by row; `fill` further rows weigh nothing."""
    rng = np.random.default_rng(step)
    weight = rng.integers(0, 2, (rows, LENGTH)).astype(np.float32) * rng.random((rows, 1))
    weight[: rows // 8] = 0  # all that the first of eight devices sees
    batch = {"tokens": rng.integers(0, vocab, (rows, LENGTH)), "weight": weight}
    extra = [(0, fill), (0, 0)]
    return {
        "tokens": np.pad(batch["tokens"], extra).astype(np.int32),
        "weight": np.pad(batch["weight"], extra).astype(np.float32),
    }


class NnxBlock(nnx.Module):
    def __init__(self, net: Net, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(net.width, rngs=rngs)
        self.up = nnx.Linear(net.width, net.hidden, rngs=rngs)
        self.down = nnx.Linear(net.hidden, net.width, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxNet(nnx.Module):
    def __init__(self, net: Net, rngs: nnx.Rngs):
        self.net = net
        self.embed = nnx.Embed(net.vocab, net.width, rngs=rngs)
        if net.scanned:

            @nnx.split_rngs(splits=net.layers)
            @nnx.vmap(in_axes=0, out_axes=0)
            def blocks(rngs):
                return NnxBlock(net, rngs)

            self.blocks = blocks(rngs)
        else:
            self.blocks = nnx.List([NnxBlock(net, rngs) for _ in range(net.layers)])
        self.norm = nnx.LayerNorm(net.width, rngs=rngs)
        if not net.tied:
            self.head = nnx.Linear(net.width, net.vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)

        def call(x, block):
            return block(x)

        if self.net.remat:
            call = nnx.remat(call, prevent_cse=not self.net.scanned)
        if self.net.scanned:
            x = nnx.scan(call, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:
                x = call(x, block)
        x = self.norm(x)
        return self.embed.attend(x) if self.net.tied else self.head(x)


class LinenBlock(nn.Module):
    net: Net

    @nn.compact
    def __call__(self, x, _=None):
        y = nn.Dense(self.net.hidden, name="up")(nn.LayerNorm(name="norm")(x))
        return x + nn.Dense(self.net.width, name="down")(nn.gelu(y)), None


class LinenNet(nn.Module):
    net: Net

    @nn.compact
    def __call__(self, tokens):
        net = self.net
        embed = nn.Embed(net.vocab, net.width, name="embed")
        x = embed(tokens)
        block = nn.remat(LinenBlock, prevent_cse=not net.scanned) if net.remat else LinenBlock
        if net.scanned:
            scan = nn.scan(
                block, variable_axes={"params": 0}, split_rngs={"params": True}, length=net.layers
            )
            x, _ = scan(net, name="blocks")(x, None)
        else:
            for i in range(net.layers):
                x, _ = block(net, name=f"block_{i}")(x, None)
        x = nn.LayerNorm(name="norm")(x)
        if net.tied:
            return embed.attend(x)
        return nn.Dense(net.vocab, use_bias=False, name="head")(x)


def plain_init(net: Net, key: jax.Array) -> Any:
    keys = iter(jax.random.split(key, 4 + 2 * net.layers))

    def normal(*shape):
        return jax.random.normal(next(keys), shape) / np.sqrt(shape[0])

    def block():
        return {
            "scale": jnp.ones(net.width),
            "up": normal(net.width, net.hidden),
            "up_bias": jnp.zeros(net.hidden),
            "down": normal(net.hidden, net.width),
        }

    blocks = [block() for _ in range(net.layers)]
    params = {"embed": normal(net.vocab, net.width), "scale": jnp.ones(net.width)}
    params["blocks"] = jax.tree.map(lambda *xs: jnp.stack(xs), *blocks) if net.scanned else blocks
    if not net.tied:
        params["head"] = normal(net.width, net.vocab)
    return params


def plain_logits(net: Net, read: Callable[[Any], Any], params: Any, tokens: jax.Array):
    def norm(x, scale):
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale

    def block(x, weights):
        w = read(weights)
        y = jax.nn.gelu(norm(x, w["scale"]) @ w["up"] + w["up_bias"])
        return x + y @ w["down"], None

    if net.remat:
        block = jax.checkpoint(block, prevent_cse=not net.scanned)
    x = read(params["embed"])[tokens]
    if net.scanned:
        x, _ = lax.scan(block, x, params["blocks"])
    else:
        for weights in params["blocks"]:
            x, _ = block(x, weights)
    x = norm(x, read(params["scale"]))
    return x @ (read(params["embed"]).T if net.tied else read(params["head"]))


DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2, weight_decay=0.1),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lamb": lambda: optax.lamb(1e-2, weight_decay=0.1),
    "sgd": lambda: optax.sgd(0.5, momentum=0.9),
}


@functools.cache
def _reference_step(net: Net, optimizer: str, precision: str):
    _, logits = net.fresh()
    tx, dtype = OPTIMIZERS[optimizer](), DTYPES[precision]

    def loss_fn(params, batch):
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        total, weight = total_and_weight(logits(low, batch["tokens"]), batch)
        return total / weight

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    return step, jax.jit(tx.init)


@functools.cache
def reference(net: Net, optimizer: str = "adamw", precision: str = "fp32", steps: int = 5):
    """Plain JAX and Optax on one device, whole batches: (first weights, last, losses, norms)."""
    params, _ = net.fresh()
    step, init = _reference_step(net, optimizer, precision)
    first, opt_state, losses, norms = numpy(params), init(params), [], []
    for i in range(steps):
        params, opt_state, loss, norm = step(params, opt_state, make_batch(i, net.vocab))
        losses.append(float(loss))
        norms.append(float(norm))
    return first, numpy(params), losses, norms


def mesh(*sizes: int, names: tuple[str, ...] = ("data",), **options: Any) -> Mesh:
    """A mesh over the first devices."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, **options)


def run(net: Net, zero: jzero.Zero, tx: Any = None, steps: int = 5, fill: int = 0, **options: Any):
    """The same training with jzero: (last weights, metrics of each step, state)."""
    tx = OPTIMIZERS["adamw"]() if tx is None else tx
    state = zero.init(net.init, tx, seed=0, sample=net.sample, **options)
    step, history = zero.train_step(net.loss), []
    for i in range(steps):
        state, metrics = step(state, make_batch(i, net.vocab, fill=fill))
        history.append(jax.device_get(metrics))
    return numpy(zero.params(state)), history, state


def numpy(tree: Any) -> dict[str, np.ndarray]:
    """path -> array on the host; of a PRNG key its data."""

    def one(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return {path: one(x) for path, x in flatten(tree).items()}


def distance(found: np.ndarray, want: np.ndarray) -> float:
    """||found - want|| / ||want||; the absolute distance where want is zero."""
    off = np.linalg.norm(np.asarray(found, np.float64) - np.asarray(want, np.float64))
    return float(off / (np.linalg.norm(np.asarray(want, np.float64)) or 1.0))


def assert_close(found: Any, want: Any, bound: float = 1e-5) -> None:
    """Every leaf within a relative bound, by its norm."""
    found, want = numpy(found), numpy(want)
    assert found.keys() == want.keys()
    for path in want:
        assert found[path].shape == want[path].shape, path
    off = {path: distance(found[path], want[path]) for path in want}
    assert all(x <= bound for x in off.values()), off
