"""The model of `model.py` in Flax Linen: equal weights give equal logits.

Both share the functions that hold no weights. Names of layers are equal too, so that a tree of NNX
weights is a tree of Linen's once the layers sit where the scan puts them (`from_nnx`).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from model import REMAT, LMConfig, attend, residual_stddev, rms_norm, rotary


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.param("scale", nn.initializers.ones, (x.shape[-1],)))


class Linear(nn.Module):
    outputs: int
    stddev: float = 0.02

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.normal(self.stddev)
        return x @ self.param("kernel", init, (x.shape[-1], self.outputs))


class Embedding(nn.Module):
    vocabulary: int
    width: int

    def setup(self):
        init = nn.initializers.normal(0.02)
        self.embedding = self.param("embedding", init, (self.vocabulary, self.width))

    def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T] -> [B, T, D]
        return jnp.take(self.embedding, tokens, axis=0)

    def logits(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, V]
        return x @ self.embedding.T


class Attention(nn.Module):
    config: LMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        config = self.config
        batch, time, _ = x.shape

        def heads(name: str, count: int) -> jax.Array:  # [B, T, count, C]
            y = Linear(count * config.head_width, name=name)(x)
            return y.reshape(batch, time, count, config.head_width)

        q = rotary(heads("query", config.heads), config.rope_base)
        k = rotary(heads("key", config.kv_heads), config.rope_base)
        y = attend(q, k, heads("value", config.kv_heads)).reshape(batch, time, config.width)
        return Linear(config.width, residual_stddev(config), name="out")(y)


class SwiGLU(nn.Module):
    config: LMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D] -> [B, T, D]
        config = self.config
        gate = Linear(config.mlp, name="gate")(x)
        y = jax.nn.silu(gate) * Linear(config.mlp, name="up")(x)
        return Linear(config.width, residual_stddev(config), name="down")(y)


class Block(nn.Module):
    config: LMConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, None]:  # a pair, as nn.scan wants it
        x = x + Attention(self.config, name="attention")(RMSNorm(name="attention_norm")(x))
        return x + SwiGLU(self.config, name="mlp")(RMSNorm(name="mlp_norm")(x)), None


class LM(nn.Module):
    """Tokens [B, T], int32, to next-token logits [B, T, V]."""

    config: LMConfig

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        config, block = self.config, Block
        policy = REMAT[config.remat]
        if policy is not None:
            block = nn.remat(block, policy=policy, prevent_cse=not config.scan)
        embed = Embedding(config.vocabulary, config.width, name="embed")
        x = embed(tokens)
        if config.scan:
            scanned = nn.scan(
                block,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=config.layers,
            )
            x, _ = scanned(config, name="layers")(x)
        else:
            for index in range(config.layers):
                x, _ = block(config, name=f"layers_{index}")(x)
        x = RMSNorm(name="norm")(x)
        return embed.logits(x) if config.tied else Linear(config.vocabulary, name="head")(x)


def from_nnx(model: nnx.Module) -> dict[str, Any]:
    """Linen variables with the weights of an NNX `LM`, scanned or unrolled alike."""
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    layers = params["layers"]
    if 0 in layers:  # unrolled: a list, numbered from 0
        del params["layers"]
        params |= {f"layers_{index}": layer for index, layer in layers.items()}
    return {"params": params}
