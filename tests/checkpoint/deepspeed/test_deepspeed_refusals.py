"""Files that do not belong together, and models that they do not fit, are refused by name."""

import shutil

import jax
import numpy as np
import optax
import pytest
from deepspeed_net import RULES, name_map, set_up

from jzero.checkpoint import Reader, folders, manifest
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.checkpoint.deepspeed import import_deepspeed
from jzero.checkpoint.deepspeed.source import read_source
from jzero.errors import JzeroError

RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"


def remove(name):
    return lambda saves, folder: (folder / name).unlink()


def bring(source, name):
    return lambda saves, folder: shutil.copy(saves / source, folder / name)


def empty(saves, folder):
    for path in folder.glob("*optim*"):
        path.unlink()


TANGLES = {
    "a rank in the middle": (
        "stage2_3_ranks/step4",
        remove(RANK.format(1)),
        f"{RANK.format(1)} missing; there are files of 3 ranks",
    ),
    "the last rank": (
        "stage2_3_ranks/step4",
        remove(RANK.format(2)),
        r"was saved by 3, 3 ranks \(by group\), but .* has the optimizer states of 2",
    ),
    "the last rank of stage 3": (
        "stage3_3_ranks/step4",
        remove(RANK.format(2)),
        f"{RANK.format(2)} missing; there are files of 3 ranks",
    ),
    "a rank's model at stage 3": (
        "stage3/step4",
        remove(MODEL.format(0)),
        f"{MODEL.format(0)} missing; there are files of 2 ranks",
    ),
    "the model": ("stage2/step4", remove("mp_rank_00_model_states.pt"), "no .*_model_states.pt"),
    "more ranks than were saved": (
        "stage2/step4",
        bring("stage2_3_ranks/step4/" + RANK.format(2), RANK.format(2)),
        "was saved by 2, 2 ranks .* of 3",
    ),
    "a rank of another number of ranks": (
        "stage2/step4",
        bring("stage2_3_ranks/step4/" + RANK.format(1), RANK.format(1)),
        "was saved by 3, 3 ranks .* of 2",
    ),
    "a rank of another save": (
        "stage2/step4",
        bring("stage2_round_robin/step4/" + RANK.format(1), RANK.format(1)),
        "in the optimizer's files is not what the model in .* held: they are of two saves",
    ),
    "a rank after other steps": (
        "stage3/step4",
        bring("stage3_fp16/step4/" + RANK.format(1), RANK.format(1)),
        "ranks' steps of group 0 are .*: of two saves",
    ),
    "a rank's model of another save": (
        "stage3/step4",
        bring("stage3_fp16/step4/" + MODEL.format(1), MODEL.format(1)),
        "differ in skipped_steps: they are of two saves",
    ),
    "a rank of stage 3": (
        "stage2/step4",
        bring("stage3/step4/" + RANK.format(1), RANK.format(1)),
        "single_partition_of_fp32_groups is nothing, not a list",
    ),
    "another precision": (
        "stage2/step4",
        bring("stage2_bf16/step4/bf16_" + RANK.format(0), "bf16_" + RANK.format(0)),
        "zero_pp_rank_1.*, of two saves",
    ),
    "stage 0": ("stage2/step4", empty, "has no .*_optim_states.pt, as at stage 0"),
    "a model in pieces": (
        "stage2/step4",
        bring("stage2/step4/mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"),
        r"mp_rank_01_model_states.pt: is a piece of a model that is split over devices",
    ),
    "experts": (
        "stage2/step4",
        bring("stage2/step4/mp_rank_00_model_states.pt", "expert_0_mp_rank_00_model_states.pt"),
        "is written with experts, which is not imported",
    ),
    "a pipeline": (
        "stage2/step4",
        bring("stage2/step4/mp_rank_00_model_states.pt", "layer_01-model_00-model_states.pt"),
        "is written with pipeline parallelism or experts",
    ),
    "a universal file": (
        "stage1/universal",
        remove("zero/blocks.0.up.weight/fp32.pt"),
        "zero/blocks.0.up.weight/fp32.pt: is missing",
    ),
    "a universal moment": (
        "stage1/universal",
        remove("zero/blocks.0.up.weight/exp_avg_sq.pt"),
        "has no moments of Adam for blocks.0.up.weight",
    ),
    "a universal file of another parameter": (
        "stage3/universal",
        bring(
            "stage3/universal/zero/blocks.0.up.weight/fp32.pt", "zero/blocks.0.down.bias/fp32.pt"
        ),
        r"blocks.0.down.bias/fp32.pt: its tensor is \[60\] for \[6\]",
    ),
    # DeepSpeed's converter does not know the order that this option gives parameters.
    "what DeepSpeed itself puts together wrongly": (
        "stage2_round_robin/universal",
        lambda saves, folder: None,
        "in the optimizer's files is not what the model .* were put together in the wrong order",
    ),
}


@pytest.mark.parametrize("tangle", TANGLES)
def test_files_of_one_whole_save_or_none(saves, tmp_path, tangle):
    form, change, says = TANGLES[tangle]
    folder = tmp_path / "tag"
    shutil.copytree(saves / form, folder)
    change(saves, folder)
    setup = set_up(with_empty="stage3" not in form).setup
    with pytest.raises(JzeroError, match=says):
        import_deepspeed(folder, tmp_path / "out", setup, name_map=name_map)
    assert not folders.published(tmp_path / "out")


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


def test_a_step_that_is_there_stays(saves, tmp_path):
    setup = set_up().setup
    import_deepspeed(saves / "stage2", tmp_path, setup, name_map=name_map)  # by the file `latest`
    with pytest.raises(JzeroError, match="step_00000004 is there already; delete it"):
        import_deepspeed(saves / "stage2", tmp_path, setup, name_map=name_map)


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
    state = Checkpointer(zero, tmp_path).restore().state
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
    assert Checkpointer(zero, tmp_path).restore() is not None


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
