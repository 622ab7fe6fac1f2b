"""The example's model: its sizes, what it can see, and that its three forms are one function."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import linen_model
import model as lm
import numpy as np
import pytest
from flax import nnx
from sample import generate

from jzero.errors import JzeroError

SMALL = lm.LMConfig(97, 16, layers=2, width=32, heads=4, kv_heads=2, mlp=48)


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, SMALL.context + 1), 0, SMALL.vocabulary)


def build(config, seed=0):
    return lm.LM(config, rngs=nnx.Rngs(seed))


def close(a, b, tolerance=1e-5):
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@nnx.jit
def logits_of(model, tokens):
    return model(tokens)


@nnx.jit
def loss_of(model, batch):
    return lm.loss_fn(model, batch, None)


@nnx.jit
def value_and_gradients(model, tokens):
    def mean(model):
        loss = lm.loss_fn(model, {"tokens": tokens}, None)
        return loss.total / loss.weight

    return nnx.value_and_grad(mean)(model)


# --- sizes


@pytest.mark.parametrize(
    "name, expected, tolerance",
    [
        ("tiny", 1_049_728, 0),
        ("gpt2", 123_551_232, 0),
        ("llama_7b", 6_738_415_616, 0),
        ("zero_7p5b", 7.5e9, 1e-3),
        ("zero_1t", 1e12, 1e-3),
        ("llama_13b", 13_015_864_320, 0),
        ("llama_70b", 68_976_648_192, 0),
        ("llama_13b_unrolled", 13_015_864_320, 0),
    ],
)
def test_presets_have_their_parameter_counts(name, expected, tolerance):
    workload = getattr(lm, name)()
    model = nnx.eval_shape(lambda: workload.init(rngs=nnx.Rngs(0)))
    leaves = jax.tree.leaves(nnx.state(model))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    count = sum(leaf.size for leaf in leaves)
    assert abs(count - expected) <= tolerance * expected
    assert {type(variable) for _, variable in nnx.to_flat_state(nnx.state(model))} == {nnx.Param}


def test_every_preset_has_a_factory():
    assert all(callable(getattr(lm, name)) for name in lm.PRESETS)


@pytest.mark.parametrize("name", ["llama_13b", "llama_70b", "llama_13b_unrolled"])
def test_a_large_model_traces_without_arrays(name):
    workload = getattr(lm, name)()
    config = lm.PRESETS[name]
    batch = workload.batch(2)
    assert batch["tokens"].shape == (2, config.context + 1)
    shapes = nnx.eval_shape(lambda: workload.init(rngs=nnx.Rngs(0)))
    graph, state = nnx.split(shapes)

    def run(state, batch):
        model = nnx.merge(graph, state)
        return model(batch["tokens"][:, :-1]), workload.loss_fn(model, batch, None)

    logits, loss = jax.eval_shape(run, state, batch)
    assert logits.shape == (2, config.context, config.vocabulary)
    assert loss.total.shape == loss.weight.shape == ()


def test_impossible_sizes_are_refused():
    with pytest.raises(JzeroError, match="width 32 must be a multiple of heads 5"):
        replace(SMALL, heads=5)
    with pytest.raises(JzeroError, match="even head width, not 1"):
        replace(SMALL, heads=32, kv_heads=32)
    with pytest.raises(JzeroError, match="remat is 'some'; choose one of none, full"):
        replace(SMALL, remat="some")


# --- what it computes


def test_a_later_token_does_not_change_earlier_logits(tokens):
    model = build(SMALL)
    before = logits_of(model, tokens)
    after = logits_of(model, tokens.at[:, 9].add(1) % SMALL.vocabulary)
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (jnp.abs(before[:, 9:] - after[:, 9:]).max(axis=-1) > 1e-5).all()


def test_positions_matter(tokens):
    logits = logits_of(build(SMALL), tokens)
    turned = logits_of(build(SMALL), tokens.at[:, :2].set(tokens[:, 1::-1]))
    assert jnp.abs(logits[:, 2:] - turned[:, 2:]).max() > 1e-5


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_activations_follow_the_weights_and_the_loss_is_float32(tokens, dtype, tied):
    model = build(replace(SMALL, tied=tied))
    exact = loss_of(model, {"tokens": tokens}).total
    graph, state = nnx.split(model)
    model = nnx.merge(graph, jax.tree.map(lambda weight: weight.astype(dtype), state))
    assert logits_of(model, tokens).dtype == dtype
    loss = loss_of(model, {"tokens": tokens})
    assert loss.total.dtype == loss.weight.dtype == jnp.float32
    close(loss.total, exact, 1e-2)


def test_the_loss_leaves_padding_out(tokens):
    model = build(SMALL)
    weights = jnp.ones((2, SMALL.context)).at[0, 5:].set(0)
    loss = loss_of(model, {"tokens": tokens, "weights": weights})
    assert loss.weight == weights.sum()
    changed = tokens.at[0, 6:].set(0)  # only targets with weight 0, and inputs after them
    close(loss_of(model, {"tokens": changed, "weights": weights}).total, loss.total)
    whole = loss_of(model, {"tokens": tokens})
    assert whole.weight == 2 * SMALL.context
    logits = jax.nn.log_softmax(logits_of(model, tokens[:, :-1]))
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)
    close(whole.total, -picked.sum())


# --- one function, three forms


def unrolled(model):
    """The same weights in a model without a layer scan."""
    other = build(replace(model.config, scan=False), seed=1)
    stacked = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    layers = stacked.pop("layers")
    stacked["layers"] = {
        index: jax.tree.map(lambda weight, i=index: weight[i], layers)
        for index in range(model.config.layers)
    }
    state = nnx.state(other)
    nnx.replace_by_pure_dict(state, stacked)
    nnx.update(other, state)
    return other


@pytest.mark.parametrize("tied", [True, False])
def test_scanned_and_unrolled_agree(tokens, tied):
    model = build(replace(SMALL, tied=tied))
    other = unrolled(model)
    close(logits_of(model, tokens), logits_of(other, tokens))
    loss, gradients = value_and_gradients(model, tokens)
    other_loss, other_gradients = value_and_gradients(other, tokens)
    close(loss, other_loss)
    ours = nnx.to_pure_dict(gradients)
    theirs = nnx.to_pure_dict(other_gradients)
    numbered = theirs.pop("layers")
    layers = [numbered[index] for index in range(SMALL.layers)]
    theirs["layers"] = jax.tree.map(lambda *leaves: np.stack(leaves), *layers)
    jax.tree.map(close, ours, theirs)


@pytest.mark.parametrize(
    "scan, remat", [(True, "dots"), (True, "all_dots"), (True, "none"), (False, "none")]
)
def test_what_is_rematerialised_changes_nothing(tokens, scan, remat):
    config = replace(SMALL, scan=scan)
    loss, gradients = value_and_gradients(build(config), tokens)
    other_loss, other = value_and_gradients(build(replace(config, remat=remat)), tokens)
    close(loss, other_loss)
    jax.tree.map(close, nnx.to_pure_dict(gradients), nnx.to_pure_dict(other))


@pytest.mark.parametrize("tied, scan", [(True, True), (False, True), (False, False)])
def test_linen_agrees_with_nnx(tokens, tied, scan):
    config = replace(SMALL, tied=tied, scan=scan)
    model, other = build(config), linen_model.LM(config)
    variables = linen_model.from_nnx(model)
    own = jax.eval_shape(other.init, jax.random.key(0), tokens)
    assert jax.tree.map(jnp.shape, variables) == jax.tree.map(lambda leaf: leaf.shape, own)
    close(jax.jit(other.apply)(variables, tokens), logits_of(model, tokens))

    def mean(variables):
        loss = lm.loss_fn(lambda x: other.apply(variables, x), {"tokens": tokens}, None)
        return loss.total / loss.weight

    loss, gradients = value_and_gradients(model, tokens)
    other_loss, other_gradients = jax.jit(jax.value_and_grad(mean))(variables)
    close(loss, other_loss)
    jax.tree.map(close, linen_model.from_nnx(gradients), other_gradients)


# --- text from it


@pytest.mark.parametrize("context", [8, 100])
def test_greedy_text_is_what_a_loop_without_a_buffer_gives(tokens, context):
    model = build(SMALL)
    prompt = tokens[:, :3]
    got = nnx.jit(generate, static_argnames=("steps", "temperature", "context"))(
        model, prompt, steps=9, rng=jax.random.key(0), temperature=0.0, context=context
    )
    expected = prompt
    for _ in range(9):
        padded = jnp.pad(expected[:, -context:], ((0, 0), (0, 12)))[:, :12]
        following = logits_of(model, padded)[:, min(expected.shape[1], context) - 1].argmax(-1)
        expected = jnp.concatenate([expected, following[:, None]], axis=1)
    np.testing.assert_array_equal(got, expected)


def test_sampled_text_depends_on_the_key_alone(tokens):
    model = build(SMALL)
    first, again, other = (
        generate(model, tokens[:, :2], 6, jax.random.key(seed), temperature=1.0)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
