"""A checkpoint that does not fit is refused leaf by leaf; what may come from elsewhere, and how."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from models import mesh
from states import assert_same, random_step, rewrite, save, whole

import jzero
from jzero import JzeroError, checkpoint
from jzero.checkpoint import Facts, manifest, restore, write_leaves


def init(key, width=6, low=jnp.float32):
    return {
        "w": jax.random.normal(key, (13, width)),
        "b": jnp.ones(width),
        "frozen": jnp.ones((5, 3), low),
    }


def make(init=init, tx=None, stage=3, **keywords):
    zero = jzero.Zero(stage=stage, mesh=mesh(4), **keywords)
    tx = optax.adam(1e-3) if tx is None else tx
    state = zero.init(init, tx, trainable=lambda path: path != "frozen")
    return zero, state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, its leaves): random bits in the shape of `make()`."""
    return random_step(tmp_path_factory.mktemp("checkpoints"), make()[0])


def message(folder, zero, **options):
    with pytest.raises(JzeroError) as caught:
        restore(folder, zero.setup, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_shape(saved):
    zero, _ = make(lambda key: init(key, width=7))
    text = message(saved[0], zero)
    assert "does not fit this model and optimizer: 6 leaves differ" in text
    assert "params/w: saved float32[13,6], expected float32[13,7]" in text
    assert "optimizer/0/mu/b: saved float32[6], expected float32[7]" in text
    assert "frozen" not in text


def test_another_dtype_is_never_cast(saved):
    zero, _ = make(precision="bf16")  # what is not trained is kept in bf16 then
    text = message(saved[0], zero)
    assert "1 leaf differs (params/frozen: saved float32[5,3], expected bfloat16[5,3])" in text


def test_missing_and_unexpected_leaves(saved):
    zero, _ = make(lambda key: {"w": init(key)["w"], "b2": jnp.ones(6), "frozen": jnp.ones((5, 3))})
    text = message(saved[0], zero)
    assert "params/b: saved float32[6], not expected" in text
    assert "params/b2: not saved, expected float32[6]" in text
    assert "optimizer/0/nu/b2: not saved" in text


def test_another_optimizer(saved):
    zero, _ = make(tx=optax.sgd(0.1, momentum=0.9))
    text = message(saved[0], zero)
    assert "optimizer/0/trace/w: not saved, expected float32[13,6]" in text
    assert "optimizer/0/mu/w: saved float32[13,6], not expected" in text
    assert "parts=" in text and "strict=False" in text and "base=" in text


def test_a_long_list_is_cut(tmp_path):
    zero, _ = make(lambda key: {f"w{i}": jnp.ones(3) for i in range(15)} | {"frozen": jnp.ones(2)})
    folder = write_leaves(tmp_path, 1, [], Facts())
    text = message(folder, zero)
    assert text.count("not saved") == 20 and "and 30 more" in text


def test_parameters_alone(saved):
    """With a changed optimizer, from step 0."""
    folder, bits = saved
    zero, base = make(tx=optax.sgd(0.1, momentum=0.9), stage=1)
    want = whole(zero, base)
    restored = restore(folder, zero.setup, parts=("params",), base=base)
    found = whole(zero, restored.state)
    assert_same(
        found, want | {name: x for name, x in bits.items() if name in restored.report.taken}
    )
    assert sorted(restored.report.taken) == ["params/b", "params/frozen", "params/w"]
    assert restored.report.from_base["progress/step"] == "not among the parts asked for"
    assert restored.step == 5 and int(restored.state.step) == 0


def test_what_is_not_taken_needs_a_base(saved):
    zero, _ = make()
    text = message(saved[0], zero, parts=("params", "progress"))
    assert "5 leaves are not taken from it (optimizer/0/count: not among the parts" in text
    assert "give base=zero.init(...)" in text


def test_leaves_that_differ_may_come_from_the_base(saved):
    folder, bits = saved
    zero, base = make(lambda key: init(key) | {"w": jnp.ones((13, 9)), "new": jnp.ones(2)})
    want = whole(zero, base)
    restored = restore(folder, zero.setup, base=base, strict=False)
    report = restored.report
    assert report.from_base["params/w"] == "saved float32[13,6], expected float32[13,9]"
    assert report.from_base["optimizer/0/mu/new"] == "not saved, expected float32[2]"
    assert report.unused == {} and "params/b" in report.taken
    found = whole(zero, restored.state)
    assert_same(found, want | {name: bits[name] for name in report.taken})
    assert "params/w: from base, saved float32[13,6]" in str(report)


def test_leaves_that_nothing_takes_are_reported(saved):
    zero, base = make(lambda key: {name: x for name, x in init(key).items() if name != "b"})
    report = restore(saved[0], zero.setup, base=base, strict=False).report
    assert report.unused["params/b"] == "saved float32[6], not expected"
    assert report.from_base == {}
    assert "optimizer/0/mu/b: not taken" in str(report)


def test_a_base_must_be_this_models(saved):
    zero, _ = make()
    _, other = make(lambda key: init(key, width=7))
    with pytest.raises(JzeroError, match="not one of the model that zero.init laid out"):
        restore(saved[0], zero.setup, parts=("params",), base=other)
    with pytest.raises(JzeroError, match="not a jzero.State"):
        restore(saved[0], zero.setup, parts=("params",), base={"w": 1})


def test_a_part_that_is_none(saved):
    assert "'moments' is none of params, optimizer" in message(
        saved[0], make()[0], parts=("params", "moments")
    )


# The loss scale: a counter of a run whose scale follows overflows, otherwise a setting.


def loss_scale(folder, zero):
    restored = restore(folder, zero.setup)
    return float(restored.state.scale.scale), restored.report


def fp16(**section):
    config = {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, **section}}
    return jzero.Zero(config, mesh=mesh(4))


@pytest.mark.parametrize(
    "before, after, want, said",
    [
        (fp16(), fp16(), 7.0, ""),
        (fp16(), jzero.Zero(precision="bf16"), 1.0, "was dynamic in the saved run"),
        (jzero.Zero(precision="bf16"), fp16(initial_scale_power=5), 32.0, "is dynamic only now"),
        (fp16(loss_scale=64.0), fp16(loss_scale=128.0), 128.0, ""),
        (fp16(), fp16(loss_scale=128.0), 128.0, "was dynamic in the saved run"),
    ],
)
def test_the_loss_scale(before, after, want, said, tmp_path):
    def weights(key):
        return {"w": jnp.ones(3)}

    state = before.init(weights, optax.sgd(0.1))
    state = jzero.State(**{**vars(state), "scale": jax.tree.map(lambda x: x * 0 + 7, state.scale)})
    folder = save(tmp_path, before, state)
    after.setup_for(weights, optax.sgd(0.1))
    found, report = loss_scale(folder, after)
    assert found == want
    assert ("progress/scale/clean" in report.from_config) == (want != 7.0)
    assert said in str(report) and ("loss scale" in str(report)) == bool(said)


# What is left out, and what is added beside the state.


def test_a_checkpoint_of_the_trained_parameters(tmp_path):
    zero, state = make()
    entries = checkpoint.entries(zero.setup, state).values()
    want = whole(zero, state)
    folder = checkpoint.save_step(
        tmp_path,
        0,
        checkpoint.snapshot(entry for entry in entries if entry.trained),
        checkpoint.facts_of(zero.setup, state, trainable_only=True),
        nonce=checkpoint.agree_nonce(),
    )
    assert "params/frozen" not in manifest.read(folder).leaves
    assert "params/frozen: not trained, and left out" in message(folder, zero)
    _, base = make()
    restored = restore(folder, zero.setup, base=base)
    assert_same(whole(zero, restored.state), want)
    assert list(restored.report.from_base) == ["params/frozen"]


def test_a_position_for_each_process(saved):
    zero, _ = make()
    folder = saved[0]
    rewrite(folder, lambda x: replace(x, facts=replace(x.facts, data=({"row": 1}, {"row": 2}))))
    restored = restore(folder, zero.setup)
    assert restored.positions == ({"row": 1}, {"row": 2})
    with pytest.raises(JzeroError, match="was saved by 2 processes, each its own, and there are 1"):
        _ = restored.data
    rewrite(folder, lambda x: replace(x, facts=replace(x.facts, data=(None,))))
    assert restore(folder, zero.setup).data is None
