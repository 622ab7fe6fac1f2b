"""The language model of examples/lm without Flax: functions of a pytree of weights.

The arithmetic of attention and normalisation is the example's own; weights are nested dicts, and
those of the layers are stacked in dim 0.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from model import REMAT, LMConfig, attend, rms_norm, rotary

from jzero.plan.flops import count

Weights = dict[str, Any]
Whole = Callable[[str, Any], Any]
"""(name of a part: embed, layers, norm or head; its weights as stored) -> the weights to use."""


def nats(config: LMConfig, weights: Weights, tokens: jax.Array, whole: Whole) -> jax.Array:
    """The sum of the cross entropies of the next tokens.

    Arguments:
      config: the model's sizes; its layers are scanned.
      weights: as stored.
      tokens: [B, T + 1], int32.
      whole: makes weights usable where they are used; of `layers`, those of one layer.
    """

    def block(layer: Weights, x: jax.Array) -> jax.Array:
        return _block(config, whole("layers", layer), x)

    policy = REMAT[config.remat]
    if policy is not None:
        block = jax.checkpoint(block, policy=policy, prevent_cse=False)
    embed = whole("embed", weights["embed"])["embedding"]
    x = jnp.take(embed, tokens[:, :-1], axis=0)
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, weights["layers"])
    x = rms_norm(x, whole("norm", weights["norm"])["scale"])
    # A tied embedding is made whole once, and used at both ends.
    head = embed.T if config.tied else whole("head", weights["head"])["kernel"]
    logits = (x @ head).astype(jnp.float32)
    right = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - right)


def _block(config: LMConfig, w: Weights, x: jax.Array) -> jax.Array:
    batch, time, _ = x.shape
    heads, attention, mlp = (batch, time, -1, config.head_width), w["attention"], w["mlp"]
    h = rms_norm(x, w["attention_norm"]["scale"])
    q, k, v = ((h @ attention[name]["kernel"]).reshape(heads) for name in ("query", "key", "value"))
    y = attend(rotary(q, config.rope_base), rotary(k, config.rope_base), v)
    x = x + y.reshape(x.shape) @ attention["out"]["kernel"]
    h = rms_norm(x, w["mlp_norm"]["scale"])
    h = jax.nn.silu(h @ mlp["gate"]["kernel"]) * (h @ mlp["up"]["kernel"])
    return x + h @ mlp["down"]["kernel"]


def as_stored(name: str, weights: Any) -> Any:
    """The `Whole` of weights that are whole already."""
    return weights


def operations(config: LMConfig, weights: Weights, rows: int) -> float:
    """Floating-point operations of the products in a step: forward, and twice that backward.

    What rematerialisation computes again is not counted.
    """
    tokens = jax.ShapeDtypeStruct((rows, config.context + 1), jnp.int32)
    trace = jax.make_jaxpr(lambda weights, tokens: nats(config, weights, tokens, as_stored))
    return 3 * count(trace(weights, tokens)).once
