"""What one usually writes: data parallel in plain JAX, and Flax's recipe for FSDP.

Both leave the collectives to XLA's partitioner, and its options at their defaults.
"""

import functools

import jax
import optax
from flax import nnx
from model import LM, loss_fn

from benchmarks.job import CLIP, WHOLE, Contender, Job
from benchmarks.lm import Weights, as_stored, nats
from benchmarks.rule import dims_of, spec_of


def data_parallel(job: Job, weights: Weights) -> Contender:
    """Everything whole on each device, the batch in pieces."""
    tx = _clipping(job)
    whole = job.sharding(WHOLE)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        weights, moments = state

        def loss(weights):
            cast = jax.tree.map(lambda w: w.astype(job.dtype), weights)
            return nats(job.config, cast, batch["tokens"], as_stored) / job.tokens

        value, grads = jax.value_and_grad(loss)(weights)
        updates, moments = tx.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    placed = jax.device_put(weights, whole)
    state = placed, jax.jit(tx.init, out_shardings=whole)(placed)
    return Contender("data parallel", state, step, lambda: step.lower(state, job.batch))


def flax_fsdp(job: Job, weights: Weights) -> Contender:
    """An NNX model and its `nnx.Optimizer`, all leaves annotated over `data`."""
    tx = _clipping(job)

    def make(weights: Weights | None = None):
        model = LM(job.config, rngs=nnx.Rngs(0))
        if weights is not None:
            nnx.update(model, weights)
        return nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    graph, abstract = nnx.eval_shape(make)
    dims = dims_of(abstract, job.mesh.size)
    shardings = jax.tree.map(lambda dim: job.sharding(spec_of(dim)), dims)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        structure, params = nnx.split(model)

        def loss(params):
            cast = jax.tree.map(lambda w: w.astype(job.dtype), params)
            mean = loss_fn(nnx.merge(structure, cast), batch, None)
            return mean.total / mean.weight

        value, grads = jax.value_and_grad(loss)(params)
        optimizer.update(model, grads)
        after = nnx.state((model, optimizer))
        return jax.lax.with_sharding_constraint(after, shardings), value

    state = jax.jit(lambda weights: make(weights)[1], out_shardings=shardings)(weights)
    return Contender("Flax FSDP", state, step, lambda: step.lower(state, job.batch))


def _clipping(job: Job) -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(CLIP), job.optimizer)
