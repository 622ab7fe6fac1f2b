"""What is read off an update's jaxpr: which leaves are read across, which gradients matter."""

import jax
import jax.numpy as jnp
import optax
import pytest
from transformations import make
from trees import abstract, placed

from jzero.optimizer_state import place_state
from jzero.optimizer_trace import reads_across, updates_as_stored, uses_gradient

ARRAYS = {"embed", "layers/bias", "layers/kernel", "norm"}


def across(tx, **extra):
    found = reads_across(tx, abstract(), **extra)
    assert found.keys() == ARRAYS | {"scale"}
    return {path for path, yes in found.items() if yes} - {"scale"}


ELEMENTWISE = """adabelief adadelta adagrad adam adamax adamw adan amsgrad ema lion nadamw radam
    rmsprop rprop sgd signum yogi acprop ademamix adopt cocob madgrad schedule_free_adamw MultiSteps
    inject_hyperparams masked partition scale_by_schedule momentum_in_bf16 apply_every""".split()


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name):
    assert across(make(name)) == set()


@pytest.mark.parametrize("name", ["clip_by_global_norm", "chain", "novograd"])
def test_a_sum_over_padded_gradients_is_harmless(name):
    assert across(make(name)) == set()


READING = """adafactor add_noise apply_if_finite centralize clip_by_block_rms
    dadapt_adamw flatten fromage galore lamb lars mechanize muon noisy_sgd prodigy sm3 lbfgs
    polyak_sgd scale_by_trust_ratio sophia""".split()


@pytest.mark.parametrize("name", READING)
def test_reading_across(name):
    assert across(make(name)) == ARRAYS


def test_only_the_leaves_concerned():
    tx = optax.partition(
        {"lamb": optax.lamb(0.1), "adam": optax.adam(0.1)},
        lambda params: {k: "lamb" if k == "embed" else "adam" for k in params},
    )
    assert across(tx) == {"embed"}


def test_extra_arguments_are_given_by_the_caller():
    plateau = optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau())
    assert across(plateau) == ARRAYS  # cannot be traced without
    assert across(plateau, value=jax.ShapeDtypeStruct((), jnp.float32)) == set()


def stateless(f):
    return optax.stateless_with_tree_map(f)


@pytest.mark.parametrize(
    "f",
    [
        lambda g, p: g / g.size,
        lambda g, p: g * p.shape[0] if p.ndim else g,
        lambda g, p: g * jnp.arange(g.size, dtype=g.dtype).reshape(g.shape),
        lambda g, p: jnp.sort(g, axis=-1) if g.ndim else g,
        lambda g, p: jax.lax.cond(jnp.min(p) > 0, lambda: g, lambda: -g),
        lambda g, p: jax.lax.scan(lambda c, x: (c, x), 0, g)[1] if g.ndim else g,
        lambda g, p: g * jnp.sum(jnp.exp(g)),
        lambda g, p: g * jnp.sum(jnp.ones_like(g)),
        lambda g, p: jnp.swapaxes(g, -1, -2).reshape(g.shape) if g.ndim > 1 else jnp.flip(g),
    ],
)
def test_whatever_looks_beside_an_element_is_found(f):
    assert {"embed", "layers/kernel"} <= across(stateless(f))


@pytest.mark.parametrize(
    "f",
    [
        lambda g, p: jax.jit(jnp.where)(g > 0, g, 0.1 * p),
        lambda g, p: jax.lax.cond(jnp.sqrt(2.0) > 1, lambda g: g, lambda g: -g, g),
        lambda g, p: jax.lax.fori_loop(0, 3, lambda i, c: c * 0.9 + p, g),
        lambda g, p: jax.lax.scan(lambda c, x: (c * x, None), g, jnp.arange(3.0))[0],
        lambda g, p: jax.nn.relu(g) + jax.checkpoint(jnp.tanh)(p),
        lambda g, p: g / jnp.sqrt(jnp.sum(g * g) + jnp.sum(jnp.abs(p))),
    ],
)
def test_elementwise_through_calls_and_loops(f):
    assert across(stateless(f)) == set()


def test_a_state_that_follows_no_parameter_counts_as_read():
    tx = optax.GradientTransformation(
        lambda params: [x for x in jax.tree.leaves(params)] + [jnp.zeros((64, 16))],
        lambda g, state, params=None: (jax.tree.map(lambda a: a, g), state),
    )
    assert across(tx) == set()
    mixed = optax.GradientTransformation(
        lambda params: params["embed"][..., None],
        lambda g, state, params=None: ({**g, "embed": g["embed"] + state[..., 0]}, state),
    )
    assert across(mixed) == {"embed"}


def test_a_first_state_drawn_at_random_counts_as_read():
    def init(params):
        return {"embed": jax.random.normal(jax.random.key(0), params["embed"].shape)}

    def update(grads, state, params=None):
        return {**grads, "embed": grads["embed"] * state["embed"]}, state

    assert across(optax.GradientTransformation(init, update)) == {"embed"}


def test_uses_gradient():
    assert all(uses_gradient(optax.adamw(0.1), abstract()).values())
    frozen = uses_gradient(make("partition"), abstract())
    assert frozen == {path: path in ("embed", "norm") for path in ARRAYS | {"scale"}}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), make("partition"))
    assert all(uses_gradient(clipped, abstract()).values())  # the norm is over all of them
    assert all(uses_gradient(make("masked"), abstract()).values())  # hands the others on
    assert all(uses_gradient(make("lbfgs"), abstract()).values())  # cannot be traced


@pytest.mark.parametrize(
    "name, devices, want",
    [
        ("adamw", 7, True),
        ("chain", 5, True),
        ("lamb", 7, False),
        ("adafactor", 7, False),
        ("lamb", 1, True),
    ],
)
def test_updates_as_stored(name, devices, want, mesh_of):
    mesh, tx = mesh_of(devices), make(name)
    leaves = placed(abstract(), 1, mesh)
    state = place_state(tx, abstract(), leaves, mesh)
    assert updates_as_stored(tx, abstract(), leaves, state) is want


def test_padded_statistics_of_whole_parameters_are_not_updated_as_stored(mesh_of):
    params = {"k": jax.ShapeDtypeStruct((128, 80), jnp.float32)}
    mesh = mesh_of(5)
    leaves = placed(params, 1, mesh)
    assert not leaves["k"].is_padded
    tx = make("adafactor")
    state = place_state(tx, params, leaves, mesh)
    assert not updates_as_stored(tx, params, leaves, state)
