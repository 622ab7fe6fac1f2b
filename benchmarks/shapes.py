"""Models of shapes that strain memory in different places, for `scripts/bench_memory.py`.

All train in bf16 with AdamW. `wide`, `deep`, `vocabulary` and `experts` are the language model of
examples/lm, each layer rematerialised; `convolutional` keeps its activations, as is usual there.

Shapes: B batch rows, T time (tokens), D width, E experts, K experts of a token, C tokens that an
expert takes of a row, F an expert's width, V vocabulary or classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from model import LM, Attention, Linear, LMConfig, RMSNorm, loss_fn, residual_stddev

import jzero
from jzero import config as configs


@dataclass(frozen=True)
class Shape:
    """A model to measure.

    Attributes:
      factory: makes its workload; of this file, so that `FILE.py:NAME` finds it.
      logits: the shape of the logits of one sample.
    """

    factory: Callable[[], jzero.Workload]
    logits: tuple[int, ...]


WIDE = LMConfig(32_000, 1024, layers=4, width=12_288, heads=96, kv_heads=96, mlp=32_768)
DEEP = LMConfig(32_000, 1024, layers=192, width=1024, heads=16, kv_heads=16, mlp=2816)
VOCABULARY = LMConfig(262_144, 1024, layers=18, width=2048, heads=16, kv_heads=16, mlp=8192)
EXPERTS = LMConfig(32_000, 1024, layers=16, width=2048, heads=16, kv_heads=16, mlp=5632)
COUNT, CHOSEN, CAPACITY = 8, 2, 320
"""Experts of a layer, experts of a token, and tokens that an expert takes of a row of 1024."""
CLASSES, IMAGE = 1000, (224, 224, 3)
BLOCKS = ((3, 256), (4, 512), (23, 1024), (3, 2048))
"""Of the convolutional net: blocks and channels at each resolution."""


def wide() -> jzero.Workload:
    """4 layers of 1.8 billion parameters each."""
    return language_model(WIDE, rows=1)


def deep() -> jzero.Workload:
    """192 layers of 12.8 million parameters each, 4 x 1024 tokens."""
    return language_model(DEEP, rows=4)


def vocabulary() -> jzero.Workload:
    """262,144 tokens: embedding and head have nearly half of 2.3 billion parameters."""
    return language_model(VOCABULARY, rows=2)


def experts() -> jzero.Workload:
    """16 layers of 8 experts, of which each token has 2; every device has all of them."""
    return language_model(EXPERTS, rows=4, model=MixtureLM)


def convolutional() -> jzero.Workload:
    """A residual net of 3 x 3 convolutions, 32 images of 224 x 224."""

    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "image": jax.ShapeDtypeStruct((rows, *IMAGE), jnp.bfloat16),
            "label": jax.ShapeDtypeStruct((rows,), jnp.int32),
        }

    return jzero.Workload(lambda rngs: ConvNet(rngs=rngs), class_loss, batch, config=_config(32))


def language_model(config: LMConfig, rows: int, model: Callable[..., LM] = LM) -> jzero.Workload:
    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"tokens": jax.ShapeDtypeStruct((rows, config.context + 1), jnp.int32)}

    return jzero.Workload(
        lambda rngs: model(config, rngs=rngs), loss_fn, batch, config=_config(rows)
    )


def _config(rows: int) -> configs.Config:
    return configs.load(precision="bf16", gradient_clipping=1.0, micro_batch_size=rows)


class Experts(nnx.Module):
    """The two best of several SwiGLUs for each token; each takes tokens while there is room.

    Tokens go to experts and back in products with one-hot arrays, as in GShard (arXiv 2006.16668).
    """

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        def stacked(inputs: int, outputs: int, stddev: float) -> nnx.Param:
            init = nnx.initializers.normal(stddev)
            return nnx.Param(init(rngs.params(), (COUNT, inputs, outputs)))

        self.router = Linear(config.width, COUNT, rngs=rngs)
        self.gate = stacked(config.width, config.mlp, 0.02)
        self.up = stacked(config.width, config.mlp, 0.02)
        self.down = stacked(config.mlp, config.width, residual_stddev(config))

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        send, weigh = _dispatch(jax.nn.softmax(self.router(x).astype(jnp.float32)), x.dtype)
        y = jnp.einsum("btec,btd->becd", send, x)
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", y, self.gate[...]))
        hidden = hidden * jnp.einsum("becd,edf->becf", y, self.up[...])
        y = jnp.einsum("becf,efd->becd", hidden, self.down[...])
        return jnp.einsum("btec,becd->btd", weigh, y)


def _dispatch(shares: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Where each token goes, [B, T, E, C] of 0 and 1, and the same with its share there.

    Arguments:
      shares: of each expert, [B, T, E], float32.
      dtype: of the results.
    """
    batch, time, _ = shares.shape
    share, expert = jax.lax.top_k(shares, CHOSEN)  # [B, T, K]
    to = jax.nn.one_hot(expert, COUNT)  # [B, T, K, E]
    # Its number among those that go to the same expert.
    place = jnp.cumsum(to.reshape(batch, time * CHOSEN, COUNT), axis=1).reshape(to.shape) - 1
    place = jnp.sum(place * to, axis=-1).astype(jnp.int32)  # [B, T, K]
    slot = jax.nn.one_hot(place, CAPACITY, dtype=dtype)  # [B, T, K, C]: 0 where there is no room
    send = jnp.einsum("btke,btkc->btec", to.astype(dtype), slot)
    weigh = jnp.einsum("btke,btkc->btec", (to * share[..., None]).astype(dtype), slot)
    return send, weigh


class ExpertBlock(nnx.Module):
    """A layer of the language model, with experts in place of its MLP."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.experts_norm = RMSNorm(config.width, rngs=rngs)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        x = x + self.attention(self.attention_norm(x))
        return x + self.experts(self.experts_norm(x))


class MixtureLM(LM):
    """The language model with such layers."""

    def __init__(self, config: LMConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.layers = _stacked(config.layers, lambda rngs: ExpertBlock(config, rngs=rngs), rngs)


def _stacked(count: int, make: Callable[[nnx.Rngs], Any], rngs: nnx.Rngs) -> Any:
    """Modules as one, whose weights have a leading dimension of `count`."""
    return nnx.split_rngs(splits=count)(nnx.vmap(make))(rngs)


def _conv(inputs: int, outputs: int, size: int, stride: int, rngs: nnx.Rngs) -> nnx.Conv:
    return nnx.Conv(
        inputs, outputs, (size, size), stride, use_bias=False, dtype=jnp.bfloat16, rngs=rngs
    )


class ResidualBlock(nnx.Module):
    """Two normalised 3 x 3 convolutions, and a shorter way past them where the size changes."""

    def __init__(self, inputs: int, channels: int, stride: int = 1, *, rngs: nnx.Rngs):
        norm = {"num_groups": 32, "dtype": jnp.bfloat16, "rngs": rngs}
        self.first_norm = nnx.GroupNorm(inputs, **norm)
        self.first = _conv(inputs, channels, 3, stride, rngs)
        self.second_norm = nnx.GroupNorm(channels, **norm)
        self.second = _conv(channels, channels, 3, 1, rngs)
        self.past = None if inputs == channels else _conv(inputs, channels, 1, stride, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # [B, height, width, channels]
        y = self.first(nnx.relu(self.first_norm(x)))
        y = self.second(nnx.relu(self.second_norm(y)))
        return y + (x if self.past is None else self.past(x))


def _equal_blocks(count: int, channels: int, rngs: nnx.Rngs) -> ResidualBlock:
    return _stacked(count, lambda rngs: ResidualBlock(channels, channels, rngs=rngs), rngs)


class ConvNet(nnx.Module):
    """Images [B, 224, 224, 3] to logits [B, V]; the equal blocks of a resolution are scanned."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.stem = _conv(IMAGE[-1], 64, 7, 4, rngs)
        changing, equal, inputs = [], [], 64
        for blocks, channels in BLOCKS:
            stride = 1 if inputs == 64 else 2
            changing.append(ResidualBlock(inputs, channels, stride, rngs=rngs))
            equal.append(_equal_blocks(blocks - 1, channels, rngs))
            inputs = channels
        self.changing, self.equal = nnx.List(changing), nnx.List(equal)
        self.head = nnx.Linear(inputs, CLASSES, dtype=jnp.bfloat16, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = self.stem(images)
        for first, others in zip(self.changing, self.equal, strict=True):
            x, _ = jax.lax.scan(lambda x, block: (block(x), None), first(x), others)
        return self.head(jnp.mean(x, axis=(1, 2)))


def class_loss(model: ConvNet, batch: dict[str, jax.Array], rng: jax.Array | None) -> jax.Array:
    """The mean cross entropy of the classes, in nats; `rng` is unused."""
    del rng
    logits = model(batch["image"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


SHAPES = {
    "wide": Shape(wide, (WIDE.context, WIDE.vocabulary)),
    "deep": Shape(deep, (DEEP.context, DEEP.vocabulary)),
    "vocabulary": Shape(vocabulary, (VOCABULARY.context, VOCABULARY.vocabulary)),
    "experts": Shape(experts, (EXPERTS.context, EXPERTS.vocabulary)),
    "convolutional": Shape(convolutional, (CLASSES,)),
}
