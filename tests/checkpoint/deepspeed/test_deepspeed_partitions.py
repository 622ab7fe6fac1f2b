"""Flat partitions are cut where DeepSpeed cut them, and add up to the last element or are refused.

What the files of files.tar.xz do not have: gaps between parameters, an elastic checkpoint, steps in
the parameter groups as older versions had them, sizes that are wrong.
"""

import numpy as np
import pytest

from jzero.checkpoint.deepspeed.archive import Storage, Tensor
from jzero.checkpoint.deepspeed.partitions import trained
from jzero.checkpoint.deepspeed.saved import Saved, read
from jzero.errors import JzeroError

A, B = np.arange(1, 6, dtype=np.float32), np.arange(11, 15, dtype=np.float32)
SHAPES = {"a": (5,), "b": (2, 2)}


def tensor(folder, values) -> Tensor:
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    values = np.asarray(values, np.float32)
    path.write_bytes(values.tobytes())
    return Tensor(Storage(path, 0, "float32", values.size), 0, values.shape, (1,))


def rank(folder, weights, moments, padding, gaps=(0, 0), elastic=False) -> Saved:
    """One rank's file at stage 2, of one group."""
    state = {
        "exp_avg": tensor(folder, np.multiply(moments, 2)),
        "exp_avg_sq": tensor(folder, np.multiply(moments, 3)),
    }
    content = {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [tensor(folder, weights)],
        "group_paddings": [padding],
        "param_alignment_paddings": [list(gaps)],
        "partition_count": [2],
        "base_optimizer_state": {"state": {0: state}, "param_groups": [{"step": 7}]},
    }
    if elastic:
        state["step"] = 7
        content["base_optimizer_state"] = [state]
    return Saved(folder / "rank.pt", {"optimizer_state_dict": content})


MODEL = Saved("model.pt", {"param_shapes": [SHAPES]})


@pytest.mark.parametrize("elastic", [False, True])
@pytest.mark.parametrize("gap", [0, 3])
def test_parameters_are_found_across_ranks_and_gaps(tmp_path, gap, elastic):
    flat = np.concatenate([A, np.full(gap, np.nan), B])
    padding = -flat.size % 4
    first, last = np.split(np.concatenate([flat, np.full(padding, np.nan)]), 2)
    ranks = [
        rank(tmp_path, first, first, 0, (gap, 0), elastic),
        # Weights come without the padding, moments with it unless the checkpoint is elastic.
        rank(
            tmp_path,
            last[: last.size - padding],
            last[: last.size - padding] if elastic else last,
            padding,
            (gap, 0),
            elastic,
        ),
    ]
    a, b = trained(MODEL, ranks, stage3=False)
    assert (a.name, b.name, a.steps, b.steps) == ("a", "b", 7, 7)
    for what, factor in {"fp32": 1, "exp_avg": 2, "exp_avg_sq": 3}.items():
        np.testing.assert_array_equal(a.read(what), A * factor)
        np.testing.assert_array_equal(b.read(what), B.reshape(2, 2) * factor)


WRONG = {
    "a parameter too many": lambda model, ranks: model["param_shapes"][0].update(more=(1,)),
    "a parameter too few": lambda model, ranks: model["param_shapes"][0].pop("embed.weight"),
    "a larger parameter": lambda model, ranks: model["param_shapes"][1].update(gain=(5,)),
    "a smaller parameter": lambda model, ranks: model["param_shapes"][0].update(
        {"embed.weight": (11, 5)}
    ),
}
WRONG_PADDING = {
    "less padding": lambda model, ranks: ranks[1]["group_paddings"].__setitem__(1, 0),
    "padding elsewhere": lambda model, ranks: ranks[0]["group_paddings"].__setitem__(1, 1),
}


@pytest.mark.parametrize(
    "case, harm",
    [(f"stage{n}", harm) for n in (1, 2, 3) for harm in WRONG]
    + [(f"stage{n}", harm) for n in (1, 2) for harm in WRONG_PADDING],
)
def test_sizes_add_up_to_the_last_element(saves, case, harm):
    folder = saves / case / "step4"
    model = read(next(folder.glob("*mp_rank_00_model_states.pt")))
    ranks = [read(path) for path in sorted(folder.glob("*optim_states.pt"))]
    stage3 = case == "stage3"
    assert len(list(trained(model, ranks, stage3))) == 14
    change = (WRONG | WRONG_PADDING)[harm]
    change(model.content, [saved.content["optimizer_state_dict"] for saved in ranks])
    with pytest.raises(JzeroError, match="group [01] do not add up to its parameters|is nothing"):
        list(trained(model, ranks, stage3))
