"""State is born sharded: no device holds a whole sharded leaf, not even for a moment.

Read off the compiled program that makes the first state: the largest array in it.
"""

import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.nn import initializers
from jax.sharding import Mesh

import jzero
from jzero import birth
from jzero.whole_init import notice, whole_at_init

SHAPE = (104, 72)  # dim 0 divides by 8; for 7 it is stored as 105
LAYERS = 6


def compile_birth(monkeypatch, zero, init, **options):
    """(setup, text of the compiled program that makes the first state)."""
    setup = zero.setup_for(init, optax.adam(1e-3), **options)

    def only_compile(make, like, *args):
        shardings = jax.tree.map(lambda x: x.sharding, like)
        return jax.jit(make, out_shardings=shardings).lower(*args).compile()

    with monkeypatch.context() as patch:
        patch.setattr(birth, "_run", only_compile)
        state = setup.abstract_state()
        compiled: Any = birth.born(setup.model, setup.update, setup.scaling, 0, state)
    return setup, compiled.as_text()


def largest(text, dtypes=r"\w+"):
    """Elements of the largest array that any instruction makes or takes, inside fusions too."""
    sizes = re.findall(rf"\b(?:{dtypes})\[([\d,]+)\]", text)
    return max(math.prod(map(int, size.split(","))) for size in sizes)


def zero_of(devices, **options):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))
    return jzero.Zero(mesh=mesh, **options)


ORDINARY = {
    "normal": initializers.normal(),
    "lecun": initializers.lecun_normal(),
    "he": initializers.he_uniform(),
    "truncated": initializers.truncated_normal(),
    "uniform": initializers.uniform(),
    "zeros": initializers.zeros,
    "ones": initializers.ones,
}


@pytest.mark.parametrize("devices", [8, 7])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_initialisers_are_born_sharded(monkeypatch, name, devices):
    def init(key):
        return {"w": ORDINARY[name](key, SHAPE, jnp.float32)}

    zero = zero_of(devices, stage=3, precision="bf16")
    setup, text = compile_birth(monkeypatch, zero, init)
    leaf = setup.layout.leaves["w"]
    assert leaf.is_padded == (devices == 7)
    shard = math.prod(leaf.stored_shape) // devices
    assert largest(text) <= shard
    assert whole_at_init(setup.model.build, setup.layout) == {}


@pytest.mark.parametrize("devices", [8, 7])
@pytest.mark.parametrize("stage", [1, 2])
def test_masters_and_moments_are_born_sharded_below_stage_3(monkeypatch, stage, devices):
    def init(key):
        return {"w": initializers.lecun_normal()(key, SHAPE, jnp.float32)}

    zero = zero_of(devices, stage=stage, precision="bf16")
    setup, text = compile_birth(monkeypatch, zero, init)
    # Numbers are drawn for a shard alone; then the bf16 copy, whole at these stages, is gathered
    # (XLA:CPU does so in f32, so that the floats tell nothing).
    leaf = setup.layout.leaves["w"]
    assert largest(text, "u32|u64|pred") <= math.prod(leaf.stored_shape) // devices
    assert text.count(" all-gather(") == 1


class Stack(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(40, 72, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = make(rngs.split(LAYERS))


class Attention(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.MultiHeadDotProductAttention(4, qkv_features=48)(x)


@pytest.mark.parametrize("devices", [8, 7])
@pytest.mark.parametrize(
    "init, sample",
    [(lambda rngs: Stack(rngs), None), (Attention(), jnp.zeros((1, 4, 48)))],
    ids=["stacked", "attention"],
)
def test_layers_are_born_sharded(monkeypatch, init, sample, devices):
    zero = zero_of(devices, stage=3, precision="bf16")
    setup, text = compile_birth(monkeypatch, zero, init, sample=sample)
    leaves = setup.layout.leaves.values()
    assert largest(text) <= max(math.prod(x.stored_shape) // devices for x in leaves)
    assert whole_at_init(setup.model.build, setup.layout) == {}


TABLE = np.sin(np.arange(math.prod(SHAPE), dtype=np.float32).reshape(SHAPE))

NOT_LOCAL = {
    "qr": lambda key: initializers.orthogonal()(key, SHAPE, jnp.float32),
    "cholesky": lambda key: jnp.linalg.cholesky(jnp.eye(104) + 0 * jax.random.normal(key)),
    "fft": lambda key: jnp.fft.fft(jax.random.normal(key, SHAPE), axis=0).real,
    "cumsum": lambda key: jnp.cumsum(jax.random.normal(key, SHAPE), axis=0),
    "a constant array": lambda key: jnp.asarray(TABLE),
}


@pytest.mark.parametrize("name", NOT_LOCAL)
def test_initialisers_that_are_made_whole_are_named(monkeypatch, name):
    def init(key):
        return {"local": jax.random.normal(key, SHAPE), "odd": NOT_LOCAL[name](key)}

    zero = zero_of(8, stage=3)
    setup, text = compile_birth(monkeypatch, zero, init)
    assert whole_at_init(setup.model.build, setup.layout) == {"odd": name}
    assert largest(text) >= setup.layout.leaves["odd"].array.size  # it is true


@pytest.mark.parametrize("name", ["reshape", "sort"])
def test_some_are_made_whole_only_where_padded(monkeypatch, name):
    def init(key):
        if name == "sort":
            return {"w": jnp.sort(jax.random.normal(key, SHAPE), axis=0)}
        return {"w": jax.random.normal(key, (math.prod(SHAPE),)).reshape(SHAPE)}

    for devices, found in [(8, {}), (7, {"w": name})]:
        setup, text = compile_birth(monkeypatch, zero_of(devices, stage=3), init)
        assert whole_at_init(setup.model.build, setup.layout) == found
        assert (largest(text) >= math.prod(SHAPE)) == bool(found)


def test_inside_stacks_branches_and_loops():
    class Orthogonal(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(
                lambda rngs: nnx.Linear(8, 8, kernel_init=initializers.orthogonal(), rngs=rngs),
                in_axes=0,
                out_axes=0,
            )
            self.layers = make(rngs.split(LAYERS))

    setup = zero_of(8, stage=1, precision="bf16").setup_for(
        lambda rngs: Orthogonal(rngs), optax.sgd(0.1)
    )
    found = whole_at_init(setup.model.build, setup.layout)
    assert found == {"layers/kernel": "qr"}

    def looped(key):
        def layer(key, _):
            key, own = jax.random.split(key)
            return key, (initializers.orthogonal()(own, (8, 8)), jax.random.normal(own, (8, 8)))

        odd, even = jax.lax.scan(layer, key, length=LAYERS)[1]
        return {"odd": odd, "even": even}

    setup = zero_of(8, stage=3).setup_for(looped, optax.sgd(0.1))
    assert whole_at_init(setup.model.build, setup.layout) == {"odd": "qr"}


@pytest.mark.parametrize(
    "stage, precision, named", [(0, "bf16", 0), (2, "fp32", 0), (2, "bf16", 1), (3, "fp32", 1)]
)
def test_weights_that_stay_whole_anyway_are_not_named(stage, precision, named):
    setup = zero_of(8, stage=stage, precision=precision).setup_for(
        lambda key: {"w": initializers.orthogonal()(key, (8, 8))}, optax.sgd(0.1)
    )
    assert len(whole_at_init(setup.model.build, setup.layout)) == named


def test_the_notice_is_one_line():
    text = notice({f"layers/{i}/kernel": "qr" for i in range(7)})
    assert "layers/0/kernel (qr)" in text and " and 2 more; " in text and "\n" not in text


def test_weights_do_not_depend_on_stage_or_devices():
    def init(key):
        return {"w": initializers.lecun_normal()(key, SHAPE, jnp.float32)}

    want = np.asarray(init(jax.random.key(0))["w"])
    for devices, stage in [(8, 3), (7, 3), (7, 1), (1, 0)]:
        zero = zero_of(devices, stage=stage)
        state = zero.init(init, optax.adam(1e-3))
        np.testing.assert_array_equal(np.asarray(zero.params(state)["w"]), want)
