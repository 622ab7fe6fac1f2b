"""The train step of each ZeRO stage, written by hand for this one model.

What a specialist would write who needs only this: one shard_map over the whole step, each stage's
collectives in place, the Optax update on shards.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from benchmarks.job import CLIP, ROWS, WHOLE, Contender, Job
from benchmarks.lm import Weights, nats
from benchmarks.rule import UNSHARDED, dims_of, spec_of


class State(NamedTuple):
    """What is kept between steps.

    Attributes:
      weights: whole, in the compute dtype; {} at stage 3.
      master: fp32 shards; {} below stage 3 in fp32, where the weights are the masters.
      moments: Optax's state, over shards.
    """

    weights: Weights
    master: Weights
    moments: Any


def contender(job: Job, weights: Weights, compiler_options: dict[str, Any]) -> Contender:
    """The step of the job's stage.

    Arguments:
      job: the job.
      weights: to begin with, fp32 and whole.
      compiler_options: XLA's, as `jax.jit` takes them.
    """
    dims = dims_of(weights, job.mesh.size if job.stage else 1)
    specs = _specs(job, weights, dims)
    first = jax.jit(functools.partial(_first, job), out_shardings=jax.tree.map(job.sharding, specs))
    state = first(weights)
    step = jax.jit(
        jax.shard_map(
            functools.partial(_step, job, dims),
            mesh=job.mesh,
            in_specs=(specs, {"tokens": ROWS}),
            out_specs=(specs, WHOLE),
            check_vma=False,
        ),
        donate_argnums=0,
        compiler_options=compiler_options or None,
    )
    return Contender("by hand", state, step, lambda: step.lower(state, job.batch))


def _has_weights(job: Job) -> bool:
    return job.stage < 3


def _has_master(job: Job) -> bool:
    return job.stage == 3 or job.precision != "fp32"


def _first(job: Job, weights: Weights) -> State:
    cast = jax.tree.map(lambda w: w.astype(job.dtype), weights)
    return State(
        cast if _has_weights(job) else {},
        weights if _has_master(job) else {},
        job.optimizer.init(weights),
    )


def _specs(job: Job, weights: Weights, dims: Any) -> State:
    sharded = jax.tree.map(spec_of, dims)
    moments = optax.tree.map_params(
        job.optimizer,
        lambda _, spec: spec,
        jax.eval_shape(job.optimizer.init, weights),
        sharded,
        transform_non_params=lambda _: WHOLE,
    )
    whole = jax.tree.map(lambda _: WHOLE, dims)
    return State(whole if _has_weights(job) else {}, sharded if _has_master(job) else {}, moments)


# --- on one device -------------------------------------------------------------------------------


def _step(job: Job, dims: Any, state: State, batch: dict[str, jax.Array]):
    stored = state.weights or state.master

    def whole(part: str, pair: tuple[Weights, Weights]) -> Weights:
        inside = jax.tree.map(_in_layer, dims[part]) if part == "layers" else dims[part]
        return jax.tree.map(functools.partial(_read, job.stage), inside, *pair)

    def loss(taps: Weights) -> jax.Array:
        pairs = {part: (stored[part], taps[part]) for part in stored}
        return nats(job.config, pairs, batch["tokens"], whole) / job.tokens

    value, grads = jax.value_and_grad(loss)(_taps(job, stored, dims))
    grads = jax.tree.map(functools.partial(_reduced, job.stage), dims, grads)
    value, norm = lax.psum(value, "data"), _norm(dims, grads)
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm / CLIP, 1), grads)
    old = state.master or jax.tree.map(_own, dims, state.weights)
    updates, moments = job.optimizer.update(grads, state.moments, old)
    # A step whose gradients or loss are not finite is left out, as jzero does it.
    finite = jnp.isfinite(norm) & jnp.isfinite(value)
    keep = functools.partial(jax.tree.map, lambda new, old: jnp.where(finite, new, old))
    master, moments = keep((optax.apply_updates(old, updates), moments), (old, state.moments))
    weights = _published(job, dims, master, state.weights) if state.weights else {}
    return State(weights, master if state.master else {}, moments), value


def _taps(job: Job, stored: Weights, dims: Any) -> Weights:
    """Zeros that only backward sees, so that gradients come in the compute dtype and in shards."""

    def zeros(dim: int, x: jax.Array) -> jax.Array:
        shape = list(x.shape)
        if job.stage == 2 and dim != UNSHARDED:
            shape[dim] //= job.mesh.size
        return jnp.zeros(shape, job.dtype)

    return jax.tree.map(zeros, dims, stored)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _read(stage: int, dim: int, stored: jax.Array, tap: jax.Array) -> jax.Array:
    x = stored.astype(tap.dtype)
    if stage == 3 and dim != UNSHARDED:
        return lax.all_gather(x, "data", axis=dim, tiled=True)
    return x


def _read_backward(stage: int, dim: int, _: None, gradient: jax.Array):
    if stage >= 2 and dim != UNSHARDED:
        gradient = lax.psum_scatter(gradient, "data", scatter_dimension=dim, tiled=True)
    return None, gradient


_read.defvjp(lambda *arguments: (_read(*arguments), None), _read_backward)


def _in_layer(dim: int) -> int:
    """A dimension of a stacked weight as that of one layer."""
    return dim if dim == UNSHARDED else dim - 1


def _reduced(stage: int, dim: int, gradient: jax.Array) -> jax.Array:
    """A gradient as the optimizer takes it, summed over the devices."""
    if dim == UNSHARDED:
        gradient = lax.psum(gradient, "data")
    elif stage == 1:
        gradient = lax.psum_scatter(gradient, "data", scatter_dimension=dim, tiled=True)
    return gradient.astype(jnp.float32)


def _norm(dims: Any, grads: Weights) -> jax.Array:
    """The global norm of the gradients."""
    squares = jax.tree.map(lambda g: jnp.sum(jnp.square(g)), grads)
    pairs = list(zip(jax.tree.leaves(dims), jax.tree.leaves(squares), strict=True))
    whole = sum(square for dim, square in pairs if dim == UNSHARDED)
    shards = sum(square for dim, square in pairs if dim != UNSHARDED)
    return jnp.sqrt(whole + lax.psum(shards, "data"))


def _own(dim: int, weight: jax.Array) -> jax.Array:
    """This device's shard of a whole weight."""
    if dim == UNSHARDED:
        return weight
    size = weight.shape[dim] // lax.axis_size("data")
    return lax.dynamic_slice_in_dim(weight, lax.axis_index("data") * size, size, axis=dim)


def _published(job: Job, dims: Any, master: Weights, old: Weights) -> Weights:
    """Whole weights from updated shards, those of the layers gathered one layer at a time."""

    def gathered(dim: int, shard: jax.Array) -> jax.Array:
        x = shard.astype(job.dtype)
        return x if dim == UNSHARDED else lax.all_gather(x, "data", axis=dim, tiled=True)

    def layer(i: jax.Array, buffers: Weights) -> Weights:
        def one(dim: int, shard: jax.Array, buffer: jax.Array) -> jax.Array:
            piece = lax.dynamic_index_in_dim(shard, i, 0, keepdims=False)
            piece = gathered(_in_layer(dim), piece)
            return lax.dynamic_update_index_in_dim(buffer, piece, i, 0)

        return jax.tree.map(one, dims["layers"], master["layers"], buffers)

    new = {part: jax.tree.map(gathered, dims[part], master[part]) for part in master}
    sharded = any(dim != UNSHARDED for dim in jax.tree.leaves(dims))
    if sharded:
        new["layers"] = lax.fori_loop(0, job.config.layers, layer, old["layers"])
    return new
