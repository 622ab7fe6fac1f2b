"""Every transformation updates sharded state to the numbers of one device, and keeps it sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from transformations import NAMES, NOT_UPDATED, extra_arguments, make
from trees import FAST, FEW, abstract, loss, placed, values

from jzero.optimizer_state import place_state
from jzero.partition import Leaf
from jzero.paths import flatten, unflatten

# scale_by_adam and the like run inside the alias of that name.
UPDATED = [
    name
    for name in NAMES
    if name not in NOT_UPDATED and name.removeprefix("scale_by_") not in set(NAMES) - {name}
]


@pytest.mark.parametrize("name", UPDATED)
def test_sharded_updates_equal_those_of_one_device(name, mesh_of):
    mesh, tx, shapes = mesh_of(8), make(name), abstract(FEW)
    leaves = placed(shapes, 3, mesh)
    state_leaves = place_state(tx, shapes, leaves, mesh)
    tx = optax.with_extra_args_support(tx)

    def sharding(leaf: Leaf):
        return mesh.sharding(leaf.spec(mesh.shard_axes, leaf.shard_state))

    of_params = jax.tree.map(sharding, unflatten(shapes, leaves))
    of_state = jax.tree.map(sharding, state_leaves)

    def update(params, state, grads):
        extra = extra_arguments(name, loss, params, grads)
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    one = jax.jit(update, compiler_options=FAST)
    eight = jax.jit(update, out_shardings=(of_params, of_state), compiler_options=FAST)
    params = jax.tree.map(jnp.asarray, values(shapes, 0))
    state = tx.init(params)
    sharded = jax.device_put((params, state), (of_params, of_state))
    for step in range(3):
        grads = jax.tree.map(
            lambda p, noise: 2 * p - 1 + 0.01 * noise, params, values(shapes, step)
        )
        params, state = one(params, state, grads)
        sharded = eight(*sharded, jax.device_put(grads, of_params))
    close(sharded, (params, state))
    for path, leaf in flatten(state_leaves).items():
        x = flatten(sharded[1])[path]
        assert x.sharding.is_equivalent_to(sharding(leaf), x.ndim), path
        if leaf.shard_state:
            assert {s.data.size * 8 for s in x.addressable_shards} == {x.size}, path


def close(found, want):
    for (path, a), b in zip(flatten(found).items(), jax.tree.leaves(want), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(b).all(), path
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6, err_msg=path)
