"""Muon with DeepSpeed's split and defaults: matrices by Muon, everything else by Adam."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.config.optimizer_params import MuonParams
from jzero.config.schedules import Schedule
from jzero.paths import path_name

# Names (any part of a leaf's path) that DeepSpeed leaves to Adam.
ADAM_NAMES = ("embed", "lm_head")
# Vectors by their last name, where it is not known what is stacked: a stack of vectors over layers
# has two dimensions and is still no matrix.
VECTOR_NAMES = ("bias", "scale")


def is_matrix(name: str, ndim: int, stacked: Callable[[str], bool] | None) -> bool:
    """Whether Muon updates a leaf.

    Arguments: the leaf's path and its dimensions; `stacked` tells which leaves have layers in
    their first dimension, which then does not count. Without it, a leaf named as a vector is one.
    """
    if any(part in name.lower() for part in ADAM_NAMES):
        return False
    if stacked is not None:
        return ndim - bool(stacked(name)) >= 2
    parts = [part for part in name.lower().split("/") if part != "value"]
    return ndim >= 2 and not (parts and parts[-1] in VECTOR_NAMES)


def orthogonalise(matrices: jax.Array) -> jax.Array:
    """The nearest orthogonal matrices, roughly: singular values between about 0.7 and 1.2.

    Arguments: (..., rows, columns). Five steps of Muon's quintic Newton-Schulz iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = jnp.swapaxes(matrices, -1, -2) if tall else matrices
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + 1e-7)
    for _ in range(5):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, -1, -2) if tall else x


def scale_by_orthogonal_momentum(momentum: float) -> optax.GradientTransformation:
    """Nesterov momentum, orthogonalised by five Newton-Schulz steps, scaled by √max(1, out / in).

    The last two dimensions (in, out) are the matrix, those before them a batch of matrices: the
    stacked layers of a scan, or experts. As in DeepSpeed's `muon_update` the momentum is a plain
    average; `optax.contrib.scale_by_muon` corrects its bias, which turns the second and later steps
    a little.
    """

    def init_fn(params: Any) -> optax.TraceState:
        return optax.TraceState(trace=jax.tree.map(jnp.zeros_like, params))

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.TraceState]:
        del params
        average = jax.tree.map(lambda g, m: momentum * m + (1 - momentum) * g, updates, state.trace)

        def direction(gradient: jax.Array, mean: jax.Array) -> jax.Array:
            rows, columns = gradient.shape[-2:]
            ahead = momentum * mean + (1 - momentum) * gradient
            result = orthogonalise(ahead)
            return max(1.0, columns / rows) ** 0.5 * result

        return jax.tree.map(direction, updates, average), optax.TraceState(trace=average)

    return optax.GradientTransformation(init_fn, update_fn)


def muon(
    params: MuonParams, matrices: Schedule, rest: Schedule, stacked: Callable[[str], bool] | None
) -> optax.GradientTransformation:
    """Muon for the matrices, Adam for the rest, each with its own schedule."""
    b1, b2 = params.betas

    def labels(tree: Any) -> Any:
        def label(path: Any, leaf: Any) -> str:
            return "muon" if is_matrix(path_name(path), jnp.ndim(leaf), stacked) else "adam"

        return jax.tree_util.tree_map_with_path(label, tree)

    return optax.partition(
        {
            "muon": optax.chain(
                scale_by_orthogonal_momentum(params.momentum),
                optax.add_decayed_weights(params.weight_decay),
                optax.scale_by_learning_rate(matrices),
            ),
            "adam": optax.adamw(rest, b1, b2, params.eps, weight_decay=params.weight_decay),
        },
        labels,
    )
