"""Workloads to compile: a scanned stack of layers as a plain function, and jobs that go wrong."""

import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jzero

VOCABULARY, WIDTH, HIDDEN, LAYERS, LENGTH = 64, 2048, 8192, 8, 512
PARAMETERS = 2 * VOCABULARY * WIDTH + LAYERS * 2 * WIDTH * HIDDEN
ROW_BYTES = 4 * (LENGTH + 1)


def init(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 4)
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "up": (LAYERS, WIDTH, HIDDEN),
        "down": (LAYERS, HIDDEN, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    return {
        name: 0.02 * jax.random.normal(k, shape)
        for k, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def stack(remat: Callable[..., Any]) -> Callable[..., jax.Array]:
    """A loss function whose scanned layers are so rematerialised."""

    def layer(x, weights):
        up, down = (jzero.gather(weight) for weight in weights)
        return x + jax.nn.gelu(x @ up) @ down, None

    def loss_fn(params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        tokens = batch["tokens"]
        x = jzero.gather(params["embed"])[tokens[:, :-1]]
        x, _ = jax.lax.scan(remat(layer), x, (params["up"], params["down"]))
        logits = (x @ jzero.gather(params["head"])).astype(jnp.float32)
        nats = -jax.nn.log_softmax(logits)
        return jnp.mean(jnp.take_along_axis(nats, tokens[:, 1:, None], axis=-1))

    return loss_fn


loss_fn = stack(functools.partial(jax.checkpoint, prevent_cse=False))


def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}


def small() -> jzero.Workload:
    return jzero.Workload(init, loss_fn, batch)


def pinned() -> jzero.Workload:
    """With the barrier that remat has unless told otherwise."""
    return jzero.Workload(init, stack(jax.checkpoint), batch)


def mixed() -> jzero.Workload:
    """A small stack that shows its layer axis in its loss alone, on a batch of many dtypes."""

    def init(key: jax.Array) -> dict[str, jax.Array]:
        return {"layers": 0.1 * jax.random.normal(key, (4, 96, 96)), "scale": jnp.ones(96)}

    def loss_fn(params, batch: dict[str, jax.Array], rng: jax.Array) -> jzero.Mean:
        scale = jzero.gather(params["scale"])
        noise = jax.vmap(lambda key: jax.random.normal(key, (96,)))(batch["key"])
        x = (batch["x"] + 0.1 * noise).astype(scale.dtype)
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ jzero.gather(w)), None), x, params["layers"])
        x = (x * scale)[jnp.arange(x.shape[0]), batch["label"]].astype(jnp.float32)
        weight = batch["mask"].astype(jnp.float32)
        return jzero.Mean(jnp.sum(jnp.square(x) * weight), jnp.sum(weight))

    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        key = jax.eval_shape(lambda: jax.random.key(0)).dtype
        dtypes = {"label": jnp.int32, "mask": jnp.bool, "key": key}
        flat = {name: jax.ShapeDtypeStruct((rows,), dtype) for name, dtype in dtypes.items()}
        return {"x": jax.ShapeDtypeStruct((rows, 96), jnp.bfloat16), **flat}

    config = {
        "gradient_accumulation_steps": 2,
        "bf16": {"enabled": True},
        "wall_clock_breakdown": True,
        "zero_optimization": {"stage3_param_persistence_threshold": 0},
    }
    return jzero.Workload(init, loss_fn, batch, config=config)


def unrolled() -> jzero.Workload:
    """Two layers without a scan."""

    def init(key: jax.Array) -> list[jax.Array]:
        return [0.02 * jax.random.normal(key, (WIDTH, WIDTH)) for _ in range(2)]

    def loss_fn(params, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        x = jax.nn.one_hot(batch["tokens"], WIDTH, dtype=jnp.bfloat16)
        for weight in params:
            x = jnp.tanh(x @ jzero.gather(weight))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    return jzero.Workload(init, loss_fn, batch)


class Tensor(nnx.Module):
    """Scanned layers whose weights the model itself shards over `tensor`."""

    def __init__(self, rngs: nnx.Rngs):
        def linear(rngs: nnx.Rngs, inputs: int, outputs: int, *names: str | None) -> nnx.Linear:
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def layers(rngs: nnx.Rngs):
            return linear(rngs, 16, 32, None, "tensor"), linear(rngs, 32, 16, "tensor", None)

        self.up, self.down = layers(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x, up, down):
            return x + down(nnx.tanh(up(x)))

        scan = nnx.scan(layer, in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        return scan(x, self.up, self.down)


def tensor() -> jzero.Workload:
    def loss_fn(model: Tensor, batch: dict[str, jax.Array], rng: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(batch["x"])))

    def batch(rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"x": jax.ShapeDtypeStruct((rows, 16), jnp.float32)}

    return jzero.Workload(Tensor, loss_fn, batch)


def talks() -> jzero.Workload:
    print("what a file prints is nobody's table")
    return small()


def configured() -> jzero.Workload:
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return jzero.Workload(init, loss_fn, batch, config=config)


def raises() -> jzero.Workload:
    raise KeyError("vocabulary")


def dies() -> jzero.Workload:
    os.write(2, b"the last words\n")
    os._exit(7)


def cannot_trace() -> jzero.Workload:
    return jzero.Workload(init, lambda params, batch, rng: batch["nothing"], batch)


def cannot_compile() -> jzero.Workload:
    return _compile_says("INTERNAL: the compiler\nis confused")


def too_large() -> jzero.Workload:
    return _compile_says(
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (34.42G) exceeds available HBM (15.75G)."
    )


def _compile_says(message: str) -> jzero.Workload:
    # This runs in the worker. XLA:CPU itself refuses nothing.
    def compile(self, compiler_options=None, **others):
        raise RuntimeError(message)

    jax.stages.Lowered.compile = compile
    return small()
