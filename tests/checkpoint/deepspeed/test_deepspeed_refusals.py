"""Files that do not belong together are refused by name."""

import shutil

import pytest
from deepspeed_net import name_map, set_up

from jzero.checkpoint import folders
from jzero.checkpoint.deepspeed import import_deepspeed, pickles, saved
from jzero.errors import JzeroError

RANK = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
ONE = "mp_rank_00_model_states.pt"


def remove(name):
    return lambda saves, folder: (folder / name).unlink()


def bring(save, name, to=None):
    """Puts a file of another save beside the others, or in the place of one."""
    return lambda saves, folder: shutil.copy(saves / save / name, folder / (to or name))


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
    "the model": ("stage2/step4", remove(ONE), "no .*_model_states.pt"),
    "more ranks than were saved": (
        "stage2/step4",
        bring("stage2_3_ranks/step4", RANK.format(2)),
        "was saved by 2, 2 ranks .* of 3",
    ),
    "a rank of another number of ranks": (
        "stage2/step4",
        bring("stage2_3_ranks/step4", RANK.format(1)),
        "was saved by 3, 3 ranks .* of 2",
    ),
    "a rank of another save": (
        "stage2/step4",
        bring("stage2_round_robin/step4", RANK.format(1)),
        "in the optimizer's files is not what the model in .* held: they are of two saves",
    ),
    "a rank after other steps": (
        "stage3/step4",
        bring("stage3_fp16/step4", RANK.format(1)),
        "ranks' steps of group 0 are .*: of two saves",
    ),
    "a rank's model of another save": (
        "stage3/step4",
        bring("stage3_fp16/step4", MODEL.format(1)),
        "differ in skipped_steps: they are of two saves",
    ),
    "a rank of stage 3": (
        "stage2/step4",
        bring("stage3/step4", RANK.format(1)),
        "single_partition_of_fp32_groups is nothing, not a list",
    ),
    "another precision": (
        "stage2/step4",
        bring("stage2_bf16/step4", "bf16_" + RANK.format(0)),
        "zero_pp_rank_1.*, of two saves",
    ),
    "stage 0": ("stage2/step4", empty, "has no .*_optim_states.pt, as at stage 0"),
    "a model in pieces": (
        "stage2/step4",
        bring("stage2/step4", ONE, "mp_rank_01_model_states.pt"),
        r"mp_rank_01_model_states.pt: is a piece of a model that is split over devices",
    ),
    "experts": (
        "stage2/step4",
        bring("stage2/step4", ONE, "expert_0_mp_rank_00_model_states.pt"),
        "is written with experts, which is not imported",
    ),
    "a pipeline": (
        "stage2/step4",
        bring("stage2/step4", ONE, "layer_01-model_00-model_states.pt"),
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
            "stage3/universal/zero", "blocks.0.up.weight/fp32.pt", "zero/blocks.0.down.bias/fp32.pt"
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


STEPS = ("global_steps", "skipped_steps")
TOO_MUCH = 10**5000  # which Python does not even print
NO_COUNTS = {
    "steps below 0": ("stage2", {"global_steps": -5}, "global_steps is no count: it is below 0"),
    "steps beyond int32": ("stage2", {"global_steps": 2**31}, "global_steps is no count"),
    "any number of steps": ("stage2", dict.fromkeys(STEPS, TOO_MUCH), "global_steps is no count"),
    "more skipped than done": ("stage2", {"skipped_steps": 5}, "has 5 skipped steps of 4"),
    "Adam's steps": ("stage2", {"step": 2**40}, "step is no count"),
    "Adam's steps below 0": ("stage2", {"step": -1.0}, "step is no count"),
    "hysteresis": ("stage2_fp16", {"cur_hysteresis": -1}, "cur_hysteresis is no count"),
    "steps at a scale": (
        "stage2_fp16",
        {"last_overflow_iter": 9},
        "last_overflow_iter is no count",
    ),
    "a scale of 0": ("stage2_fp16", {"cur_scale": 0}, "loss scale is not a positive"),
    "an endless scale": (
        "stage2_fp16",
        {"cur_scale": float("inf")},
        "loss scale is not a positive",
    ),
    "a scale of no float": ("stage2_fp16", {"cur_scale": TOO_MUCH}, "loss scale is not a positive"),
}


@pytest.mark.parametrize("case", NO_COUNTS)
def test_numbers_that_no_state_holds(saves, tmp_path, monkeypatch, case):
    save, told, says = NO_COUNTS[case]
    monkeypatch.setattr(saved, "load", lambda path: replaced(pickles.load(path), told))
    setup = set_up(precision="fp16" if "fp16" in save else "fp32").setup
    with pytest.raises(JzeroError, match=says):
        import_deepspeed(saves / save, tmp_path / "out", setup, name_map=name_map)
    assert not (tmp_path / "out").exists()


def replaced(found, told):
    """What was loaded, with other values under some keys."""
    if isinstance(found, pickles.Record):
        vars(found).update(replaced(vars(found), told))
    elif isinstance(found, dict):
        return {key: told.get(key, replaced(value, told)) for key, value in found.items()}
    elif isinstance(found, list):
        return [replaced(value, told) for value in found]
    return found


def test_a_step_that_is_there_stays(saves, tmp_path):
    setup = set_up().setup
    import_deepspeed(saves / "stage2", tmp_path, setup, name_map=name_map)  # by the file `latest`
    with pytest.raises(JzeroError, match="step_00000004 is there already; delete it"):
        import_deepspeed(saves / "stage2", tmp_path, setup, name_map=name_map)
