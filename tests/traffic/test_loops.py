"""Ways to write a loop over layers: what is gathered in a layer is freed behind it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax
from jax.lax import scan  # a name of its own, as many models have
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
    return scan(lambda x, w: (imported(x, w, axes), None), x, w)[0]


LOOPS = [(imported, 1), (jitted, 1), (one_of_two, 1), (nested, 2)]


@pytest.mark.parametrize("loop, inner", LOOPS, ids=[loop.__name__ for loop, _ in LOOPS])
def test_gathered_weights_of_a_loop_are_not_kept(loop: Callable[..., jax.Array], inner: int):
    def step(layers: int, **settings: Any):
        zero = jzero.Zero(stage=3, mesh=build_mesh("cpu:8", data=8), **settings)

        def loss(params: dict[str, Any], batch: jax.Array, rng: jax.Array) -> jax.Array:
            return jnp.mean(loop(batch, params["w"], zero.axis_name))

        stack = (layers,) if inner == 1 else (layers // inner, inner)
        zero.setup_for(
            lambda key: {"w": jnp.ones((*stack, WIDTH, WIDTH))},
            optax.sgd(1.0),
            layer_axes={"w": tuple(range(len(stack)))},
        )
        return compiled(zero, loss, jax.ShapeDtypeStruct((8, WIDTH), jnp.float32))

    few, many, kept = step(4), step(8), step(8, keep_gathered=True)
    added = 4 * (many.size() - few.size())  # bytes of four layers, whole in fp32
    assert many.memory.temp_bytes - few.memory.temp_bytes < 0.3 * added, "an eighth is gradients"
    assert kept.memory.temp_bytes > many.memory.temp_bytes + added
    if loop is not one_of_two:  # how often a branch runs, a program does not say
        psi, data = many.size(), ("data",)
        assert many.volume == {("all-gather", data): 2 * psi, ("reduce-scatter", data): psi}
        assert kept.volume == {("all-gather", data): psi, ("reduce-scatter", data): psi}
