"""What a step needs beside its state: the layer in use, activations, operations.

Of a mere count of parameters these are estimates from the shape that language models of that size
have; of a model they are read from one abstract trace of its loss. The trace knows nothing of
XLA's fusions, so activations are an estimate there too.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jzero.errors import JzeroError
from jzero.factory import one_line
from jzero.losses import loss_parts
from jzero.partition import is_float
from jzero.paths import flatten, unflatten
from jzero.plan.flops import Work, count, remat_bodies, residual_bytes
from jzero.plan.leaves import Job, largest_layer, tokens_of
from jzero.recipe import Recipe
from jzero.sharded import Sharded, recording

# A Transformer layer has 12 width^2 parameters, and widths of 128 times the number of layers are
# usual (7B: 32 x 4096, 13B: 40 x 5120).
_LAYER_PARAMS = 12
_WIDTH_PER_LAYER = 128
_HEAD_WIDTH = 128
_VOCABULARY = 32_000
# Bytes of a layer's activations in 16 bits, by Korthikanti et al. (arXiv 2205.05198), section 4.1:
# tokens x (34 x width + 5 x heads x sequence).
_LAYER_BYTES = 34
_ATTENTION_BYTES = 5
_LONGEST_SEQUENCE = 4096


@dataclass(frozen=True)
class Demand:
    """What one device needs for one micro-batch.

    Attributes:
      layer_elements: parameters of the largest layer, which stage 3 gathers.
      activation_bytes: activations at their most, in backward.
      operations: floating-point operations, of forward, backward and rematerialisation.
      tokens: tokens of the micro-batch, or None where a batch has none.
      source: where this comes from, in words.
    """

    layer_elements: int
    activation_bytes: int
    operations: float
    tokens: int | None
    source: str


def of_count(params: int, tokens: int, element_bytes: int) -> Demand:
    """An estimate for a language model of so many parameters that rematerialises each layer.

    Arguments:
      params: parameters.
      tokens: per device and micro-batch.
      element_bytes: of the compute dtype.
    """
    layers = max(1, round((params / (_LAYER_PARAMS * _WIDTH_PER_LAYER**2)) ** (1 / 3)))
    width = (params / (_LAYER_PARAMS * layers)) ** 0.5
    heads, sequence = max(1, width / _HEAD_WIDTH), min(tokens, _LONGEST_SEQUENCE)
    inputs = layers * tokens * width * element_bytes
    layer = tokens * (_LAYER_BYTES * width + _ATTENTION_BYTES * heads * sequence)
    logits = tokens * min(_VOCABULARY, params / width) * (element_bytes + 4 + 4)  # two in fp32
    embedding = min(params, round(_VOCABULARY * width))
    return Demand(
        layer_elements=max(-(-params // layers), embedding),
        activation_bytes=round(inputs + layer * element_bytes / 2 + logits),
        operations=8.0 * params * tokens,  # 2 forward, 4 backward, 2 again
        tokens=tokens,
        source=f"estimated for a Transformer of {layers} layers of width {round(width)}, each "
        f"rematerialised, on {tokens:,} tokens a device and micro-batch",
    )


def of_job(job: Job) -> Demand:
    """The same for a model, from one abstract trace of its loss and the way back.

    Activations are what autodiff keeps between forward and backward, and, where layers are
    rematerialised, what the largest of them keeps inside.

    Raises:
      JzeroError: the loss cannot be traced.
    """
    found: list[tuple[int, Work]] = []

    def look(bound: tuple[Any, Any, Callable[..., Any]], batch: Any, key: Any) -> jax.Array:
        floats, rest, loss = bound
        jaxpr = jax.make_jaxpr(lambda p: loss(p, rest, batch, key))(floats)
        kept = residual_bytes(lambda p: loss(p, rest, batch, key), floats)
        inside = max((residual_bytes(*body) for body in remat_bodies(jaxpr)), default=0)
        found.append((kept + inside, count(jaxpr)))
        return jnp.float32(0)

    try:
        _trace(job, look)
    except JzeroError:
        raise
    except Exception as error:
        raise JzeroError(f"the loss cannot be traced: {one_line(error)}") from error
    activations, work = found[-1]
    tokens = tokens_of(job.workload.batch(job.micro_batch))
    return Demand(
        layer_elements=largest_layer(job),
        activation_bytes=activations,
        operations=3.0 * work.once + work.again,
        tokens=tokens,
        source=f"from a trace of the loss, {job.micro_batch} samples a device and micro-batch",
    )


def _trace(job: Job, look: Callable[..., jax.Array]) -> None:
    """Calls `look` inside the manual region, on one device's rows."""
    setup = job.setup
    layout, model = setup.layout, setup.model
    flat = flatten(setup.params)
    kinds = {p: layout.compute_dtype(leaf) for p, leaf in layout.leaves.items()}

    def wrap(values: dict[str, Any]) -> Any:
        recipes = {p: Recipe(leaf, (), (), kinds[p], kinds[p]) for p, leaf in layout.leaves.items()}
        return unflatten(setup.params, {p: Sharded(values[p], None, recipes[p]) for p in values})

    def loss(floats: dict[str, Any], rest: tuple[dict[str, Any], Any], batch: Any, key: Any):
        others, variables = rest
        bound = model.bind(wrap({**others, **floats}), variables, lambda key: key)
        return loss_parts(job.workload.loss_fn(bound, batch, key))[0]

    def bind(values: dict[str, Any], variables: Any, fold: Any):
        floats = {p: x for p, x in values.items() if is_float(kinds[p])}
        others = {p: x for p, x in values.items() if p not in floats}
        return floats, (others, variables), loss

    region = replace(setup.region(look, 1), model=replace(model, bind=bind))

    def run(values, variables, batch):
        with recording():
            region.trace(values, variables, batch)

    shapes = {
        p: x if kinds[p].startswith("key<") else jax.ShapeDtypeStruct(x.shape, kinds[p])
        for p, x in flat.items()
    }
    jax.make_jaxpr(run)(shapes, setup.variables, job.batch)
