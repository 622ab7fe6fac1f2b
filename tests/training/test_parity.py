"""The promise: every stage, dtype, accumulation, kind of model and device count ends with the
weights of one device that saw whole batches, trained by plain JAX and Optax.
"""

import itertools

import numpy as np
import pytest
from models import KINDS, OPTIMIZERS, Net, assert_close, distance, mesh, reference, run

import jzero

STAGES, PRECISIONS, ACCUMULATIONS, SCANS = (0, 1, 2, 3), ("fp32", "bf16"), (1, 4), (True, False)
PRODUCT = list(itertools.product(STAGES, PRECISIONS, ACCUMULATIONS, KINDS, SCANS))


def pairwise(cases):
    """Few cases in which any two values of two factors still meet."""

    def pairs(case):
        return {(i, case[i], j, case[j]) for i in range(5) for j in range(i)}

    left = set().union(*map(pairs, cases))
    while left:
        best = max(cases, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        yield best


# Every stage with every kind of model, and all other pairs.
FEW = list(pairwise(PRODUCT))


def cases():
    for case in PRODUCT:
        marks = () if case in FEW else pytest.mark.full
        stage, precision, accumulation, kind, scanned = case
        shape = "scanned" if scanned else "unrolled"
        name = f"{stage}-{precision}-accumulate{accumulation}-{kind}-{shape}"
        yield pytest.param(*case, id=name, marks=marks)


def check(net, precision, found, history, optimizer="adamw"):
    first, want, losses, norms = reference(net, optimizer, precision)
    if precision == "fp32":
        assert_close(found, want)
        np.testing.assert_allclose([m["loss"] for m in history], losses, rtol=1e-5)
        # Adam does not see a gradient's size; its norm does.
        np.testing.assert_allclose([m["grad_norm"] for m in history], norms, rtol=1e-5)
        return
    # bf16 has 8 bits: a sum over eight devices rounds each gradient by up to 2**-8. Leaves must
    # agree in how far they moved, not only in where they are.
    for path in want:
        moved, expected = found[path] - first[path], want[path] - first[path]
        assert distance(moved, expected) < 0.04, path
    np.testing.assert_allclose([m["loss"] for m in history], losses, rtol=2e-3)
    np.testing.assert_allclose([m["grad_norm"] for m in history], norms, rtol=1e-2)


@pytest.mark.parametrize("stage, precision, accumulation, kind, scanned", list(cases()))
def test_a_stage_never_changes_the_numbers(stage, precision, accumulation, kind, scanned):
    # Rematerialised where scanned, tied where not: both occur with every kind.
    net = Net(kind, scanned=scanned, remat=scanned, tied=not scanned)
    # Adam divides by a gradient's own size, which turns bf16's noise around zero into whole steps.
    optimizer = "adamw" if precision == "fp32" else "sgd"
    zero = jzero.Zero(stage=stage, precision=precision, accumulation=accumulation)
    found, history, _ = run(net, zero, OPTIMIZERS[optimizer]())
    check(net, precision, found, history, optimizer)


@pytest.mark.parametrize("remat, tied", [(False, True), (False, False)])
def test_without_rematerialisation(remat, tied):
    net = Net("nnx", remat=remat, tied=tied)
    found, history, _ = run(net, jzero.Zero(stage=3))
    check(net, "fp32", found, history)


# 50, 18 and 22 divide by none of these; rows of weight 0 fill the batch up.
ODD = {"vocab": 50, "width": 18, "hidden": 22}
DEVICES = {3: (1, 1), 5: (3, 1), 6: (2, 2), 7: (3, 1)}


def odd_cases():
    """Every device count with one kind of model; with --full, with all of them."""
    for devices, kind in itertools.product(DEVICES, KINDS):
        marks = () if kind == KINDS[devices % 3] else pytest.mark.full
        yield pytest.param(devices, kind, marks=marks)


@pytest.mark.parametrize("devices, kind", list(odd_cases()))
def test_devices_that_divide_no_dimension(devices, kind):
    stage, accumulation = DEVICES[devices]
    net = Net(kind, scanned=devices != 6, **ODD)
    zero = jzero.Zero(stage=stage, accumulation=accumulation, mesh=mesh(devices))
    found, history, _ = run(net, zero, fill=-32 % (devices * accumulation))
    check(net, "fp32", found, history)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("optimizer", ["adafactor", "lamb"])
def test_optimizers_that_look_across_a_padded_leaf(optimizer, stage):
    net = Net("plain", **ODD)
    zero = jzero.Zero(stage=stage, mesh=mesh(7))
    found, history, state = run(net, zero, OPTIMIZERS[optimizer](), fill=3)
    check(net, "fp32", found, history, optimizer)
    assert state.opt_state is not None


@pytest.mark.parametrize("stage", [0, 3])
def test_a_hundred_steps_follow_the_same_curve(stage):
    net = Net("plain")
    zero = jzero.Zero(stage=stage, accumulation=2)
    _, history, _ = run(net, zero, OPTIMIZERS["sgd"](), steps=100)
    losses = reference(net, "sgd", steps=100)[2]
    np.testing.assert_allclose([m["loss"] for m in history], losses, rtol=1e-3)


def test_the_few_cases_hold_every_pair():
    assert {(c[0], c[3]) for c in FEW} == set(itertools.product(STAGES, KINDS))
    assert len(FEW) <= 20
