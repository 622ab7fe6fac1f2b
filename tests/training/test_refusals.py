"""What would give wrong numbers in silence, or hang, is refused with one clear line."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import jzero
from jzero import JzeroError

BATCH = {"x": np.ones((16, 6), np.float32)}


def weights(key):
    return {"a": jnp.ones((6, 3)), "b": jnp.ones((6, 3))}


def run(loss, stage=3, init=weights, tx=None, **arguments):
    zero = jzero.Zero(stage=stage)
    state = zero.init(init, tx or optax.sgd(0.1), **arguments)
    return zero.train_step(loss)(state, BATCH)


def branching(predicate):
    def loss(params, batch, rng):
        x = batch["x"]
        one, other = (lambda w: x @ jzero.gather(w["a"])), (lambda w: x @ jzero.gather(w["b"]))
        return jnp.mean(lax.cond(predicate(x, rng), one, other, params))

    return loss


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(
    "predicate", [lambda x, rng: x.sum() > 0, lambda x, rng: jax.random.bernoulli(rng)]
)
def test_reads_in_a_branch_that_devices_choose_for_themselves(stage, predicate):
    with pytest.raises(JzeroError, match=r"inside a branch at test_refusals.py:\d+ that depends"):
        run(branching(predicate), stage)


def test_reads_in_a_branch_that_all_choose_alike():
    zero = jzero.Zero(stage=3)
    loss = branching(lambda x, rng: lax.psum(x.sum(), zero.axis_name) > 0)
    state = zero.init(weights, optax.sgd(0.1))
    zero.train_step(loss)(state, BATCH)
    run(branching(lambda x, rng: x.sum() > 0), stage=1)


def test_reads_in_a_loop_of_a_device_s_own_length():
    def loss(params, batch, rng):
        x = batch["x"]
        y = lax.while_loop(
            lambda y: y.sum() < x.sum(), lambda y: y + x @ jzero.gather(params["a"]), x[:, :3]
        )
        return jnp.mean(y)

    with pytest.raises(JzeroError, match="inside a loop"):
        run(loss)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_inside_the_loss(stage):
    def loss(params, batch, rng):
        inner = jax.grad(lambda p: jnp.mean((batch["x"] @ jzero.gather(p["a"])) ** 2))(params)
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(inner))

    with pytest.raises(JzeroError, match="takes a gradient with respect to this parameter itself"):
        run(loss, stage)


def test_a_gradient_inside_the_loss_of_gathered_weights():
    def loss(params, batch, rng):
        def inner(p):
            return jnp.mean((batch["x"] @ p["a"]) ** 2) + jnp.mean(p["b"] ** 2)

        grads = jax.grad(inner)(jzero.gather(params))
        return sum(jnp.sum(x**2) for x in jax.tree.leaves(grads))

    _, metrics = run(loss)
    value, grads = jax.value_and_grad(lambda p: loss(p, BATCH, None))(weights(None))
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)


def test_an_integer_variable_of_a_device_s_own_rows():
    class Counts(nnx.Variable):
        pass

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(6, 3, rngs=rngs)
            self.calls, self.seen = Counts(jnp.int32(0)), Counts(jnp.int32(0))

        def __call__(self, x, count):
            self.calls[...] += 1
            if count:
                self.seen[...] += jnp.sum(x > 0)
            return self.layer(x)

    def loss(count):
        return lambda model, batch, rng: jnp.mean(model(batch["x"], count))

    state, _ = run(loss(False), init=Net)
    assert int(state.variables["calls"]) == 1
    with pytest.raises(JzeroError, match="seen: this int32 variable .* devices would disagree"):
        run(loss(True), init=Net)


@pytest.mark.parametrize("value", [None, 1.0, "loss", {"loss": 1.0}])
def test_a_loss_that_is_no_array(value):
    with pytest.raises(JzeroError, match=f"the loss function returned the {type(value).__name__}"):
        run(lambda params, batch, rng: value)


@pytest.mark.parametrize(
    "dtype, message", [(jnp.int32, "dtype int32"), (bool, "dtype bool"), (complex, "dtype complex")]
)
def test_a_loss_that_is_not_real(dtype, message):
    with pytest.raises(JzeroError, match=message):
        run(lambda params, batch, rng: jnp.asarray(1, dtype))


def test_a_total_and_its_weight_need_a_name():
    with pytest.raises(JzeroError, match="or jzero.Mean"):
        run(lambda params, batch, rng: (jnp.mean(batch["x"]), jnp.float32(16)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tx": 1e-3}, "tx is 0.001; give an Optax transformation"),
        ({"layer_axes": {"a": 7}}, r"layer_axes\['a'\] is \(7,\), but its shape is \(6, 3\)"),
        ({"layer_axes": {"c": 0}}, "'c', which is not a parameter"),
        ({"trainable": lambda path: "no"}, "trainable: a is 'no'; give True or False"),
        ({"seed": jax.random.key(0)}, r"(?s)seed is Array\(.*; give a whole number"),
    ],
)
def test_arguments_of_init(arguments, message):
    with pytest.raises(JzeroError, match=message):
        run(lambda params, batch, rng: jnp.float32(0), **arguments)


@pytest.mark.parametrize(
    "loss, message",
    [
        (lambda model, batch: 0.0, r"takes \(model, batch\): too many positional arguments"),
        (lambda model, batch, rng, more: 0.0, "missing a required argument: 'more'"),
        (1.0, r"fn is 1.0; give a function \w+\(model, batch, rng\)"),
    ],
)
def test_arguments_of_a_loss_and_of_an_evaluation(loss, message):
    zero = jzero.Zero(stage=1)
    for step in (zero.train_step, zero.eval_step):
        with pytest.raises(JzeroError, match=message):
            step(loss)


def test_a_loader_of_something_else():
    with pytest.raises(JzeroError, match="the loader yields 'x'; it must yield batches"):
        next(jzero.Zero(stage=1).batches(BATCH))


@pytest.mark.parametrize(
    "loss, message",
    [
        (jzero.Mean(jnp.float32(1), jnp.ones(3)), r"a Mean whose weight has shape \(3,\)"),
        (
            (jnp.float32(1), {"accuracy": jzero.Mean(1.0, jnp.ones(3))}),
            r"a Mean of a total of shape \(\) and a weight of shape \(3,\); sum both",
        ),
    ],
)
def test_sums_that_are_not_finished(loss, message):
    with pytest.raises(JzeroError, match=message):
        run(lambda params, batch, rng: loss)
    zero = jzero.Zero(stage=1)
    state = zero.init(weights, optax.sgd(0.1))
    with pytest.raises(JzeroError, match=message):
        zero.eval_step(lambda params, batch, rng: loss)(state, BATCH)


def test_a_state_is_no_weights():
    zero = jzero.Zero(stage=1)
    state = zero.init(weights, optax.sgd(0.1))
    with pytest.raises(JzeroError, match=r"give zero.params\(state\)"):
        zero.init(state, optax.sgd(0.1))


def test_wide_weights():
    with pytest.raises(JzeroError, match="a is complex64: weights are trained in float32"):
        run(lambda params, batch, rng: jnp.float32(0), init={"a": np.ones((6, 3), np.complex64)})
