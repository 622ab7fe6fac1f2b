"""What a user's own program does to ZeRO-3: activations that move, gathered weights that are kept.

Compiled for CPU and for GPUs that are not there. XLA:CPU moves bf16 as f32: counts are elements.
"""

import re

import jax
import numpy as np
import pytest
from programs import (
    HIDDEN,
    LAYERS,
    LENGTH,
    PARAMETERS,
    SHAPES,
    VOCABULARY,
    WIDTH,
    annotated,
    gathered,
)
from steps import build_mesh

import jzero
from jzero.auditing import Kind, Report

SHAPED = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in SHAPES.items()}
MATRICES = LAYERS * 2 * WIDTH * HIDDEN


def audited(target: str, compiled, **options) -> Report:
    return jzero.audit(compiled, build_mesh(target, data=8), **options)


def test_annotations_alone_move_activations(target: str):
    report = audited(target, annotated(target))
    assert (report.state, report.batch, report.unsure) == (("momentum", "params"), ("tokens",), ())
    dtype = "f32" if target == "cpu:8" else "bf16"
    with pytest.raises(AssertionError) as error:
        report.assert_no_collective_on_activations()
    first, *lines, last = str(error.value).splitlines()
    assert re.match(r"activations are moved over data; each device sends [\d.]+ MB", first)
    hidden = r"\[(8,64,512|512,64,8)\]"  # of the whole batch, on every device, in each layer
    gather = rf"  all-gather {dtype}{hidden} over data, {LAYERS} times, [\d.]+ MB \(.*\): "
    assert re.match(
        gather + r"jit\(sgd\)/transpose\(jvp\(\)\)/while/.*, programs.py:\d+$", lines[0]
    )
    assert "jzero.gather" in last and "zero.train_step" in last
    found = report.of(Kind.ACTIVATION)
    assert len(lines) == len(found) and all(each.axes == ("data",) for each in found)
    assert any(each.elements == LAYERS * 8 * LENGTH * HIDDEN for each in found)


def test_activations_grow_with_the_batch_and_weights_do_not():
    few, many = (audited("cpu:8", annotated("cpu:8", rows)) for rows in (8, 16))
    sent = [
        {kind: sum(each.bytes or 0 for each in report.of(kind)) for kind in Kind}
        for report in (few, many)
    ]
    assert sent[1][Kind.ACTIVATION] == 2 * sent[0][Kind.ACTIVATION] > 0
    assert sent[1][Kind.WEIGHT] == sent[0][Kind.WEIGHT] > 0


def test_the_volume_of_a_broken_program_is_named(target: str):
    report = audited(target, annotated(target))
    with pytest.raises(AssertionError) as error:
        report.assert_volume(3, PARAMETERS)
    text = str(error.value)
    assert re.search(r"^each device sends 4\.\d+ times psi \(N-1\)/N elements", text)
    assert re.search(r"^  1\.99\d  all-gather, activations, \w+ over data$", text, re.MULTILINE)
    assert re.search(r"^3\.\d+ of it is activations\.", text, re.MULTILINE)


@pytest.mark.parametrize("remat", [True, False])
def test_gathering_at_the_use_moves_weights_and_gradients_alone(target: str, remat: bool):
    report = audited(target, gathered(target, remat))
    report.assert_no_collective_on_activations()
    outside = 2 * VOCABULARY * WIDTH / PARAMETERS  # embedding and head: gathered once
    report.assert_volume(3 - outside if remat else 2, PARAMETERS, tolerance=0.001)
    report.assert_volume(3 - outside if remat else 2, SHAPED, tolerance=0.001)
    if target != "cpu:8":
        report.assert_volume(3 - outside if remat else 2, np.int64(PARAMETERS), itemsize=2)
    elements = {kind: sum(each.elements or 0 for each in report.of(kind)) for kind in Kind}
    assert elements.pop(Kind.GRADIENT) == PARAMETERS
    assert elements.pop(Kind.WEIGHT) == (1 + remat) * PARAMETERS - remat * 2 * VOCABULARY * WIDTH
    assert elements.pop(Kind.SMALL) <= 2 and set(elements.values()) == {0}


def test_kept_weights_are_named(target: str):
    audited(target, gathered(target, True)).assert_no_kept_weights()
    report = audited(target, gathered(target, False))
    assert report.kept is not None
    assert {each.arguments for each in report.kept} == {("params['up']",), ("params['down']",)}
    assert {each.count for each in report.kept} == {LAYERS}
    size = MATRICES * (4 if target == "cpu:8" else 2)
    report.assert_no_kept_weights(limit=size)
    with pytest.raises(AssertionError) as error:
        report.assert_no_kept_weights(limit=size - 1)
    first, *lines, last = str(error.value).splitlines()
    assert first.startswith(
        f"gathered weights are kept from forward for backward, {size / 1e6:.2f}"
    )
    assert len(lines) == 2
    behind = r"params\['(up|down)'\], jit\(sgd\)/jvp\(\)/shard_map/.*programs.py:\d+$"
    for line in lines:
        assert re.match(rf"  all-gather \w+\[\d+,\d+\] over data, 4 times, .*: {behind}", line)
    assert "jax.checkpoint" in last


def test_peak(target: str):
    report = audited(target, gathered(target, False))
    assert report.memory is not None
    peak = report.memory.peak_bytes
    report.assert_peak_below(peak + 1)
    with pytest.raises(AssertionError) as error:
        report.assert_peak_below(peak)
    text = str(error.value)
    assert re.match(
        rf"the peak is {peak / 1e6:.2f} MB \(.*\), and should be below {peak / 1e6:.2f}", text
    )
    assert re.search(r"^  [\d.]+ MB \(.*\) of temporaries$", text, re.MULTILINE)
    assert re.search(r"^  \w+\[[\d,]+\], [\d.]+ kB .*programs.py:\d+$", text, re.MULTILINE)
    assert "gathered weights are kept" in text


def test_a_saved_text_tells_the_same_but_memory(target: str):
    compiled = annotated(target)
    whole, text = audited(target, compiled), audited(target, compiled.as_text())
    assert text.memory is None and text.moved == whole.moved and text.kept == whole.kept
    with pytest.raises(jzero.JzeroError, match="a text has no memory analysis"):
        text.assert_peak_below(1)


def test_as_a_table():
    table = str(audited("cpu:8", annotated("cpu:8")))
    assert "Mesh data=8, ZeRO over data. State: momentum, params. Batch: tokens." in table
    assert re.search(r"^Peak [\d.]+ MB", table, re.MULTILINE)
    assert re.search(r"activations │ all-gather +│ data +│ f32 +│", table)
    assert re.search(
        r"│ f32\[8,64,512\] +│ all-gather, data +│ +4 │ .*backward, programs.py:", table
    )
    assert "kept" not in table
    assert re.search(
        r"params\['up'\], all_gather, forward", str(audited("cpu:8", gathered("cpu:8", False)))
    )
