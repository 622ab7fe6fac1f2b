"""A scanned language model in plain JAX, as somebody without jzero might write and shard it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled
from steps import build_mesh

VOCABULARY, WIDTH, HIDDEN, LAYERS, LENGTH = 512, 128, 512, 4, 64
SHAPES = {
    "embed": (VOCABULARY, WIDTH),
    "norm": (LAYERS, WIDTH),
    "up": (LAYERS, WIDTH, HIDDEN),
    "down": (LAYERS, HIDDEN, WIDTH),
    "head": (WIDTH, VOCABULARY),
}
SPECS = {
    name: P(None, "data") if shape[0] == LAYERS else P("data") for name, shape in SHAPES.items()
}
PARAMETERS = 2 * VOCABULARY * WIDTH + LAYERS * (WIDTH + 2 * WIDTH * HIDDEN)

Read = Callable[[jax.Array], jax.Array]


def loss(params: Any, tokens: jax.Array, read: Read = lambda x: x, remat: bool = True) -> jax.Array:
    """The mean cross entropy of the next token.

    Arguments:
      params: arrays of `SHAPES`, or shards of them.
      tokens: [rows, LENGTH].
      read: what is done to a weight where it is used.
      remat: whether layers are done again in backward.
    """

    def layer(x: jax.Array, weights: dict[str, jax.Array]):
        norm, up, down = (read(weights[k].astype(x.dtype)) for k in ("norm", "up", "down"))
        y = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-5) * norm
        return x + jax.nn.gelu(y @ up) @ down, None

    if remat:
        layer = jax.checkpoint(layer, prevent_cse=False)
    x = read(params["embed"].astype(jnp.bfloat16))[tokens]
    x, _ = lax.scan(layer, x, {k: params[k] for k in ("norm", "up", "down")})
    logits = (x @ read(params["head"].astype(x.dtype))).astype(jnp.float32)
    nats = -jax.nn.log_softmax(logits[:, :-1])
    return jnp.mean(jnp.take_along_axis(nats, tokens[:, 1:, None], axis=-1))


def gathering(mesh: Mesh, remat: bool) -> Callable[[Any, Any], jax.Array]:
    """The loss, with each weight gathered where it is used."""

    def local(params: Any, tokens: jax.Array) -> jax.Array:
        def read(x: jax.Array) -> jax.Array:
            return lax.all_gather(x, "data", tiled=True)

        return lax.pmean(loss(params, tokens, read, remat), "data")

    specs = SPECS, P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)


def sgd(loss_fn: Callable[[Any, Any], jax.Array], params: Any, momentum: Any, tokens: jax.Array):
    """One step of SGD with momentum."""
    value, grads = jax.value_and_grad(loss_fn)(params, tokens)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


@functools.cache
def annotated(target: str, rows: int = 8) -> Compiled:
    """ZeRO-3 by annotations only: sharded parameters, and not a word where they are used."""
    return _compiled(loss, build_mesh(target, data=8), rows)


@functools.cache
def gathered(target: str, remat: bool) -> Compiled:
    """ZeRO-3 by hand."""
    mesh = build_mesh(target, data=8)
    return _compiled(gathering(mesh, remat), mesh, rows=8)


def _compiled(loss_fn: Callable[[Any, Any], jax.Array], mesh: Mesh, rows: int) -> Compiled:
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, SPECS[name]))
        for name, shape in SHAPES.items()
    }
    sharding = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32, sharding=sharding)
    step = jax.jit(functools.partial(sgd, loss_fn), donate_argnums=(0, 1))
    return step.lower(params, params, tokens).compile()
