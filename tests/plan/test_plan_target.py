"""What fits a target, what a step's traffic takes, and which stage to take."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jzero import targets
from jzero.factory import load
from jzero.plan import lay_out, of_model, of_params
from jzero.plan.demand import of_count, of_job
from jzero.plan.flops import count, residual_bytes

MODEL = Path(__file__).parents[2] / "examples" / "lm" / "model.py"
H100 = targets.parse("h100:8")


def plan(params=13 * 10**9, target="h100:8", **options):
    parsed = targets.parse(target)
    found = of_params(params, parsed.count, target=parsed, **options)
    assert found.on is not None
    return found, found.on


def test_13b_fits_from_stage_1_on():
    _, on = plan()
    assert [fit.fits for fit in on.fits] == [False, True, True, True]
    assert [fit.capacity_bytes for fit in on.fits] == [84942979072] * 4


@pytest.mark.parametrize("stage, gb", [(0, 209.0), (1, 72.5), (2, 50.7), (3, 25.0)])
def test_peaks_of_the_model_are_near_the_compiled_ones(stage, gb):
    found = of_model(lay_out(load(f"{MODEL}:llama_13b"), 8), H100)
    assert found.on is not None
    assert found.on.fits[stage].peak_bytes / 1e9 == pytest.approx(gb, rel=0.03)


def test_the_fraction_that_a_run_needs_is_named():
    _, on = plan()
    one, two = on.fits[1], on.fits[2]
    assert one.fraction == one.peak_bytes / 84942979072
    assert one.setting is not None and one.fraction <= one.setting < one.fraction + 0.01
    assert two.fraction is not None and two.fraction < 0.75 and two.setting is None


def test_the_gathered_layer_counts_at_stages_2_and_3():
    _, on = plan()
    layer = 2 * on.demand.layer_elements
    assert [fit.layer_bytes for fit in on.fits] == [0, 0, layer, 2 * layer]


def test_one_micro_batchs_gradients_stand_beside_their_sum():
    found, on = plan(accumulate=4)
    assert [fit.micro_gradient_bytes for fit in on.fits] == [
        row.gradients_bytes // 2 for row in found.rows
    ]


def test_the_lowest_stage_that_fits_is_recommended():
    _, on = plan()
    assert on.advice.stage == 1
    assert "stage 0 would need" in on.advice.reason
    assert on.advice.verdicts[0].startswith("does not fit")
    assert "as much as stage 1 and frees" in on.advice.verdicts[2]


def test_a_higher_stage_than_memory_demands_is_a_mistake_with_its_cost():
    _, on = plan(accumulate=4)
    assert on.advice.stage == 2
    assert on.advice.verdicts[3] == (
        "a mistake: stage 2 fits, and this sends 2.4 times as much, 91,000,000,000 elements more "
        "a step (354 ms)"
    )


def test_small_models_need_not_be_sharded():
    _, on = plan(10**8)
    assert on.advice.stage == 0
    assert "nothing need be sharded" in on.advice.reason


def test_where_nothing_fits_the_number_of_devices_is_named():
    found, on = plan(70 * 10**9)
    assert on.advice.stage is None
    assert "none fits h100:8" in on.advice.reason
    assert "would fit on about 16 of these devices" in on.advice.reason
    assert found.as_dict()["recommended_stage"] is None
    _, on = plan(70 * 10**9, "h100:16")
    assert on.advice.stage == 3


def test_the_time_to_send_is_bytes_over_the_link():
    _, on = plan()
    assert on.speeds[3].send_seconds == pytest.approx(3 * 13e9 * 2 * 7 / 8 / 450e9)
    _, on = plan(target="h100:16")  # over two nodes 8 cards of 50 GB/s are slower than NVLink
    assert on.speeds[0].send_seconds == pytest.approx(2 * 13e9 * 2 * 15 / 16 / 400e9)


def test_break_even_is_where_both_take_as_long():
    _, on = plan(tokens=4096)
    for stage in range(4):
        speed = on.speeds[stage]
        assert speed.break_even_tokens is not None
        _, again = plan(tokens=speed.break_even_tokens)
        send, compute = again.speeds[stage].send_seconds, again.speeds[stage].compute_seconds
        assert send == pytest.approx(compute, rel=2e-3)


def test_one_device_sends_nothing():
    _, on = plan(10**9, "h100:1")
    assert [speed.send_seconds for speed in on.speeds] == [0, 0, 0, 0]
    assert on.advice.stage == 0


def test_a_tpu_has_figures_and_a_cpu_has_none():
    _, on = plan(target="v5p:2x2x2")
    assert on.fits[0].capacity_bytes == 102005473280 and on.speeds[0].send_seconds
    found, on = plan(target="cpu:8")
    assert [fit.fits for fit in on.fits] == [None] * 4
    assert on.speeds[3].send_seconds is None and on.advice.stage is None
    assert found.as_dict()["rows"][3]["verdict"] is None


def test_operations_of_a_trace_agree_with_8_for_each_parameter_and_token():
    job = lay_out(load(f"{MODEL}:llama_13b"), 8)
    traced, guessed = of_job(job), of_count(job.params, 1024, 2)
    assert traced.tokens == 1025
    assert traced.operations == pytest.approx(guessed.operations, rel=0.05)
    assert traced.activation_bytes == pytest.approx(guessed.activation_bytes, rel=0.3)


def test_activations_grow_with_the_micro_batch():
    one, two = (of_job(lay_out(load(f"{MODEL}:tiny"), 8, micro_batch=n)) for n in (1, 2))
    # Masks and angles are the same for all rows.
    assert 1.8 * one.activation_bytes < two.activation_bytes < 2 * one.activation_bytes
    assert two.operations == pytest.approx(2 * one.operations, rel=0.01)


def test_operations_of_scans_and_convolutions():
    x, w = jnp.ones((4, 8)), jnp.ones((3, 8, 8))
    scan = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, w: (c @ w, None), x, w))(x)
    assert count(scan).once == 3 * 2 * 4 * 8 * 8
    image, kernel = jnp.ones((1, 2, 8, 8)), jnp.ones((5, 2, 3, 3))
    conv = jax.make_jaxpr(lambda i: jax.lax.conv(i, kernel, (1, 1), "SAME"))(image)
    assert count(conv).once == 2 * (5 * 8 * 8) * (2 * 3 * 3)


def test_residuals_leave_arguments_out():
    x, w = jnp.ones((4, 8)), jnp.ones((8, 16))
    assert residual_bytes(lambda x, w: jnp.sum(x @ w), x, w) == 0
    assert residual_bytes(lambda x, w: jnp.sum(jnp.sin(x @ w)), x, w) == 4 * 16 * 4
