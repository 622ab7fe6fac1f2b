"""The bound on peak memory is what its terms say, and the command judges and refuses by it."""

import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jzero
from benchmarks import memory
from benchmarks.bound import bounds
from benchmarks.shapes import SHAPES, Shape
from jzero import config
from jzero.compare.row import Row
from jzero.hlo.large import Large
from jzero.hlo.text import Shape as Array

ROWS, WIDTH, INNER, LAYERS, CLASSES = 4, 8, 12, 3, 16
PARAMETERS = LAYERS * 2 * WIDTH * INNER + WIDTH * CLASSES


class Layer(nnx.Module):
    def __init__(self):
        self.up = nnx.Param(jnp.zeros((LAYERS, WIDTH, INNER)))
        self.down = nnx.Param(jnp.zeros((LAYERS, INNER, WIDTH)))

    def __call__(self, x):
        return (jnp.sin(x @ self.up[...]) @ self.down[...]).astype(x.dtype)


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = Layer()
        self.head = nnx.Param(jnp.zeros((WIDTH, CLASSES)))

    def __call__(self, x):
        layer = jax.checkpoint(lambda layer, x: layer(x), prevent_cse=False)
        x = x.astype(self.head[...].dtype)
        x, _ = jax.lax.scan(lambda x, one: (layer(one, x), None), x, self.layers)
        return x @ self.head[...]


def small() -> jzero.Workload:
    def loss_fn(model, batch, rng):
        return jnp.mean(jnp.square(model(batch["x"]).astype(jnp.float32)))

    def batch(rows):
        return {"x": jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)}

    settings = config.load(precision="bf16", micro_batch_size=ROWS)
    return jzero.Workload(lambda rngs: Net(rngs), loss_fn, batch, config=settings)


SMALL = Shape(small, (CLASSES,))


def test_each_term_by_hand():
    found = bounds(SMALL, devices=2)
    layer, head, row = 2 * WIDTH * INNER, WIDTH * CLASSES, ROWS * WIDTH
    state = {0: 14.0, 1: 2 + 12 / 2, 2: 2 + 12 / 2, 3: 12 / 2}  # bytes a parameter
    for stage, each in found.items():
        assert 0 < each.state - state[stage] * PARAMETERS < 100  # counts and the key
        assert each.gradients == (2, 2, 1, 1)[stage] * PARAMETERS
        assert each.activations == 2 * (LAYERS + 1) * row  # every layer's input and the head's
        assert each.intermediates == 2 * 2 * ROWS * INNER  # sine and cosine
        assert each.logits == 2 * 4 * ROWS * CLASSES
        assert each.layers == (0, 1, 1, 1)[stage] * 2 * 2 * layer
        assert each.leaf == (0, 2, 4, 4)[stage] * head
        assert each.total == sum(vars(each).values())


def test_logits_are_what_the_models_give():
    for shape in SHAPES.values():
        workload = shape.factory()
        batch = workload.batch(1)
        given = (
            batch["image"]
            if "image" in batch
            else batch["tokens"].update(shape=(1, batch["tokens"].shape[1] - 1))
        )
        model = nnx.eval_shape(lambda init=workload.init: init(rngs=nnx.Rngs(0)))
        assert jax.eval_shape(lambda model, x: model(x), model, given).shape == (1, *shape.logits)


@pytest.mark.parametrize(("share", "code", "holds"), [(1.049, 0, "yes"), (1.051, 1, "NO")])
def test_a_peak_is_judged(share, code, holds, monkeypatch, tmp_path, capsys):
    total = bounds(SMALL, devices=8)[3].total
    buffer = Large(3_000_000, Array("bf16", (3, 8)), "copy.1", "copy", "jit(step)/dot_general")
    row = Row(stage=3, peak_bytes=round(share * total), largest=(buffer,))
    monkeypatch.setattr(memory, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(memory, "compare", lambda *_: SimpleNamespace(rows=[row]))
    out = tmp_path / "out.json"
    given = ["--shapes", "small", "--stages", "3", "--target", "cpu:8", "--json", str(out)]
    assert memory.main(given) == code
    (read,) = json.loads(out.read_text())["rows"]
    assert read["peak_bytes"] == row.peak_bytes and read["bound_bytes"] == total
    assert read["bound"]["intermediates"] == 4 * ROWS * INNER and read["holds"] is (code == 0)
    printed = capsys.readouterr().out
    assert holds in printed.split()
    assert ("3.00 MB" in printed and "copy jit(step)/dot_general" in printed) is (code == 1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "deep,round"], "found 'deep,round'; allowed: names from wide,deep"),
        (["--stages", "4"], "found '4'; allowed: stages from 0,1,2,3, each once"),
        (["--target", "h100:9"], "target 'h100:9': GPUs come in nodes of 8"),
        (["--target", "here"], "here"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_bad_arguments_are_told_in_one_line(arguments, said, capsys):
    try:
        code = memory.main(arguments)
    except SystemExit as stop:
        code = stop.code
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert error.startswith("bench_memory.py: error: ") and said in error
