"""A decoder-only language model in Flax NNX, and its presets.

RMSNorm, rotary positions, grouped-query attention and SwiGLU, as in Llama. Nothing in it knows of
ZeRO: weights are read in the ordinary way, `self.kernel[...]`, and whatever hands them out (jzero,
or nobody) decides their dtype. Activations follow that dtype; normalisation, softmax and loss are
computed in float32.

Shapes: B batch rows, T time (tokens), D width, H query heads, K key and value heads, C a head's
width, F the MLP's width, V vocabulary, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jzero
from jzero.errors import JzeroError

# What backward may find kept inside a layer. "full" keeps the layer's input alone and computes the
# rest again; "dots" also keeps the results of products with a weight, "all_dots" those of attention
# too; "none" keeps everything.
REMAT: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all_dots": jax.checkpoint_policies.dots_saveable,
}


@dataclass(frozen=True)
class LMConfig:
    """Sizes of a language model; `context` is the length T that it trains on."""

    vocabulary: int
    context: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    tied: bool = False
    scan: bool = True
    remat: str = "full"
    rope_base: float = 10_000.0

    def __post_init__(self):
        if self.width % self.heads or self.heads % self.kv_heads:
            raise JzeroError(
                f"width {self.width} must be a multiple of heads {self.heads}, "
                f"and heads of kv_heads {self.kv_heads}"
            )
        if (self.width // self.heads) % 2:
            raise JzeroError(f"rotary positions need an even head width, not {self.head_width}")
        if self.remat not in REMAT:
            raise JzeroError(f"remat is {self.remat!r}; choose one of {', '.join(REMAT)}")

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """`x` [..., D] over its root mean square, taken in float32, times `scale` [D]."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + epsilon)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: jax.Array, base: float) -> jax.Array:
    """Turn each pair (c, c + C/2) of `x` [B, T, heads, C] by an angle that grows with position."""
    time, half = x.shape[1], x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=jnp.float32) / half)  # [C/2]
    angles = jnp.arange(time, dtype=jnp.float32)[:, None] * frequencies  # [T, C/2]
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]  # [T, 1, C/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention: `q` [B, T, H, C], `k` and `v` [B, T, K, C] to [B, T, H, C].

    In plain products, which every backend compiles in every dtype; softmax in float32. Head h reads
    key and value head h // G, where G = H / K.
    """
    batch, time, heads, width = q.shape
    q = q.reshape(batch, time, k.shape[2], -1, width)  # [B, T, K, G, C]
    scores = jnp.einsum("btkgc,bskc->bkgts", q, k, preferred_element_type=jnp.float32)
    causal = jnp.tril(jnp.ones((time, time), bool))
    shares = jax.nn.softmax(jnp.where(causal, scores * width**-0.5, -jnp.inf))  # [B, K, G, T, T]
    y = jnp.einsum("bkgts,bskc->btkgc", shares.astype(v.dtype), v)
    return y.reshape(batch, time, heads, width)


class RMSNorm(nnx.Module):
    def __init__(self, width: int, *, rngs: nnx.Rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (width,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...])


class Linear(nnx.Module):
    def __init__(self, inputs: int, outputs: int, stddev: float = 0.02, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(stddev)
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


class Embedding(nnx.Module):
    """Vectors of tokens; unlike `nnx.Embed`, in the dtype in which the weights are handed out."""

    def __init__(self, vocabulary: int, width: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.02)
        self.embedding = nnx.Param(init(rngs.params(), (vocabulary, width)))

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        return jnp.take(self.embedding[...], tokens, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        return x @ self.embedding[...].T


class Attention(nnx.Module):
    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        queries, pairs = config.width, config.kv_heads * config.head_width
        self.config = config
        self.query = Linear(config.width, queries, rngs=rngs)
        self.key = Linear(config.width, pairs, rngs=rngs)
        self.value = Linear(config.width, pairs, rngs=rngs)
        self.out = Linear(queries, config.width, residual_stddev(config), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        config = self.config
        batch, time, _ = x.shape
        q = self.query(x).reshape(batch, time, config.heads, config.head_width)
        k = self.key(x).reshape(batch, time, config.kv_heads, config.head_width)
        v = self.value(x).reshape(batch, time, config.kv_heads, config.head_width)
        y = attend(rotary(q, config.rope_base), rotary(k, config.rope_base), v)
        return self.out(y.reshape(batch, time, config.width))


class SwiGLU(nnx.Module):
    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.gate = Linear(config.width, config.mlp, rngs=rngs)
        self.up = Linear(config.width, config.mlp, rngs=rngs)
        self.down = Linear(config.mlp, config.width, residual_stddev(config), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Block(nnx.Module):
    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = RMSNorm(config.width, rngs=rngs)
        self.mlp = SwiGLU(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class LM(nnx.Module):
    """Tokens [B, T], int32, to next-token logits [B, T, V] in the dtype of the weights.

    Example:
        >>> model = nnx.eval_shape(lambda: LM(PRESETS["tiny"], rngs=nnx.Rngs(0)))
        >>> model.embed.embedding.shape
        (2048, 128)
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed = Embedding(config.vocabulary, config.width, rngs=rngs)
        self.layers: Any
        if config.scan:  # one Block whose weights have a leading dimension of L

            @nnx.split_rngs(splits=config.layers)
            @nnx.vmap
            def stack(rngs: nnx.Rngs) -> Block:
                return Block(config, rngs=rngs)

            self.layers = stack(rngs)
        else:
            self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.layers)])
        self.norm = RMSNorm(config.width, rngs=rngs)
        if not config.tied:
            self.head = Linear(config.width, config.vocabulary, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        def block(layer: Block, x: jax.Array) -> jax.Array:
            return layer(x)

        policy = REMAT[self.config.remat]
        if policy is not None:
            # A scan's two loops already keep forward and backward apart; the barrier that
            # prevent_cse adds would only pin each layer's work to its place. Unrolled layers
            # need it, or XLA merges the second forward pass with the first.
            block = jax.checkpoint(block, policy=policy, prevent_cse=not self.config.scan)

        x = self.embed(tokens)  # [B, T, D]
        if self.config.scan:
            x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, self.layers)
        else:
            for layer in self.layers:
                x = block(layer, x)
        x = self.norm(x)
        return self.embed.logits(x) if self.config.tied else self.head(x)


def residual_stddev(config: LMConfig) -> float:
    """Initial spread of the weights that write into the residual stream, smaller when deeper."""
    return 0.02 / (2 * config.layers) ** 0.5


def loss_fn(model: Callable[..., jax.Array], batch: dict[str, jax.Array], rng: jax.Array | None):
    """Next-token cross entropy in nats, as `jzero.Mean(total, weight)`.

    Arguments:
        model: tokens [B, T] to logits [B, T, V].
        batch: `tokens` [B, T + 1], int32, and perhaps `weights` [B, T]: 0 where the token to be
            predicted is padding, 1 where it is real (all of them if left out).
        rng: unused; the model has no dropout.
    """
    del rng
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)  # [B, T, V]
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]  # [B, T]
    nats = jax.nn.logsumexp(logits, axis=-1) - right
    weights = batch.get("weights")
    weights = jnp.ones_like(nats) if weights is None else weights.astype(jnp.float32)
    return jzero.Mean(jnp.sum(nats * weights), jnp.sum(weights))


PRESETS = {
    "tiny": LMConfig(2048, 128, layers=4, width=128, heads=4, kv_heads=2, mlp=384, tied=True),
    # GPT-2's sizes around Llama's blocks: SwiGLU's three matrices at 2048 weigh as much as
    # GPT-2's two at 3072.
    "gpt2": LMConfig(50257, 1024, layers=12, width=768, heads=12, kv_heads=12, mlp=2048, tied=True),
    "llama_7b": LMConfig(32000, 1024, layers=32, width=4096, heads=32, kv_heads=32, mlp=11008),
    "zero_7p5b": LMConfig(32000, 1024, layers=29, width=4096, heads=32, kv_heads=32, mlp=14848),
    "zero_1t": LMConfig(32000, 1024, layers=112, width=25600, heads=200, kv_heads=200, mlp=81920),
    "llama_13b": LMConfig(32000, 1024, layers=40, width=5120, heads=40, kv_heads=40, mlp=13824),
    "llama_70b": LMConfig(32000, 1024, layers=80, width=8192, heads=64, kv_heads=8, mlp=28672),
}
PRESETS["llama_13b_unrolled"] = replace(PRESETS["llama_13b"], scan=False)


def workload(config: LMConfig) -> jzero.Workload:
    """What jzero's tools need to know of a model; makes no arrays."""

    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((rows, config.context + 1), jnp.int32)}

    return jzero.Workload(init=lambda rngs: LM(config, rngs=rngs), loss_fn=loss_fn, batch=batch)


def tiny() -> jzero.Workload:
    """A model that two CPU cores train in minutes."""
    return workload(PRESETS["tiny"])


def gpt2() -> jzero.Workload:
    """GPT-2's sizes, about 124 million parameters."""
    return workload(PRESETS["gpt2"])


def llama_7b() -> jzero.Workload:
    """6,738,415,616 parameters."""
    return workload(PRESETS["llama_7b"])


def zero_7p5b() -> jzero.Workload:
    """The 7.5 billion parameters of the ZeRO paper's figure 1."""
    return workload(PRESETS["zero_7p5b"])


def zero_1t() -> jzero.Workload:
    """The trillion parameters of the ZeRO paper's title page."""
    return workload(PRESETS["zero_1t"])


def llama_13b() -> jzero.Workload:
    """13,015,864,320 parameters."""
    return workload(PRESETS["llama_13b"])


def llama_70b() -> jzero.Workload:
    """68,976,648,192 parameters, with eight key and value heads."""
    return workload(PRESETS["llama_70b"])


def llama_13b_unrolled() -> jzero.Workload:
    """`llama_13b` without a layer scan."""
    return workload(PRESETS["llama_13b_unrolled"])
