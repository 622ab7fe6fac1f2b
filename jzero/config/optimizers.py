"""Optax transformations with the semantics and defaults of DeepSpeed's optimizers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.config import optimizer_params as p
from jzero.config.config import Config
from jzero.config.muon import muon
from jzero.config.schedules import Schedule, build_schedule
from jzero.errors import ConfigError


def _adam(params: p.AdamParams, rate: Schedule) -> optax.GradientTransformation:
    b1, b2 = params.betas
    decoupled = params.adam_w_mode or isinstance(params, p.AdamWParams)
    if decoupled:
        return optax.adamw(rate, b1, b2, params.eps, weight_decay=params.weight_decay)
    return optax.chain(
        _l2(params.weight_decay),
        optax.scale_by_adam(b1, b2, params.eps),
        optax.scale_by_learning_rate(rate),
    )


def _l2(weight_decay: float) -> optax.GradientTransformation:
    """Weight decay added to the gradient, before anything else sees it."""
    return optax.add_decayed_weights(weight_decay) if weight_decay else optax.identity()


def scale_by_clamped_trust_ratio(least: float, most: float) -> optax.GradientTransformation:
    """Scale each leaf's update by ‖parameter‖ / ‖update‖, kept between `least` and `most`.

    A leaf whose parameter or update is all zeros is left as it is, as in DeepSpeed's Lamb.
    """

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("Lamb's update needs the parameters: tx.update(grads, state, params)")

        def scale(update: jax.Array, param: jax.Array) -> jax.Array:
            size = jnp.linalg.norm(param.astype(jnp.float32).ravel())
            step = jnp.linalg.norm(update.astype(jnp.float32).ravel())
            zero = (size == 0) | (step == 0)
            ratio = jnp.clip(size / jnp.where(zero, 1.0, step), least, most)
            return update * jnp.where(zero, 1.0, ratio).astype(update.dtype)

        return jax.tree.map(scale, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update_fn)


def _lamb(params: p.LambParams, rate: Schedule) -> optax.GradientTransformation:
    b1, b2 = params.betas
    return optax.chain(
        optax.scale_by_adam(b1, b2, params.eps),
        optax.add_decayed_weights(params.weight_decay),
        scale_by_clamped_trust_ratio(params.min_coeff, params.max_coeff),
        optax.scale_by_learning_rate(rate),
    )


def scale_by_adagrad(start: float, eps: float) -> optax.GradientTransformation:
    """Divide by the root of the sum of squares, plus `eps` outside the root as torch.optim has it.

    (`optax.scale_by_rss` adds its eps inside; the state is the same.)
    """
    init_fn = optax.scale_by_rss(start, eps).init

    def update_fn(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        total = jax.tree.map(lambda g, t: g * g + t, updates, state.sum_of_squares)
        scaled = jax.tree.map(lambda g, t: g / (jnp.sqrt(t) + eps), updates, total)
        return scaled, optax.ScaleByRssState(sum_of_squares=total)

    return optax.GradientTransformation(init_fn, update_fn)


def _adagrad(params: p.AdagradParams, rate: Schedule) -> optax.GradientTransformation:
    return optax.chain(
        _l2(params.weight_decay),
        scale_by_adagrad(params.initial_accumulator_value, params.eps),
        optax.scale_by_learning_rate(rate),
    )


def _lion(params: p.LionParams, rate: Schedule) -> optax.GradientTransformation:
    b1, b2 = params.betas
    return optax.lion(rate, b1, b2, weight_decay=params.weight_decay)


def _sgd(params: p.SgdParams, rate: Schedule) -> optax.GradientTransformation:
    momentum = (
        optax.trace(params.momentum, nesterov=params.nesterov)
        if params.momentum
        else optax.identity()
    )
    return optax.chain(_l2(params.weight_decay), momentum, optax.scale_by_learning_rate(rate))


def build_optimizer(
    config: Config, *, stacked: Callable[[str], bool] | None = None
) -> tuple[optax.GradientTransformation, Schedule]:
    """The Optax transformation and the learning-rate schedule that a configuration names.

    Arguments: the configuration; `stacked`, for Muon, tells whether the leaf of a given path
    ("layers/attention/query/kernel") is stacked over layers in its first dimension.

    Returns: the transformation, whose own count drives the schedule (so a skipped step does not
    advance it), and the schedule, a function of the optimizer step from 0 (for Muon, that of the
    matrices).

    Raises: `ConfigError` if the configuration has no `optimizer`.

        >>> from jzero.config import load
        >>> tx, schedule = build_optimizer(load({"optimizer": {"type": "Adam"}}))
        >>> schedule(0)
        0.001
    """
    optimizer = config.optimizer
    if optimizer is None:
        raise ConfigError(
            "optimizer: absent from the configuration; add one "
            '(such as {"type": "AdamW", "params": {"lr": 3e-4}}) or give an Optax transformation'
        )
    params = optimizer.params
    if isinstance(params, p.MuonParams):
        shared = params.lr
        matrices, rest = (
            build_schedule(config.scheduler, own if own is not None else _or(shared, default))
            for own, default in ((params.muon_lr, 0.02), (params.adam_lr, 3e-4))
        )
        return muon(params, matrices, rest, stacked), matrices
    rate = build_schedule(config.scheduler, params.lr)
    builders: list[tuple[type, Callable[[Any, Schedule], optax.GradientTransformation]]] = [
        (p.AdamParams, _adam),
        (p.LambParams, _lamb),
        (p.LionParams, _lion),
        (p.AdagradParams, _adagrad),
        (p.SgdParams, _sgd),
    ]
    build = next(build for kind, build in builders if isinstance(params, kind))
    return build(params, rate), rate


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
