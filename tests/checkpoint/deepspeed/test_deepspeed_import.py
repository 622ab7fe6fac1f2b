"""What DeepSpeed saved is what jzero goes on with."""

from functools import cache

import numpy as np
import pytest
from deepspeed_net import TRAINED, as_theirs, loss_fn, name_map, set_up

from jzero.checkpoint import Reader, manifest
from jzero.checkpoint.deepspeed import import_deepspeed
from jzero.paths import flatten

BEFORE, AFTER = 4, 3  # steps of the script's runs, around the checkpoint
FORMS = [
    *(f"{case}/step4" for case in ("stage1", "stage2", "stage3", "stage2_round_robin")),
    *(f"stage{n}_bf16/step4" for n in (1, 2, 3)),
    "stage1_bf16_fp32_accumulation/step4",
    *(f"stage{n}_fp16/step4" for n in (2, 3)),
    *(f"stage{n}_offload/step4" for n in (2, 3)),
    *(
        "stage1_1_rank/step4",
        "stage2_3_ranks/step4",
        "stage3_3_ranks/step4",
        "stage3_4_ranks/step4",
    ),
    *("stage1/universal", "stage2_bf16/universal", "stage3/universal"),
]


def like(form: str) -> dict:
    """What the network and its precision were in a run of the script."""
    [precision] = [p for p in ("bf16", "fp16") if f"_{p}" in form] or ["fp32"]
    return {"with_empty": not form.startswith("stage3"), "precision": precision}


@cache
def setup_of(**keywords):
    return set_up(**keywords).setup


@pytest.mark.parametrize("form", FORMS)
def test_weights_and_moments_are_what_deepspeed_says_they_are(saves, tmp_path, form):
    setup = setup_of(**like(form))
    done = import_deepspeed(saves / form, tmp_path, setup, name_map=name_map)
    saved = manifest.read(done.folder)
    reader = Reader(done.folder, saved)
    want = np.load(saves / form.split("/")[0] / "expected.npz")
    places = {"fp32": "params/", "exp_avg": "optimizer/0/mu/", "exp_avg_sq": "optimizer/0/nu/"}
    if "round_robin" in form:  # DeepSpeed's own functions give wrong pieces there
        places = {"model": "params/"}
    for what, place in places.items():
        for name in TRAINED:
            ours = as_theirs(name, lambda path, place=place: reader.region(place + path))
            np.testing.assert_array_equal(ours, want[f"before/{name}/{what}"], err_msg=name)
    applied = 1 if "fp16" in form else BEFORE
    for name in ("optimizer/0/count", "optimizer/2/count"):
        assert reader.region(name) == applied, name
    assert reader.region("progress/step") == BEFORE == saved.step
    assert reader.region("progress/skipped") == BEFORE - applied
    if "fp16" in form:
        assert reader.region("progress/scale/scale") == want["scales"][BEFORE - 1]
    assert done.first_values == ("progress/rng",) and not done.moments_left_out and not done.cast


FULL = pytest.mark.full


@pytest.mark.parametrize(
    "case, devices",
    [
        ("stage1", 2),
        pytest.param("stage2", 4, marks=FULL),
        ("stage3", 3),
        pytest.param("stage1_bf16", 3, marks=FULL),
        ("stage2_bf16", 2),
        pytest.param("stage3_bf16", 4, marks=FULL),
        ("stage2_fp16", 2),
        ("stage2_round_robin", 2),
    ],
)
def test_training_goes_on_as_deepspeed_went_on(saves, tmp_path, case, devices):
    want = np.load(saves / case / "expected.npz")
    zero = set_up(devices, stage=int(case[5]), **like(case))
    import_deepspeed(saves / case / "step4", tmp_path, zero.setup, name_map=name_map)
    restored = zero.checkpointer(tmp_path).restore()
    assert restored is not None
    state, step, losses = restored.state, zero.train_step(loss_fn), []
    for tokens in want["tokens"][BEFORE:][: AFTER - want["skipped"]]:  # a skipped one is the last
        state, metrics = step(state, {"tokens": tokens.astype(np.int32)})
        losses.append(float(metrics["loss"]))
    # Of losses, and of the way that weights and moments went in these steps.
    rounding, drift = {"fp32": (1e-5, 1e-4), "fp16": (1e-3, 0.02), "bf16": (1e-2, 0.05)}[
        like(case)["precision"]
    ]
    np.testing.assert_allclose(losses, want["losses"][BEFORE:][: len(losses)], rtol=rounding)
    adam = zero.opt_state(state)[0]
    found = {"exp_avg": flatten(adam.mu), "exp_avg_sq": flatten(adam.nu)}
    found |= {"fp32": flatten(zero.params(state))}
    if "round_robin" in case:
        found = {"model": found["fp32"]}
    for name in TRAINED:
        for what, leaves in found.items():
            before, after = (want[f"{when}/{name}/{what}"] for when in ("before", "after"))
            off = np.abs(as_theirs(name, leaves.get) - after).max()
            assert off <= drift * np.abs(after - before).max(), (name, what)
