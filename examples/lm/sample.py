"""Text from a model, token by token, without a cache of keys and values."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def generate(
    model: Callable[[jax.Array], jax.Array],
    tokens: jax.Array,
    steps: int,
    rng: jax.Array,
    temperature: float = 0.8,
    context: int = 128,
) -> jax.Array:
    """Continue `tokens` by `steps` more, each drawn from what the model says comes next.

    All of it is one loop over a buffer of fixed length, so it may be jitted, with `steps`,
    `temperature` and `context` static.

    Arguments:
        model: tokens [B, T] to logits [B, T, V], causal.
        tokens: the prompt, int32 [B, P] with P of at least 1.
        steps: tokens to add.
        rng: a key; not used at temperature 0.
        temperature: 0 for the likeliest token, 1 for the model's own distribution.
        context: the most tokens that the model sees at once, as in training.

    Returns:
        int32 [B, P + steps].
    """
    prompt, total = tokens.shape[1], tokens.shape[1] + steps
    context = min(context, total)
    buffer = jnp.pad(tokens.astype(jnp.int32), ((0, 0), (0, steps)))  # [B, P + steps]

    def step(position: jax.Array, buffer: jax.Array) -> jax.Array:
        # The window ends at `position`, or starts at 0 while there is less than a context;
        # what it holds beyond `position` cannot be seen from there.
        start = jnp.maximum(position - context, 0)
        window = jax.lax.dynamic_slice_in_dim(buffer, start, context, axis=1)
        logits = jax.lax.dynamic_index_in_dim(
            model(window), position - start - 1, axis=1, keepdims=False
        ).astype(jnp.float32)  # [B, V]
        if temperature == 0:
            token = jnp.argmax(logits, axis=-1)
        else:
            key = jax.random.fold_in(rng, position)
            token = jax.random.categorical(key, logits / temperature)
        return jax.lax.dynamic_update_index_in_dim(
            buffer, token.astype(jnp.int32), position, axis=1
        )

    return jax.lax.fori_loop(prompt, total, step, buffer)
