"""What a step's memory should come to at most: terms that no compiler is asked for.

State and gradients come from the specs, the rest from shapes and from an abstract trace of the loss
on one device's rows.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.shapes import Shape
from jzero.explain import explain
from jzero.layout import Layout
from jzero.losses import loss_parts
from jzero.partition import STAGES
from jzero.plan.flops import remat_bodies, residual_bytes
from jzero.plan.leaves import Job, lay_out, layer_of


@dataclass(frozen=True)
class Bound:
    """The terms, in bytes of one device.

    Attributes:
      state: what stays between steps: weights, master weights, optimizer state.
      gradients: whole, or from stage 2 on a shard, in the dtype in which they are reduced.
      activations: what autodiff keeps of the loss for backward, weights and logits left out.
      logits: in float32, and their gradient.
      layers: two of the largest layer, gathered: from stage 1 on, where updated weights are
        gathered even if those of forward are whole.
      intermediates: what autodiff keeps inside of one rematerialised layer, the one with most; 0 in
        a model without remat, whose `activations` are all there are.
      leaf: the largest leaf, gathered, from stage 1 on; from stage 2 on also its gradient before
        it is reduce-scattered, which is among `gradients` below that. Of a stack it is one layer's.
    """

    state: int
    gradients: int
    activations: int
    logits: int
    layers: int
    intermediates: int
    leaf: int

    @property
    def total(self) -> int:
        return sum(asdict(self).values())


def bounds(shape: Shape, devices: int) -> dict[int, Bound]:
    """The bound at each stage.

    Arguments:
      shape: the model.
      devices: over which its state is sharded.
    """
    job = lay_out(shape.factory(), devices)
    logits = (job.micro_batch, *shape.logits)
    activations, intermediates = _activations(job, logits)
    found = {}
    for stage in STAGES:
        setup = job.setup.at_stage(stage)
        layers, leaf = _gathered(setup.layout)
        table = explain(setup.layout, setup.abstract_state(), accumulation=job.accumulate)
        found[stage] = Bound(
            state=table.total_bytes_per_device,
            gradients=table.gradient_bytes,
            activations=activations,
            logits=2 * 4 * math.prod(logits),
            layers=layers,
            intermediates=intermediates,
            leaf=leaf,
        )
    return found


def _gathered(layout: Layout) -> tuple[int, int]:
    """Two layers, and the largest leaf with its gradient."""
    stage = STAGES[layout.stage]
    if not stage.optimizer:
        return 0, 0
    weight, gradient = (
        jnp.dtype(each).itemsize for each in (layout.policy.compute, layout.policy.communication)
    )
    layers: dict[str, int] = {}
    for leaf in layout.leaves.values():
        layer = layer_of(leaf)
        if layer is not None:
            layers[layer] = layers.get(layer, 0) + leaf.array.layer_size
    largest = max(leaf.array.layer_size for leaf in layout.leaves.values())
    with_gradient = weight + (gradient if stage.gradients else 0)
    return 2 * weight * max(layers.values(), default=0), with_gradient * largest


def _activations(job: Job, logits: tuple[int, ...]) -> tuple[int, int]:
    """What one device keeps from forward to backward, and inside of one layer."""
    compute = job.setup.layout.policy.compute
    graph, weights = nnx.split(nnx.eval_shape(lambda: job.workload.init(rngs=nnx.Rngs(0))))
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, compute), weights)
    batch = job.workload.batch(job.micro_batch)

    def loss(weights: Any, batch: Any, *_: Any) -> jax.Array:
        return loss_parts(job.workload.loss_fn(nnx.merge(graph, weights), batch, None))[0]

    bodies = remat_bodies(jax.make_jaxpr(loss)(weights, batch))
    inside = max((residual_bytes(*body) for body in bodies), default=0)
    # Kept arrays that look like an argument are not counted: so logits are given as arguments.
    apart = [jax.ShapeDtypeStruct(logits, dtype) for dtype in ("float32", compute)]
    return residual_bytes(loss, weights, batch, *apart), inside
