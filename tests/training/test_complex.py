"""Models that compute with complex numbers: transforms, rotations, linear recurrences."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jzero

WIDTH = 16


def spectral(x, w):
    """Each channel filtered by its frequencies."""
    return jnp.tanh(jnp.fft.ifft(jnp.fft.fft(x) * jnp.fft.fft(w[0]) * jnp.exp(1j * w[1])).real @ w)


def real_spectral(x, w):
    return jnp.tanh(jnp.fft.irfft(jnp.fft.rfft(x) * jnp.sin(jnp.fft.rfft(w[0])), WIDTH) @ w)


def rotary(x, w):
    """Positions as angles, joined to complex numbers in pairs, as some language models do."""
    x = x @ w
    z = lax.complex(x[:, ::2], x[:, 1::2]) * jnp.exp(1j * jnp.arange(WIDTH // 2))
    return jnp.stack([z.real, z.imag], -1).reshape(x.shape)


def recurrent(x, w):
    """A diagonal state-space layer, with a loop of its own over the positions."""

    def step(state, u):
        state = jnp.exp(-jnp.abs(w[0]) + 1j * w[1]) * state + u
        return state, (state * state).real

    u = x @ w
    state, ys = lax.scan(step, jnp.zeros(WIDTH, jnp.complex64), u)
    return ys + jnp.abs(state)


def solved(x, w):
    """A linear system, solved iteratively: a call that holds several jaxprs."""
    right = x[0] * jnp.exp(1j * w[0])
    z = jax.scipy.sparse.linalg.cg(lambda v: v + 0.1 * (w @ (w.T @ v)), right, maxiter=4)[0]
    return jnp.tanh(x @ w + z.real + z.imag)


LAYERS = [spectral, real_spectral, rotary, recurrent, solved]


def unrolled(layer, x, ws):
    for w in ws:
        x = layer(x, jzero.gather(w))
    return x


def scanned(layer, x, ws):
    return lax.scan(lambda x, w: (layer(x, jzero.gather(w)), None), x, ws)[0]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("loop", [unrolled, scanned])
def test_stage_3_computes_what_stage_0_does(layer, loop):
    def train(stage):
        def init(key):
            w = jax.random.normal(key, (3, WIDTH, WIDTH)) / 4
            return {"layers": w if loop is scanned else list(w)}

        def loss(params, batch, rng):
            return jnp.mean(loop(layer, batch, params["layers"]) ** 2)

        zero = jzero.Zero(stage=stage)
        state, step = zero.init(init, optax.adam(0.01)), zero.train_step(loss)
        for _ in range(2):
            state, metrics = step(state, jax.random.normal(jax.random.key(1), (16, WIDTH)))
        return zero.params(state), metrics["loss"]

    for want, found in zip(*map(jax.tree.leaves, (train(0), train(3))), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
