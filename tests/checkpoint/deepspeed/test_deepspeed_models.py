"""What a model and its optimizer take from a checkpoint of DeepSpeed, or are refused."""

import jax
import numpy as np
import optax
import pytest
from deepspeed_net import RULES, name_map, set_up

from jzero.checkpoint import Reader, manifest
from jzero.checkpoint.deepspeed import import_deepspeed
from jzero.checkpoint.deepspeed.source import read_source
from jzero.errors import JzeroError


def with_rule(ours, **rule):
    """The rules, the one of a leaf replaced, or left out."""
    found = [rule for rule in RULES if rule["ours"] != ours]
    return [*found, {"ours": ours} | rule] if rule else found


TIED = [
    *(rule for rule in RULES if rule["ours"] not in ("gain", "frozen/bias")),
    {"ours": "gain", "theirs": None},
    {"ours": "frozen/bias", "theirs": ["frozen.bias", "gain"]},
]


@pytest.mark.parametrize(
    "rules, says",
    [
        (with_rule("gain"), "no rule for gain"),
        (with_rule("gain", theirs="gian"), "needs gian, which is not there; there is gain, which"),
        (with_rule("gain", theirs=None), "there is gain, which no leaf takes"),
        (
            with_rule("blocks/up/kernel", theirs="blocks.{layer}.up.weight"),
            r"blocks.1.up.weight is \[10, 6\] for \[6, 10\] of blocks/up/kernel",
        ),
        (TIED, "frozen/bias ties frozen.bias to gain, trained apart there"),
    ],
)
def test_a_name_map_fits_or_is_refused(saves, tmp_path, rules, says):
    with pytest.raises(JzeroError, match=says):
        import_deepspeed(saves / "stage2", tmp_path, set_up().setup, name_map=rules)


def test_one_tied_parameter_cannot_become_two(saves, tmp_path):
    leaves = {"embed": (11, 6), "head": (11, 6)}
    rules = [
        {"ours": "embed", "theirs": "embed.weight"},
        {"ours": "head", "theirs": "head.weight"},
        {
            "ours": None,
            "theirs": [n for n in read_source(saves / "stage2").parameters if "emb" not in n],
        },
    ]
    zero = set_up()
    setup = zero.setup_for(
        lambda key: {n: jax.numpy.zeros(s) for n, s in leaves.items()}, optax.adam(1)
    )
    with pytest.raises(JzeroError, match="head and embed are both embed.weight, one parameter"):
        import_deepspeed(saves / "stage2", tmp_path, setup, name_map=rules)


def test_optimizers_that_are_not_adam_take_the_parameters_only(saves, tmp_path):
    zero = set_up(tx=optax.sgd(1e-2, momentum=0.9))
    with pytest.raises(JzeroError, match="has no Adam, .* take the parameters only"):
        import_deepspeed(saves / "stage2", tmp_path, zero.setup, name_map=name_map)
    done = import_deepspeed(
        saves / "stage2", tmp_path, zero.setup, name_map=name_map, parameters_only=True
    )
    assert {name.split("/")[0] for name in manifest.read(done.folder).leaves} == {"params"}
    assert set(done.moments_left_out) >= {"blocks.1.up.weight", "gain"}


def test_moments_find_their_place_in_a_partitioned_chain(saves, tmp_path):
    def label(path, x):
        return "matrices" if x.ndim > 1 else "rest"

    adams = {"matrices": optax.adam(1e-2), "rest": optax.adamw(1e-3)}
    tx = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(adams, lambda params: jax.tree_util.tree_map_with_path(label, params)),
    )
    zero = set_up(tx=tx)
    import_deepspeed(saves / "stage2", tmp_path, zero.setup, name_map=name_map)
    state = zero.checkpointer(tmp_path).restore().state
    want = np.load(saves / "stage2/expected.npz")
    inner = zero.opt_state(state)[1].inner_states
    mu = inner["matrices"].inner_state[0].mu["blocks"]["up"]["kernel"]
    nu = inner["rest"].inner_state[0].nu["gain"]
    np.testing.assert_array_equal(mu[1], want["before/blocks.1.up.weight/exp_avg"].T)
    np.testing.assert_array_equal(nu, want["before/gain/exp_avg_sq"])


def test_what_has_no_counterpart_is_as_in_a_new_run_if_that_is_wanted(saves, tmp_path):
    tx = optax.chain(optax.adam(1e-2), optax.ema(0.9), optax.scale(0.5))
    zero = set_up(tx=tx)
    with pytest.raises(JzeroError, match="no counterpart of optimizer/1/ema/.* strict=False"):
        import_deepspeed(saves / "stage2", tmp_path, zero.setup, name_map=name_map)
    done = import_deepspeed(saves / "stage2", tmp_path, zero.setup, name_map=name_map, strict=False)
    assert "optimizer/1/ema/blocks/up/kernel" in done.first_values
    reader = Reader(done.folder, manifest.read(done.folder))
    assert not reader.region("optimizer/1/ema/blocks/up/kernel").any()
    assert zero.checkpointer(tmp_path).restore() is not None


def test_a_parameter_that_was_not_trained_has_no_moments_to_take(saves, tmp_path):
    zero = set_up(trainable=lambda path: True)
    with pytest.raises(JzeroError, match="no moments of Adam for frozen.*trainable="):
        import_deepspeed(saves / "stage2", tmp_path, zero.setup, name_map=name_map)


def test_moments_of_what_is_frozen_now_are_named(saves, tmp_path):
    zero = set_up(trainable=lambda path: not path.startswith(("frozen", "gain")), with_empty=False)
    done = import_deepspeed(saves / "stage3", tmp_path, zero.setup, name_map=name_map)
    assert done.moments_left_out == ("gain",)


def test_the_loss_scale_and_its_counters(saves):
    found = read_source(saves / "stage3_fp16").loss_scale
    assert found is not None and vars(found) == {"scale": 2.0**13, "clean": 1, "hysteresis": 1}
    assert read_source(saves / "stage3_bf16").loss_scale is None
