"""Weights, gradients and activations are told apart in programs of every make.

Each is two matrices and a batch, sharded over `data`, with collectives written by hand.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import build_mesh

import jzero
from jzero.auditing import Kind, Report

WIDTH = 128
ROWS, WHOLE = P("data"), P()
SHARDED = {"a": P("data"), "b": P("data")}


@pytest.fixture
def mesh() -> Mesh:
    return build_mesh("cpu:8", data=8)


def gather(tree: Any) -> Any:
    return jax.tree.map(lambda x: lax.all_gather(x, "data", tiled=True), tree)


def error(weights: Any, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.square(jnp.tanh(x @ weights["a"]) @ weights["b"]))


def mapped(mesh: Mesh, f: Callable[..., Any], *specs: Any, out: Any = WHOLE) -> Callable[..., Any]:
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)


def arrays(mesh: Mesh, *shape: int, spec: P = ROWS) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))


def params(mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {name: arrays(mesh, WIDTH, WIDTH) for name in SHARDED}


def step(mesh: Mesh) -> Callable[..., Any]:
    """One step of SGD, with weights gathered where they are used."""
    loss = mapped(mesh, lambda p, x: lax.pmean(error(gather(p), x), "data"), SHARDED, P("data"))

    def sgd(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return sgd


def kinds(report: Report) -> set[tuple[str, Kind]]:
    """(opcode, kind) of all that is moved over any axis, sums of scalars left out."""
    found = report.of(*Kind, axes=tuple(report.mesh))
    return {(each.op, each.kind) for each in found if each.kind is not Kind.SMALL}


GATHERED = {("all-gather", Kind.WEIGHT), ("reduce-scatter", Kind.GRADIENT)}


@pytest.mark.parametrize("donated", [(), (0,)])
def test_a_batch_of_floats(mesh: Mesh, donated: tuple[int, ...]):
    """With as many elements on a device as a weight has, and without a donated argument too."""
    x = arrays(mesh, 256, WIDTH)
    compiled = jax.jit(step(mesh), donate_argnums=donated).lower(params(mesh), x).compile()
    report = jzero.audit(compiled, mesh)
    assert (report.state, report.unsure) == (("params",), ("x",))
    assert kinds(report) == GATHERED
    report.assert_no_collective_on_activations()


def test_a_batch_that_is_moved_before_any_product(mesh: Mesh):
    """It has no mark of a batch: it is not called a weight either."""

    def loss(p, x):
        return lax.pmean(error(gather(p), gather(x)), "data")

    def grads(p, x):
        return jax.grad(mapped(mesh, loss, SHARDED, P("data")))(p, x)

    compiled = jax.jit(grads).lower(params(mesh), arrays(mesh, 64, WIDTH)).compile()
    report = jzero.audit(compiled, mesh)
    assert [each.arguments for each in report.of(Kind.UNKNOWN)] == [("x",)]
    with pytest.raises(AssertionError, match=r'Nothing says of "x" whether it is state or a batch'):
        report.assert_no_collective_on_activations()
    told = jzero.audit(compiled, mesh, weights=["p"])
    assert [each.arguments for each in told.of(Kind.ACTIVATION)] == [("x",)]


def test_frozen_weights_are_told_by_name(mesh: Mesh):
    def loss(tuned, frozen, x):
        return lax.pmean(error(jax.tree.map(jnp.add, *gather((tuned, frozen))), x), "data")

    def train(tuned, frozen, x):
        grads = jax.grad(mapped(mesh, loss, SHARDED, SHARDED, P("data")))(tuned, frozen, x)
        return jax.tree.map(lambda p, g: p - g, tuned, grads)

    p, x = params(mesh), arrays(mesh, 512, WIDTH)
    compiled = jax.jit(train, donate_argnums=0).lower(p, p, x).compile()
    unknown = jzero.audit(compiled, mesh).of(Kind.UNKNOWN)
    assert {name for each in unknown for name in each.arguments} == {"frozen['a']", "frozen['b']"}
    assert kinds(jzero.audit(compiled, mesh, weights=["tuned", "frozen"])) == GATHERED


def test_many_steps_in_one_program(mesh: Mesh):
    """The weights of the next step are made from this step's batch, and still are weights."""

    def many(params, batches):
        return lax.scan(step(mesh), params, batches)

    batches = arrays(mesh, 5, 512, WIDTH, spec=P(None, "data"))
    compiled = jax.jit(many, donate_argnums=0).lower(params(mesh), batches).compile()
    report = jzero.audit(compiled, mesh)
    assert kinds(report) == GATHERED
    assert {each.count for each in report.of(Kind.WEIGHT)} == {5}


def test_weights_that_are_gathered_once_for_all_micro_batches(mesh: Mesh):
    """Backward uses one right after forward, but it is kept over the whole loop."""

    def local(p, batches):
        whole = gather(p)

        def micro(carry, x):
            """Adds up a gradient one micro-batch late, as a pipelined loop does."""
            total, last = carry
            scattered = jax.tree.map(
                lambda g: lax.psum_scatter(g, "data", tiled=True), jax.grad(error)(whole, x)
            )
            return (jax.tree.map(jnp.add, total, last), scattered), None

        zeros = jax.tree.map(jnp.zeros_like, p)
        (total, _), _ = lax.scan(micro, (zeros, zeros), batches)
        return jax.tree.map(jnp.subtract, p, total)

    batches = arrays(mesh, 5, 512, WIDTH, spec=P(None, "data"))
    train = mapped(mesh, local, SHARDED, P(None, "data"), out=SHARDED)
    compiled = jax.jit(train, donate_argnums=0).lower(params(mesh), batches).compile()
    report = jzero.audit(compiled, mesh)
    assert kinds(report) == GATHERED
    assert {each.count for each in report.of(Kind.GRADIENT)} == {10}
    assert report.kept is not None
    assert {each.arguments for each in report.kept} == {("p['b']",)}


def test_gradients_that_travel_quantised(mesh: Mesh):
    """They are summed after they were sent: no element of them ends in the state as it is."""

    def scatter(gradient):
        scale = jnp.max(jnp.abs(gradient))
        pieces = jnp.round(gradient / scale * 127).astype(jnp.int8).reshape(8, -1, WIDTH)
        pieces = lax.all_to_all(pieces, "data", 0, 0).astype(jnp.float32)
        return jnp.sum(pieces * lax.all_gather(scale, "data")[:, None, None], axis=0) / 127

    def local(p, x):
        grads = jax.grad(error)(gather(p), x)
        return jax.tree.map(lambda p, g: p - scatter(g), p, grads)

    train = jax.jit(mapped(mesh, local, SHARDED, P("data"), out=SHARDED), donate_argnums=0)
    compiled = train.lower(params(mesh), arrays(mesh, 512, WIDTH)).compile()
    report = jzero.audit(compiled, mesh)
    assert kinds(report) == {("all-gather", Kind.WEIGHT), ("all-to-all", Kind.GRADIENT)}
    assert {each.dtype for each in report.of(Kind.GRADIENT)} == {"s8"}


def test_parameters_in_one_flat_vector(mesh: Mesh):
    """Its gradient is laid end to end, reduced, and the program's output as it is."""

    def local(flat, x):
        def loss(flat):
            a, b = flat.reshape(2, WIDTH, WIDTH)
            return error({"a": a, "b": b}, x)

        a, b = jax.grad(loss)(flat).reshape(2, -1)
        return lax.psum(jnp.concatenate([a, 0.1 * b]), "data")

    flat, x = arrays(mesh, 2 * WIDTH * WIDTH, spec=WHOLE), arrays(mesh, 512, WIDTH)
    train = mapped(mesh, local, WHOLE, P("data"), out=WHOLE)
    report = jzero.audit(jax.jit(train).lower(flat, x).compile(), mesh)
    assert kinds(report) == {("all-reduce", Kind.GRADIENT)}
    assert sum(each.elements or 0 for each in report.of(Kind.GRADIENT)) == 2 * WIDTH * WIDTH


def test_experts_may_have_an_axis_of_their_own():
    mesh = build_mesh("cpu:8", data=2, expert=4)
    rows = P(("data", "expert"))

    def local(w, x):
        def loss(w):
            sent = lax.all_to_all(x.reshape(4, -1, WIDTH), "expert", 0, 0)
            return jnp.mean(lax.all_to_all(jnp.tanh(sent @ w), "expert", 0, 0) ** 2)

        return w - lax.psum(jax.grad(loss)(w), "data")

    train = mapped(mesh, local, P("expert"), rows, out=P("expert"))
    w = arrays(mesh, 4 * WIDTH, WIDTH, spec=P("expert"))
    x = arrays(mesh, 512, WIDTH, spec=rows)
    report = jzero.audit(jax.jit(train, donate_argnums=0).lower(w, x).compile(), mesh)
    report.assert_no_collective_on_activations()
    with pytest.raises(
        AssertionError, match=r"activations are moved over expert; .*\n  all-to-all"
    ):
        report.assert_no_collective_on_activations("expert")


def test_without_collectives(mesh: Mesh):
    one = Mesh(mesh.devices[:1], ("data",))
    x = jnp.ones((8, WIDTH))
    weights = {"a": jnp.ones((WIDTH, WIDTH)), "b": jnp.ones((WIDTH, WIDTH))}
    report = jzero.audit(jax.jit(jax.grad(error)).lower(weights, x).compile(), one)
    assert report.moved == () and report.collectives == () and report.kept == ()
    report.assert_no_collective_on_activations()
    report.assert_no_kept_weights()
    assert "No collectives." in str(report)
    with pytest.raises(jzero.JzeroError, match="no axis of the mesh .* over several devices"):
        report.assert_volume(2, weights)


def test_a_toy_batch_is_no_small_thing(mesh: Mesh):
    """A batch of a toy model has fewer elements than statistics of a real one."""

    def loss(p, x):
        y = gather(jnp.tanh(x @ gather(p["a"])))
        return jnp.mean(jnp.square(y @ gather(p["b"])))

    toy = {name: arrays(mesh, 16, 16) for name in SHARDED}
    grads = jax.jit(jax.grad(mapped(mesh, loss, SHARDED, P("data"))))
    compiled = grads.lower(toy, arrays(mesh, 8, 16)).compile()
    report = jzero.audit(compiled, mesh, weights=["p"])
    assert [each.dims for each in report.of(Kind.ACTIVATION) if each.op == "all-gather"] == [
        (8, 16)
    ]
    assert jzero.audit(compiled, mesh, weights=["p"], small=128).of(Kind.ACTIVATION) == []


def test_single_numbers_side_by_side_are_small(mesh: Mesh):
    """However many they are, and however small the model is."""

    def loss(p, x):
        y = x @ gather(p["a"]) @ gather(p["b"])
        means = jnp.stack([jnp.mean(jnp.sin(i * y)) for i in range(12)])
        return lax.pmean(jnp.mean(y**2), "data"), lax.psum(means, "data")

    toy = {name: arrays(mesh, 16, 16) for name in SHARDED}
    metrics = mapped(mesh, loss, SHARDED, P("data"), out=(P(), P()))
    grads = jax.jit(jax.grad(metrics, has_aux=True))
    report = jzero.audit(grads.lower(toy, arrays(mesh, 8, 16)).compile(), mesh, weights=["p"])
    report.assert_no_collective_on_activations()
    assert 12 in {each.elements for each in report.of(Kind.SMALL)}


def test_an_output_like_the_batch_makes_it_no_state(mesh: Mesh):
    """A denoiser gives what it is given; without a gradient that means nothing."""

    def denoise(p, x):
        return jnp.tanh(x @ gather(p["a"])) @ gather(p["b"])

    forward = jax.jit(mapped(mesh, denoise, SHARDED, P("data"), out=P("data")))
    compiled = forward.lower(params(mesh), arrays(mesh, 64, WIDTH)).compile()
    report = jzero.audit(compiled, mesh)
    assert (report.state, report.unsure) == ((), ("p", "x"))
    assert kinds(report) == {("all-gather", Kind.UNKNOWN)}


def test_without_a_sign_of_state_gradients_are_not_called_activations(mesh: Mesh):
    """One argument for all, not donated: it has a batch in it, so it is not all state."""
    carry = params(mesh), arrays(mesh, 256, WIDTH)
    compiled = jax.jit(lambda carry: step(mesh)(*carry)).lower(carry).compile()
    unknown = {("all-gather", Kind.UNKNOWN), ("reduce-scatter", Kind.UNKNOWN)}
    assert kinds(jzero.audit(compiled, mesh)) == unknown
    assert kinds(jzero.audit(compiled, mesh, weights=["carry[0]"])) == GATHERED
