"""What a loss function may return, and what a batch must be."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import assert_close, mesh, numpy

import jzero
from jzero import JzeroError, Mean

ROWS = 32
WEIGHTS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)}


def make_batch(seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(rows, 4)), rng.normal(size=(rows, 3))
    weight = rng.random(rows) * rng.integers(0, 2, rows)
    return jax.tree.map(lambda a: a.astype(np.float32), {"x": x, "y": y, "weight": weight})


def row_losses(params, batch):
    return jnp.square(batch["x"] @ jzero.gather(params["w"]) - batch["y"]).sum(-1)


def weighted(params, batch, rng):
    losses = row_losses(params, batch)
    return Mean((losses * batch["weight"]).sum(), batch["weight"].sum())


def exact(batch, lr=0.1):
    """One step of gradient descent on the weighted mean, in float64."""
    w = WEIGHTS["w"].astype(np.float64)
    off = batch["x"].astype(np.float64) @ w - batch["y"]
    share = batch["weight"] / max(batch["weight"].sum(), 1e-30)
    loss = (share * np.square(off).sum(-1)).sum()
    grad = 2 * batch["x"].T.astype(np.float64) @ (share[:, None] * off)
    return loss, grad, {"w": w - lr * grad}


def once(loss_fn, batch, **config):
    zero = jzero.Zero(**config)
    state = zero.init(WEIGHTS, optax.sgd(0.1))
    state, metrics = zero.train_step(loss_fn)(state, batch)
    return numpy(zero.params(state)), metrics


def masked(batch, accumulation):
    """Device 2 sees no weight, nor does micro-batch 1 of any device."""
    micro = ROWS // 8 // accumulation
    weight = batch["weight"].reshape(8, accumulation, micro).copy()
    weight[2] = 0
    weight[:, 1:2] = 0
    return batch | {"weight": weight.reshape(-1)}


@pytest.mark.parametrize("stage, accumulation", [(0, 1), (1, 4), (2, 4), (3, 1), (3, 4)])
def test_a_weighted_mean_is_global(stage, accumulation):
    batch = make_batch()
    batch = masked(batch, accumulation) if accumulation > 1 else batch
    batch["weight"][:4] = 0  # the first device's
    params, metrics = once(weighted, batch, stage=stage, accumulation=accumulation)
    loss, grad, want = exact(batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], np.linalg.norm(grad), rtol=1e-6)
    assert_close(params, want, 1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_no_weight_anywhere_is_no_gradient_and_no_nan(accumulation):
    batch = make_batch() | {"weight": np.zeros(ROWS, np.float32)}
    params, metrics = once(weighted, batch, stage=3, accumulation=accumulation)
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and not metrics["skipped"]
    assert np.array_equal(params["w"], WEIGHTS["w"])


def test_a_mean_of_means_would_be_another_number():
    batch = make_batch()
    batch["weight"][4:8] = 0.1
    _, metrics = once(weighted, batch, stage=3)
    losses = np.square(batch["x"] @ WEIGHTS["w"] - batch["y"]).sum(-1)
    with np.errstate(invalid="ignore"):
        devices = (losses * batch["weight"]).reshape(8, 4).sum(1) / batch["weight"].reshape(
            8, 4
        ).sum(1)
    assert abs(np.nanmean(devices) - metrics["loss"]) > 0.1


@pytest.mark.parametrize("stage, accumulation", [(0, 4), (3, 1), (2, 4)])
def test_a_scalar_counts_every_device_and_micro_batch_alike(stage, accumulation):
    batch = make_batch() | {"weight": np.ones(ROWS, np.float32)}

    def loss_fn(params, batch, rng):
        losses = row_losses(params, batch)
        aux = {
            "largest": losses.max(),
            "columns": batch["x"].mean(0),
            "share": Mean((losses * batch["x"][:, 0] ** 2).sum(), (batch["x"][:, 0] ** 2).sum()),
        }
        return losses.mean(), aux

    params, metrics = once(loss_fn, batch, stage=stage, accumulation=accumulation)
    loss, _, want = exact(batch)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    assert_close(params, want, 1e-6)
    losses = np.square(batch["x"] @ WEIGHTS["w"] - batch["y"]).sum(-1)
    groups = losses.reshape(8 * accumulation, -1)
    np.testing.assert_allclose(metrics["largest"], groups.max(1).mean(), rtol=1e-6)
    np.testing.assert_allclose(metrics["columns"], batch["x"].mean(0), atol=1e-6)
    share = np.average(losses, weights=batch["x"][:, 0] ** 2)
    np.testing.assert_allclose(metrics["share"], share, rtol=1e-5)


def test_a_mean_with_aux():
    batch = make_batch()

    def loss_fn(params, batch, rng):
        return weighted(params, batch, rng), {"tokens": batch["weight"].sum()}

    _, metrics = once(loss_fn, batch, stage=2)
    np.testing.assert_allclose(metrics["loss"], exact(batch)[0], rtol=1e-6)
    np.testing.assert_allclose(metrics["tokens"], batch["weight"].sum() / 8, rtol=1e-6)


def test_the_metrics_are_global_scalars():
    _, metrics = once(weighted, make_batch(), stage=3)
    for value in metrics.values():
        assert value.shape == () and value.sharding.is_fully_replicated
    assert {"loss", "grad_norm", "grad_norm_clipped", "loss_scale", "skipped"} <= metrics.keys()


def test_mean_value():
    assert Mean(6.0, 3.0).value() == 2.0
    assert Mean(0.0, 0.0).value() == 0.0


# Errors.


def refuse(loss_fn, batch, match, **config):
    with pytest.raises(JzeroError, match=match):
        once(loss_fn, batch, stage=3, **config)


def test_a_vector_loss_is_refused():
    refuse(
        lambda p, b, rng: row_losses(p, b),
        make_batch(),
        r"shape \(4,\) as a loss .*; return a scalar .* or jzero.Mean\(total, weight\)",
    )


def test_a_vector_total_is_refused():
    refuse(
        lambda p, b, rng: Mean(row_losses(p, b), b["weight"].sum()), make_batch(), r"shape \(4,\)"
    )


def test_three_values_are_refused():
    def loss_fn(params, batch, rng):
        return row_losses(params, batch).mean(), {}, {}

    refuse(loss_fn, make_batch(), r"3 values; return a loss")


def test_rows_that_do_not_split_over_devices():
    refuse(weighted, make_batch(rows=30), r"batch\[weight\] of shape \(30,\).*8 data-parallel")


def test_rows_that_do_not_split_into_micro_batches():
    refuse(
        weighted,
        make_batch(rows=40),
        r"40 rows does not split into 8 devices \(mesh axes data=8\) x 3 micro-batches: give a "
        r"multiple of 24 rows",
        accumulation=3,
    )


def test_leaves_with_other_rows():
    batch = make_batch() | {"weight": np.zeros(16, np.float32)}
    refuse(weighted, batch, r"batch\[x\] has 32 rows but batch\[weight\] has 16")


def test_a_scalar_in_a_batch():
    refuse(weighted, make_batch() | {"scale": np.float32(1)}, r"batch\[scale\]")


def test_an_empty_batch():
    refuse(lambda p, b, rng: jnp.float32(0), {}, "no arrays")


def test_rows_that_are_not_the_configured_batch():
    refuse(
        weighted,
        make_batch(rows=16),
        r"\[16\] rows over all processes, but train_batch_size is 32",
        train_batch_size=32,
    )


def test_aux_named_like_a_metric():
    refuse(
        lambda p, b, rng: (row_losses(p, b).mean(), {"grad_norm": jnp.float32(0)}),
        make_batch(),
        r"\['grad_norm'\].*rename",
    )


def test_an_evaluation_checks_too():
    zero = jzero.Zero(stage=3, mesh=mesh(4))
    state = zero.init(WEIGHTS, optax.sgd(0.1))
    batch = make_batch()
    loss = zero.eval_step(weighted)(state, batch)["loss"]
    np.testing.assert_allclose(loss, exact(batch)[0], rtol=1e-6)
    with pytest.raises(JzeroError, match=r"return a scalar"):
        zero.eval_step(lambda p, b, rng: row_losses(p, b))(state, batch)
