"""Every leaf of every Optax state has a place, and what is large is sharded."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from transformations import NAMES, WITHOUT_NONE, aliases, make
from trees import SHAPES, abstract, placed

from jzero.errors import JzeroError
from jzero.mesh import make_zero_mesh
from jzero.optimizer_state import match, place_state
from jzero.partition import Leaf
from jzero.paths import flatten


def is_leaf(x):
    return isinstance(x, Leaf)


def parameters(name):
    if name == "lookahead":
        return optax.LookaheadParams(fast=abstract(), slow=abstract())
    return abstract({k: v for k, v in SHAPES.items() if v is not None or name not in WITHOUT_NONE})


def state_of(name, mesh, stage=1, tensor=None):
    params = parameters(name)
    leaves = placed(params, stage, mesh, tensor)
    tx = make(name)
    return tx, params, leaves, place_state(tx, params, leaves, mesh)


def test_every_alias_is_covered():
    assert len(aliases()) > 100
    for name in NAMES:
        make(name)


@pytest.mark.parametrize("devices", [5, 6, 7, 8])
@pytest.mark.parametrize("name", NAMES)
def test_every_state_is_placed(name, devices, mesh_of):
    mesh = mesh_of(devices)
    tx, params, parameter_leaves, state = state_of(name, mesh)
    want = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(state, is_leaf=is_leaf) == jax.tree.structure(want)
    own = {p: leaf.array.shape for p, leaf in parameter_leaves.items() if leaf.shard_state}
    for leaf, x in zip(jax.tree.leaves(state, is_leaf=is_leaf), jax.tree.leaves(want), strict=True):
        assert leaf.array.shape == x.shape and leaf.array.dtype == str(x.dtype)
        assert leaf.reason
        spec = leaf.spec(mesh.shard_axes, leaf.shard_state)
        assert len(spec) <= x.ndim
        assert leaf.shard_state == (leaf.dim is not None) == ("data" in spec)
        assert not leaf.shard_parameter and not leaf.shard_gradient
        if leaf.shard_state:
            assert leaf.padded % devices == 0 and leaf.dim not in leaf.array.layer_axes
            assert 0 <= leaf.padded - x.shape[leaf.dim] < devices
            mesh.sharding(spec).shard_shape(leaf.stored_shape)
        whole_by_layers = len(leaf.array.layer_axes) == x.ndim
        of_parameter = any(leaf.path.endswith(p) and x.shape == shape for p, shape in own.items())
        if of_parameter or (x.size >= 8 * devices and not whole_by_layers):
            assert leaf.shard_state, leaf
    total = sum(leaf.array.size for leaf in jax.tree.leaves(state, is_leaf=is_leaf))
    if total > 1000:
        kept = sum(
            np.prod(leaf.stored_shape, dtype=int) // (devices if leaf.shard_state else 1)
            for leaf in jax.tree.leaves(state, is_leaf=is_leaf)
        )
        assert kept < 1.45 * total / devices


@pytest.mark.parametrize("name", NAMES)
def test_tensor_axes_are_inherited_where_shapes_agree(name):
    mesh = make_zero_mesh(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor")))
    _, _, parameter_leaves, state = state_of(name, mesh, tensor="tensor")
    kernels = [x for p, x in parameter_leaves.items() if p.endswith("kernel")]
    for leaf in jax.tree.leaves(state, is_leaf=is_leaf):
        spec = leaf.spec(mesh.shard_axes, leaf.shard_state)
        mesh.sharding(spec).shard_shape(leaf.stored_shape)
        if leaf.array.shape == kernels[0].array.shape:
            assert spec == kernels[0].spec(mesh.shard_axes, True)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon", "lbfgs"])
def test_stage_0_and_one_device_keep_everything(name, mesh_of):
    for devices, stage, why in [(7, 0, "stage 0 shards nothing"), (1, 2, "one device")]:
        mesh = mesh_of(devices)
        leaves = jax.tree.leaves(state_of(name, mesh, stage)[-1], is_leaf=is_leaf)
        assert not any(x.shard_state or x.is_padded for x in leaves)
        assert any(why in x.reason for x in leaves)


def test_a_parameter_that_stays_whole_has_sharded_state(mesh_of):
    from jzero.partition import Array, place

    mesh = mesh_of(8)
    leaves = place({"norm": Array("norm", (16,), "float32")}, 3, mesh, persistence_threshold=100)
    assert not leaves["norm"].shard_parameter
    params = {"norm": jax.ShapeDtypeStruct((16,), jnp.float32)}
    mu = flatten(place_state(optax.adam(1.0), params, leaves, mesh), is_leaf)["0/mu/norm"]
    assert mu.shard_state and mu.dim == 0
    assert mu.reason == "like parameter norm, whose dim 0 of 16 divides by 8"


def one(tx, shapes, mesh, layers=(), other=()):
    from jzero.partition import Array, place

    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    arrays = {k: Array(k, v, "float32", layers, other) for k, v in shapes.items()}
    return flatten(place_state(tx, params, place(arrays, 1, mesh), mesh), is_leaf)


def test_factored_statistics_follow_their_own_shape(mesh_of):
    tx = optax.adafactor(1.0, min_dim_size_to_factor=8)
    state = one(tx, {"k": (8, 128, 256)}, mesh_of(8), layers=(0,))
    row, col = state["0/v_row/k"], state["0/v_col/k"]
    assert (row.array.shape, row.dim) == ((8, 128), 1) and row.array.layer_axes == (0,)
    assert (col.array.shape, col.dim) == ((8, 256), 1)
    assert state["0/v/k"].reason == "whole: 1 elements are too few to share out"


def test_a_factored_statistic_has_the_tensor_axis_only_where_it_is_clear():
    mesh = make_zero_mesh(Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor")))
    tx = optax.adafactor(1.0, min_dim_size_to_factor=8)
    state = one(tx, {"k": (64, 128)}, mesh, other=((), ("tensor",)))
    assert state["0/v_col/k"].array.other_axes == (("tensor",),)
    assert not state["0/v_col/k"].shard_state  # its one dimension has the tensor axis
    assert state["0/v_row/k"].dim == 0
    square = one(tx, {"k": (128, 128)}, mesh, other=((), ("tensor",)))
    assert square["0/v_col/k"].array.other_axes == () and square["0/v_col/k"].shard_state


def test_histories_shard_the_parameters_dimension(mesh_of):
    state = one(optax.scale_by_lbfgs(4), {"k": (4, 24, 10)}, mesh_of(6), layers=(0,))
    history = state["diff_params_memory/k"]
    assert (history.dim, history.padded, history.array.layer_axes) == (2, 24, (1,))
    padded = one(optax.scale_by_lbfgs(4), {"k": (4, 25, 10)}, mesh_of(7), layers=(0,))
    assert padded["diff_params_memory/k"].stored_shape == (4, 4, 28, 10)


def test_keys_and_counts_are_whole(mesh_of):
    state = one(optax.add_noise(0.1, 0.5, key=jax.random.key(0)), {"k": (16, 16)}, mesh_of(2))
    assert state["rng_key"].reason == "whole: a PRNG key"
    assert state["count"].reason == "whole: a scalar"
    state = one(optax.contrib.sophia(1.0), {"k": (16, 16)}, mesh_of(2))  # a key as two integers
    assert state["0/hessian_fn_state/key"].reason == "whole: 2 elements are too few to share out"


def test_booleans_of_a_parameters_shape_shard_like_it(mesh_of):
    class Seen(optax.EmptyState):
        pass

    tx = optax.GradientTransformation(
        lambda params: {"seen": jax.tree.map(lambda x: jnp.zeros(x.shape, bool), params)},
        lambda updates, state, params=None: (updates, state),
    )
    seen = one(tx, {"k": (16, 5)}, mesh_of(8))["seen/k"]
    assert seen.dim == 0 and seen.array.dtype == "bool"


def test_a_parameter_without_a_leaf_is_named(mesh_of):
    params = {"a": {"b": jax.ShapeDtypeStruct((16,), jnp.float32)}}
    with pytest.raises(JzeroError, match="^a/b: the optimizer has this parameter, but it has no"):
        place_state(optax.adam(1.0), params, {}, mesh_of(8))


def test_match():
    shapes = {"kernel": (4, 8), "layers/kernel": (4, 8), "layers/0": (3,), "0": (5, 5)}
    assert match("0/mu/layers/kernel", (4, 8), shapes) == "layers/kernel"
    assert match("0/mu/kernel", (4, 8), shapes) == "kernel"
    assert match("mu/layers/kernel/0", (4,), shapes) == "layers/kernel"
    assert match("0/mu/other_kernel", (4, 7), {"kernel": (4, 8)}) is None
    assert match("0/mu/elsewhere", (4, 8), {"kernel": (4, 8)}) == "kernel"
    assert match("mu", (4, 8), {"": (4, 8)}) == ""
