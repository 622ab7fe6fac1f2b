"""Meshes that users bring, tensor parallelism beside ZeRO, compiling once, and donation."""

import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from models import OPTIMIZERS, Net, assert_close, make_batch, mesh, numpy, reference, run

import jzero
from jzero import JzeroError

NET = Net("plain", scanned=False)


def train(zero, net=NET, steps=3):
    found, history, state = run(net, zero, steps=steps)
    _, want, losses, norms = reference(net, steps=steps)
    assert_close(found, want)
    np.testing.assert_allclose([m["grad_norm"] for m in history], norms, rtol=1e-5)
    return state


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize(
    "stage, types, kind", [(1, EXPLICIT, "nnx"), (3, EXPLICIT, "linen"), (3, AUTO, "plain")]
)
def test_meshes_of_any_axis_type(stage, types, kind):
    theirs = mesh(8, axis_types=(types,))
    Net(kind).fresh()  # cached, and other tests use these weights outside of this mesh
    with jax.set_mesh(theirs):
        train(jzero.Zero(stage=stage, mesh=theirs), Net(kind))


def test_another_mesh_in_context_does_not_matter():
    Net().fresh()
    with jax.set_mesh(mesh(4, 2, names=("x", "y"), axis_types=(AUTO, AUTO))):
        train(jzero.Zero(stage=3, mesh=mesh(8)))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_group_may_be_several_axes(stage):
    state = train(jzero.Zero(stage=stage, mesh=mesh(2, 4, names=("data", "fsdp"))))
    for x in jax.tree.leaves(state.opt_state):
        if x.ndim > 1:
            assert x.addressable_shards[0].data.size * 8 == x.size


def test_an_axis_of_any_name():
    train(jzero.Zero(stage=3, mesh=mesh(4, names=("workers",))))
    train(jzero.Zero(stage=3, mesh=mesh(2, 2, names=("a", "b")), axes=("b", "a")))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_shards_may_repeat_over_a_replica_axis(stage):
    state = train(jzero.Zero(stage=stage, mesh=mesh(2, 4, names=("replica", "data"))))
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
    assert all(x.addressable_shards[0].data.size * 4 == x.size for x in moments)


def test_shard_size_makes_replicas():
    zero = jzero.Zero(stage=3, shard_size=2, accumulation=2)
    assert zero.mesh.group_size == 2 and zero.mesh.replicas == 4
    train(zero)


@pytest.mark.parametrize("stage", [0, 3])
def test_one_device(stage):
    train(jzero.Zero(stage=stage, mesh=mesh(1), accumulation=2))


def test_meshes_that_do_not_fit():
    two = mesh(4, 2, names=("rows", "columns"))
    with pytest.raises(JzeroError, match="none is named data or fsdp"):
        jzero.Zero(mesh=two)
    with pytest.raises(JzeroError, match="'date' is not in the mesh"):
        jzero.Zero(mesh=two, axes="date")
    with pytest.raises(JzeroError, match="both"):
        jzero.Zero(mesh=two, axes="rows", replica_axes="rows")
    with pytest.raises(JzeroError, match="mics_shard_size=3 does not divide the 8 devices"):
        jzero.Zero(mesh=mesh(8), shard_size=3)


# Beside a tensor axis.

WIDTH, HIDDEN = 16, 32
TENSOR = {"data": 4, "tensor": 2}


def batches(steps):
    for i in range(steps):
        rng = np.random.default_rng(i)
        x, y = rng.normal(size=(2, 16, WIDTH)).astype(np.float32)
        yield {"x": x, "y": y}


class NnxTensor(nnx.Module):
    def __init__(self, rngs, annotate=True):
        def init(*names):
            make = nnx.initializers.lecun_normal()
            return nnx.with_partitioning(make, names) if annotate else make

        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: None})
        def layers(rngs):
            return nnx.Linear(
                WIDTH, HIDDEN, kernel_init=init(None, "tensor"), rngs=rngs
            ), nnx.Linear(
                HIDDEN, WIDTH, use_bias=False, kernel_init=init("tensor", None), rngs=rngs
            )

        self.up, self.down = layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0, 0), out_axes=nnx.Carry)
        def forward(x, up, down):
            return x + down(nnx.tanh(up(x)))

        return forward(x, self.up, self.down)


class LinenTensor(nn.Module):
    logical: bool | None = False  # None: no annotations

    @nn.compact
    def __call__(self, x):
        def init(*names):
            make = nn.initializers.lecun_normal()
            if self.logical is None:
                return make
            if self.logical:
                names = tuple({"tensor": "mlp", None: "embed"}[name] for name in names)
                return nn.with_logical_partitioning(make, names, rules=RULES)
            return nn.with_partitioning(make, names)

        y = nn.Dense(HIDDEN, kernel_init=init(None, "tensor"), name="up")(x)
        y = nn.tanh(y)
        return x + nn.Dense(WIDTH, kernel_init=init("tensor", None), name="down")(y)


RULES = (("mlp", "tensor"), ("embed", None), ("batch", "data"))


def square(model, batch, rng=None):
    return jnp.mean(jnp.square(model(batch["x"]) - batch["y"]))


def plain_nnx(steps):
    model = NnxTensor(nnx.Rngs(0), annotate=False)
    optimizer = nnx.Optimizer(model, OPTIMIZERS["sgd"](), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        optimizer.update(model, nnx.grad(square)(model, batch))

    for batch in batches(steps):
        step(model, optimizer, batch)
    return numpy(nnx.to_pure_dict(nnx.state(model, nnx.Param)))


def plain_linen(steps):
    module, tx = LinenTensor(None), OPTIMIZERS["sgd"]()
    params = module.init(jax.random.key(0), jnp.ones((1, WIDTH)))["params"]
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        grads = jax.grad(lambda p: square(lambda x: module.apply({"params": p}, x), batch))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches(steps):
        params, opt_state = step(params, opt_state, batch)
    return numpy(params)


@pytest.mark.parametrize("stage, precision", [(0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_a_tensor_axis_with_annotated_nnx(stage, precision):
    theirs = mesh(4, 2, names=("data", "tensor"))
    zero = jzero.Zero(stage=stage, precision=precision, mesh=theirs, accumulation=2)
    state = zero.init(lambda rngs: NnxTensor(rngs), OPTIMIZERS["sgd"]())
    step = zero.train_step(square)
    for batch in batches(3):
        state, _ = step(state, batch)
    assert_close(zero.params(state), plain_nnx(3), 1e-5 if precision == "fp32" else 2e-2)
    weight = state.weight("up/kernel")
    assert weight.sharding.spec[-1] == "tensor"
    assert weight.addressable_shards[0].data.size * (8 if stage == 3 else 2) == weight.size
    loss = zero.eval_step(square)(state, next(batches(1)))["loss"]
    assert np.isfinite(loss)


@pytest.mark.parametrize("stage, logical", [(1, False), (3, False), (3, True)])
def test_a_tensor_axis_with_annotated_linen(stage, logical):
    theirs = mesh(4, 2, names=("data", "tensor"))
    zero = jzero.Zero(stage=stage, mesh=theirs)
    state = zero.init(LinenTensor(logical), OPTIMIZERS["sgd"](), sample=jnp.ones((1, WIDTH)))
    step = zero.train_step(square)
    for batch in batches(3):
        state, _ = step(state, batch)
    assert_close(zero.params(state), plain_linen(3))
    assert "tensor" in state.weight("up/kernel").sharding.spec


def test_an_annotation_that_does_not_divide_is_named():
    class Odd(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.ones, (None, "tensor"))
            self.layer = nnx.Linear(4, 5, kernel_init=init, rngs=rngs)

    zero = jzero.Zero(stage=3, mesh=mesh(4, 2, names=("data", "tensor")))
    match = r"layer/kernel: dim 1 of shape \(4, 5\) .* tensor of size 2, which does not divide it"
    with pytest.raises(JzeroError, match=match):
        zero.init(lambda rngs: Odd(rngs), optax.sgd(0.1))


# Constraints in the model itself.


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_may_name_the_zero_axis(stage):
    theirs = mesh(8, axis_types=(AUTO,))
    init = {"w": np.ones((16, 16), np.float32)}

    def loss_fn(params, batch, rng, constrain=True):
        x = batch["x"]
        if constrain:
            x = jax.lax.with_sharding_constraint(x, P("data"))
        y = x @ jzero.gather(params["w"])
        if constrain:
            y = jax.lax.with_sharding_constraint(y, P("data", None))
        return jnp.mean(jnp.square(y - batch["y"]))

    found = []
    for constrain in (True, False):
        zero = jzero.Zero(stage=stage, mesh=theirs)
        state = zero.init(init, optax.adam(0.1))

        def loss(params, batch, rng, constrain=constrain):
            return loss_fn(params, batch, rng, constrain)

        with jax.set_mesh(theirs):
            state, _ = zero.train_step(loss)(state, next(batches(1)))
        found.append(numpy(zero.params(state)))
    assert_close(*found, bound=1e-7)


def test_linen_logical_rules_over_the_zero_axis():
    class Constrained(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.with_logical_constraint(x, ("batch", "embed"))
            return nn.with_logical_constraint(nn.Dense(WIDTH)(x), ("batch", "embed"))

    theirs = mesh(8)
    found = []
    for rules in (RULES, ()):
        zero = jzero.Zero(stage=3, mesh=theirs)
        with nn.logical_axis_rules(rules):
            state = zero.init(Constrained(), optax.adam(0.1), sample=jnp.ones((8, WIDTH)))
            state, _ = zero.train_step(square)(state, next(batches(1)))
        found.append(numpy(zero.params(state)))
    assert_close(*found, bound=1e-7)


# Compiling and memory.


def compiled_names(records):
    return [r.getMessage() for r in records if "Finished XLA compilation" in r.getMessage()]


@pytest.mark.parametrize(
    "stage, kind, precision",
    [(0, "nnx", "fp16"), (1, "linen", "bf16"), (2, "plain", "fp32"), (3, "nnx", "fp16")],
)
def test_the_step_compiles_once(stage, kind, precision):
    net = Net(kind)
    zero = jzero.Zero(stage=stage, precision=precision)
    state = zero.init(net.init, OPTIMIZERS["adamw"](), sample=net.sample)
    step = zero.train_step(net.loss)
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("jax._src.dispatch")
    log.addHandler(handler)
    try:
        with jax.log_compiles():
            state, _ = step(state, make_batch(0))
            first = len(compiled_names(records))
            for i in range(3):
                state, _ = step(state, make_batch(i))
    finally:
        log.removeHandler(handler)
    assert first > 0
    assert compiled_names(records)[first:] == []


def test_plain_stacks_are_found_and_moved_before_the_step_compiles():
    net = Net("plain", layers=8)  # 8 layers: without knowing, the layer axis would be sharded
    zero = jzero.Zero(stage=3)
    state = zero.init(net.init, OPTIMIZERS["adamw"]())
    assert state.params["blocks/up"].sharding.spec[0] == "data"
    step = zero.train_step(net.loss)
    state, _ = step(state, make_batch(0))
    assert state.params["blocks/up"].sharding.spec == P(None, "data")
    for i in range(1, 3):
        state, _ = step(state, make_batch(i))
    assert_close(zero.params(state), reference(net, steps=3)[1])


@pytest.mark.parametrize(
    "stage, precision",
    [(0, "bf16"), (1, "fp32"), (1, "bf16"), (2, "bf16"), (3, "fp32"), (3, "bf16")],
)
def test_the_state_is_donated(stage, precision):
    net = Net("linen", vocab=50, width=18)  # padded, too
    zero = jzero.Zero(stage=stage, precision=precision)
    state = zero.init(net.init, OPTIMIZERS["adamw"](), sample=net.sample)
    size = sum(
        x.addressable_shards[0].data.nbytes
        for x in jax.tree.leaves(state)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    step = zero.train_step(net.loss)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batch(0))
    used = step.lower(batch).compile().memory_analysis()
    assert used.alias_size_in_bytes >= size
    assert used.alias_size_in_bytes <= size + 64
    old = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    pointers = [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in old]
    after, _ = step(state, make_batch(0))
    assert all(x.is_deleted() for x in jax.tree.leaves(state.opt_state))
    new = {
        x.addressable_shards[0].data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(after)
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    }
    assert set(pointers) <= new


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_device_holds_its_share(stage, precision):
    """Every dimension divides by 8: nothing may be whole that the stage shards."""
    net = Net("linen")
    zero = jzero.Zero(stage=stage, precision=precision)
    state = zero.init(net.init, OPTIMIZERS["adamw"](), sample=net.sample)
    whole = sum(x.size for x in jax.tree.leaves(net.fresh()[0]))

    def held(tree):
        return sum(x.addressable_shards[0].data.size for x in jax.tree.leaves(tree) if x.ndim)

    low = precision == "bf16"
    assert held(state.opt_state) == 2 * whole / (8 if stage else 1)
    assert held(state.master) == (whole / (8 if stage else 1) if low else 0)
    in_params = {0: whole, 1: whole, 2: whole, 3: 0 if low else whole / 8}
    assert held(state.params) == in_params[stage]


def test_a_batch_of_global_arrays_passes_through():
    zero = jzero.Zero(stage=3, mesh=mesh(8))
    placed = jax.device_put(make_batch(0), NamedSharding(zero.mesh.storage, P("data")))
    same = zero.place_batch(placed)
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(same), strict=True))
