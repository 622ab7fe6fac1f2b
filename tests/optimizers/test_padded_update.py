"""Padding never enters an update: padded storage ends with the numbers of the true shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformations import make
from trees import FAST, FEW, abstract, placed, values

from jzero.optimizer_state import place_state
from jzero.optimizer_trace import updates_as_stored
from jzero.padding import pad, unpad, zero_padding
from jzero.partition import Array, Leaf
from jzero.paths import flatten, unflatten

NAMES = """adafactor adagrad adamw adam_with_ema_of_updates add_noise chain clip_by_block_rms lamb
    lion muon novograd partition prodigy rmsprop schedule_free_adamw sm3 MultiSteps""".split()


@pytest.mark.parametrize("name", NAMES)
def test_padded_updates_equal_true_ones(name, mesh_of):
    mesh, tx, shapes = mesh_of(7), make(name), abstract(FEW)
    leaves = placed(shapes, 2, mesh)
    assert sum(leaf.is_padded for leaf in leaves.values()) == 2
    state_leaves = place_state(tx, shapes, leaves, mesh)
    as_stored = updates_as_stored(tx, shapes, leaves, state_leaves)
    tree = unflatten(shapes, leaves)

    def over(f, leaves, x):
        return jax.tree.map(f, leaves, x)

    def plain(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def padded(params, state, grads):
        if as_stored:
            params, state = plain(params, state, grads)
            return over(zero_padding, tree, params), state
        args = over(unpad, tree, params), over(unpad, state_leaves, state), over(unpad, tree, grads)
        params, state = plain(*args)
        return over(pad, tree, params), over(pad, state_leaves, state)

    one, seven = (jax.jit(f, compiler_options=FAST) for f in (plain, padded))
    params = jax.tree.map(jnp.asarray, values(shapes, 0))
    state = tx.init(params)
    stored = over(pad, tree, params)
    stored_state = tx.init(stored) if as_stored else over(pad, state_leaves, state)
    for step in range(3):
        grads = values(shapes, step + 1)
        params, state = one(params, state, grads)
        stored, stored_state = seven(stored, stored_state, over(pad, tree, grads))
    close(over(unpad, tree, stored), params)
    close(over(unpad, state_leaves, stored_state), state)
    for path, x in flatten(stored).items():
        assert np.isfinite(x).all()
        assert np.array_equal(zero_padding(leaves[path], x), x)


def close(found, want):
    for (path, a), b in zip(flatten(found).items(), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(
            np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=2e-5, atol=1e-6, err_msg=path
        )


def leaf_of(shape, dim, padded):
    return Leaf(Array("w", shape, "float32"), dim, padded, True, True, True, "")


def test_pad_and_unpad_are_inverse():
    leaf = leaf_of((3, 5), 1, 8)
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    for array in (x, jnp.asarray(x)):
        stored = pad(leaf, array)
        assert type(stored) is type(array) and stored.shape == (3, 8) and not stored[:, 5:].any()
        assert np.array_equal(unpad(leaf, stored), x)
        assert unpad(leaf, array) is array
    assert (
        jax.eval_shape(lambda x: pad(leaf, x), jax.ShapeDtypeStruct((3, 5), "bool")).dtype == bool
    )
    whole = leaf_of((3, 5), None, 0)
    assert pad(whole, x) is x and unpad(whole, x) is x


def test_zero_padding():
    leaf = leaf_of((3, 5), 1, 8)
    x = jnp.full((3, 8), jnp.nan).at[:, :5].set(1.0)
    assert np.array_equal(zero_padding(leaf, x), pad(leaf, np.ones((3, 5), np.float32)))


def test_another_shape_is_named():
    leaf = leaf_of((3, 5), 1, 8)
    for f in (pad, zero_padding, unpad):
        with pytest.raises(ValueError, match=r"^w: expected an array of shape .* found \(3, 6\)"):
            f(leaf, np.zeros((3, 6), np.float32))
