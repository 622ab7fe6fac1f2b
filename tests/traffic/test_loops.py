"""However a model writes its loop: what it gathers in a layer is freed behind it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.lax import scan  # a name of its own, before jzero can change anything
from steps import build_mesh, compiled

import jzero

WIDTH = 64


def layer(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
    return jnp.tanh(x @ jzero.gather(w)), None


def imported(x: jax.Array, w: Any, axes: Any) -> jax.Array:
    return scan(layer, x, w)[0]


def jitted(x: jax.Array, w: Any, axes: Any) -> jax.Array:
    return jax.jit(lambda x, w: lax.scan(layer, x, w)[0])(x, w)


def one_of_two(x: jax.Array, w: Any, axes: Any) -> jax.Array:
    alike = lax.psum(x[0, 0], axes) < 9  # devices must gather together
    return lax.cond(alike, lambda x, w: imported(x, w, axes), lambda x, w: x, x, w)


def nested(x: jax.Array, w: Any, axes: Any) -> jax.Array:
    def twice(x: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return scan(lambda x, _: layer(x, w), x, length=2)

    return scan(twice, x, w)[0]


@pytest.mark.parametrize("loop", [imported, jitted, one_of_two, nested])
def test_gathered_weights_of_a_loop_are_not_kept(loop: Callable[..., jax.Array]):
    def step(layers: int, **settings: Any):
        zero = jzero.Zero(stage=3, mesh=build_mesh("cpu:8", data=8), **settings)

        def loss(params: dict[str, Any], batch: jax.Array, rng: jax.Array) -> jax.Array:
            return jnp.mean(loop(batch, params["w"], zero.axis_name))

        shape = (layers, WIDTH, WIDTH)
        zero.setup_for(lambda key: {"w": jnp.ones(shape)}, optax.sgd(1.0), layer_axes={"w": 0})
        return compiled(zero, loss, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))

    few, many, kept = step(4), step(8), step(8, keep_gathered=True)
    added = 4 * (many.size() - few.size())  # bytes of four layers, whole in fp32
    assert many.memory.temp_bytes - few.memory.temp_bytes < 0.3 * added, "an eighth is gradients"
    assert kept.memory.temp_bytes > many.memory.temp_bytes + added
    if loop is not one_of_two:  # how often a branch runs, a program does not say
        once = kept.volume["all-gather", ("data",)]
        assert once and many.volume["all-gather", ("data",)] == 2 * once
        assert many.volume["reduce-scatter", ("data",)] == once
