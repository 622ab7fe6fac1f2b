"""A loss that computes with one device's shard is an error; every proper way to read is not."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import jzero
from jzero.models import describe
from jzero.probe import reads
from jzero.sharded import gather

LAYERS, WIDTH = 3, 8
X = jax.ShapeDtypeStruct((2, WIDTH), jnp.float32)


def probe(init, loss_fn, sample=None, x=X):
    """path -> axes taken away, as a step's trace finds them."""
    model = describe(init, 0, sample)
    params, variables = model.weights or jax.eval_shape(model.build, jax.random.key(0))

    def use(params, variables, x):
        loss_fn(model.bind(params, variables, lambda key: key), x)

    return {path: read.gone for path, read in reads(use, params, variables, x).items()}


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.linear(self.norm(x))


class Stack(nnx.Module):
    """Layers stacked along `axis`, run in a scan of Flax's or of JAX's."""

    def __init__(self, rngs, axis=0, how="nnx", remat=False):
        self.axis, self.how, self.remat = axis, how, remat
        self.embed = nnx.Embed(5, WIDTH, rngs=rngs)
        split = nnx.vmap(Layer, in_axes=0, out_axes=nnx.StateAxes({nnx.Param: axis, ...: 0}))
        self.layers = split(rngs.split(LAYERS))

    def __call__(self, x):
        def call(layer, x):
            return layer(x)

        if self.remat:
            call = nnx.remat(call)
        if self.how == "nnx":
            axes = nnx.StateAxes({nnx.Param: self.axis, ...: 0})
            run = nnx.scan(
                lambda x, layer: call(layer, x), in_axes=(nnx.Carry, axes), out_axes=nnx.Carry
            )
            x = run(x, self.layers)
        elif self.how == "lax":
            graph, state = nnx.split(self.layers)
            x, _ = lax.scan(lambda x, s: (call(nnx.merge(graph, s), x), None), x, state)
        else:
            graph, state = nnx.split(self.layers)
            for i in range(LAYERS):
                one = jax.tree.map(lambda p, i=i: p[i], state)
                x = call(nnx.merge(graph, one), x)
        return self.embed.attend(x)  # tied


def mean(model, x):
    return model(x).mean()


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("how, axis", [("nnx", 0), ("nnx", 1), ("lax", 0), ("index", 0)])
def test_nnx_stacks_are_allowed_and_their_axis_found(how, axis, remat):
    found = probe(lambda rngs: Stack(rngs, axis, how, remat), mean)
    assert found.pop("embed/embedding") == ()
    # A bias has only one axis beside the layers'.
    assert found == dict.fromkeys(found, (axis,)) and len(found) == 3


def test_an_ambiguous_layer_axis_is_found_exactly():
    def loss(params, x):
        def body(x, w):
            return x @ gather(w)["w"], None

        return lax.scan(body, x, jax.tree.map(lambda w: jnp.moveaxis(w, 1, 0), params))[0].mean()

    cube = {"w": jnp.ones((WIDTH, WIDTH, WIDTH))}
    assert probe(cube, loss) == {"w": (1,)}


STOCK_NNX = {
    "conv": (lambda rngs: nnx.Conv(3, 8, (3, 3), rngs=rngs), (2, 8, 8, 3)),
    "batch norm": (lambda rngs: nnx.BatchNorm(8, rngs=rngs), (2, 8)),
    "group norm": (lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs), (2, 8)),
    "attention": (lambda rngs: nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs), (2, 5, 16)),
    "einsum": (lambda rngs: nnx.Einsum("ab,bc->ac", (8, 4), (4,), rngs=rngs), (2, 8)),
    "lora": (lambda rngs: nnx.LoRALinear(8, 4, lora_rank=2, rngs=rngs), (2, 8)),
    "lstm": (lambda rngs: nnx.RNN(nnx.LSTMCell(4, 6, rngs=rngs)), (2, 5, 4)),
}
STOCK_LINEN = {
    "conv": (nn.Conv(8, (3, 3)), (2, 8, 8, 3)),
    "attention": (nn.MultiHeadDotProductAttention(4), (2, 5, 16)),
    "gru": (nn.Bidirectional(nn.RNN(nn.GRUCell(6)), nn.RNN(nn.GRUCell(6))), (2, 5, 4)),
    "general": (nn.DenseGeneral((2, 4)), (2, 8)),
}


@pytest.mark.parametrize("init, shape", STOCK_NNX.values(), ids=STOCK_NNX)
def test_stock_nnx_layers_read_all_they_have(init, shape):
    found = probe(init, mean, x=jax.ShapeDtypeStruct(shape, jnp.float32))
    params = nnx.state(nnx.eval_shape(lambda: init(nnx.Rngs(0))), nnx.Param)
    assert len(found) == len(jax.tree.leaves(params)) and set(found.values()) == {()}


@pytest.mark.parametrize("module, shape", STOCK_LINEN.values(), ids=STOCK_LINEN)
def test_stock_linen_layers_read_all_they_have(module, shape):
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    found = probe(module, mean, sample=x, x=x)
    params = jax.eval_shape(module.init, jax.random.key(0), x)["params"]
    assert len(found) == len(jax.tree.leaves(params)) and set(found.values()) == {()}


def test_nested_linen_scans_lose_both_axes():
    module = nn.remat_scan(nn.Dense, lengths=(2, 3))(WIDTH)
    assert probe(module, mean, sample=X) == {"kernel": (0, 1), "bias": (0, 1)}


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return x + nn.Dense(WIDTH)(nn.RMSNorm()(x)), None


class LinenStack(nn.Module):
    axis: int = 0
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(LinenLayer, prevent_cse=False) if self.remat else LinenLayer
        scanned = nn.scan(
            layer, variable_axes={"params": self.axis}, split_rngs={"params": True}, length=LAYERS
        )
        return scanned(name="layers")(x, None)[0]


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_linen_stacks_are_allowed_and_their_axis_found(axis, remat):
    module = LinenStack(axis, remat)
    found = probe(module, mean, sample=X)
    assert found == dict.fromkeys(found, (axis,)) and len(found) == 3


def params():
    layers = {"w": jnp.ones((LAYERS, WIDTH, WIDTH)), "b": jnp.ones((LAYERS, WIDTH))}
    return {"layers": layers, "head": jnp.ones((WIDTH, 4)), "scale": jnp.ones(())}


def apply_layer(x, layer):
    layer = gather(layer)
    return jnp.tanh(x @ layer["w"] + layer["b"])


def finish(params, x):
    return (x @ gather(params["head"])).mean() * gather(params["scale"])


def scanned(params, x):
    x, _ = lax.scan(lambda x, layer: (apply_layer(x, layer), None), x, params["layers"])
    return finish(params, x)


def indexed(params, x):
    for i in range(LAYERS):
        x = apply_layer(x, jax.tree.map(lambda p, i=i: p[i], params["layers"]))
    return finish(params, x)


def fori(params, x):
    def body(i, x):
        one = jax.tree.map(
            lambda p: lax.dynamic_index_in_dim(p, i, keepdims=False), params["layers"]
        )
        return apply_layer(x, one)

    return finish(params, lax.fori_loop(0, LAYERS, body, x))


def carried(params, x):
    """The parameters travel in the loop's carry."""

    def body(carry):
        i, x, layers = carry
        return i + 1, apply_layer(x, jax.tree.map(lambda p: p[i], layers)), layers

    carry = lax.while_loop(lambda c: c[0] < LAYERS, body, (0, x, params["layers"]))
    return finish(params, carry[1])


def handed_back(params, x):
    """A scan that hands its layers out again, which are then read in a second one."""

    def body(x, layer):
        return apply_layer(x, layer), layer

    x, layers = lax.scan(body, x, params["layers"])
    return scanned({**params, "layers": layers}, x)


def halves(params, x):
    for half in (slice(0, 1), slice(1, None)):
        layers = jax.tree.map(lambda p, half=half: p[half], params["layers"])
        x, _ = lax.scan(lambda x, layer: (apply_layer(x, layer), None), x, layers)
    return finish(params, x)


def remat(params, x):
    body = jax.checkpoint(lambda x, layer: (apply_layer(x, layer), None))
    return finish(params, lax.scan(body, x, params["layers"])[0])


def chosen(params, x):
    one = jax.tree.map(lambda p: p[0], params["layers"])
    x = lax.cond(x.sum() > 0, apply_layer, lambda x, layer: x, x, one)
    return finish(params, jax.jit(indexed)(params, x) + x)


def barred(params, x):
    params = lax.optimization_barrier(jax.tree.map(lambda p: checkpoint_name(p, "p"), params))
    return scanned(jzero.stop_gradient(params), x)


def custom(params, x):
    @jax.custom_jvp
    def f(x, layer):
        return apply_layer(x, layer)

    f.defjvp(lambda primals, tangents: (f(*primals), tangents[0]))
    one = jax.tree.map(lambda p: p[0], params["layers"])
    return finish(params, f(x, one))


def input_gradient(params, x):
    return jax.grad(lambda x: scanned(params, x))(x).mean()


def whole_norm(params, x):
    return scanned(params, x) + optax.tree.norm(gather(params))


@pytest.mark.parametrize(
    "loss",
    [scanned, indexed, fori, carried, handed_back, halves, remat, chosen, barred, custom]
    + [input_gradient],
)
def test_plain_pytrees_are_allowed(loss):
    found = probe(params(), loss)
    assert found == {"layers/w": (0,), "layers/b": (0,), "head": (), "scale": ()}


def test_a_whole_read_beside_the_layers_is_allowed():
    assert probe(params(), whole_norm)["layers/w"] == (0,)


def test_layers_under_vmap_are_known_by_shape_only():
    def ensemble(params, x):
        return jax.vmap(apply_layer, in_axes=(None, 0))(x, params["layers"]).mean()

    assert probe(params(), ensemble) == {"layers/w": None, "layers/b": None}
    assert probe(params(), lambda p, x: jax.vmap(lambda r: scanned(p, r[None]))(x).mean()) == {
        "layers/w": (0,),
        "layers/b": (0,),
        "head": (),
        "scale": (),
    }


def test_unused_parameters_and_shapes_alone_are_allowed():
    def loss(params, x):
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p).sum(), params)
        return sum(jax.tree.leaves(zeros)) + x.sum()

    assert probe(params(), loss) == {}


def test_a_teacher_and_nnx_values_read_by_hand_are_allowed():
    def loss(model, x):
        teacher = jzero.stop_gradient(model)
        penalty = sum((p[...] ** 2).sum() for _, p in nnx.iter_graph(model) if _is_param(p))
        return ((model(x) - teacher(x)) ** 2).mean() + penalty

    found = probe(lambda rngs: Layer(rngs), loss)
    assert set(found.values()) == {()} and len(found) == 3


def _is_param(x):
    return isinstance(x, nnx.Param)


RAW = {
    "square": lambda p, x: sum(jnp.sum(w**2) for w in jax.tree.leaves(p)),
    "norm": lambda p, x: optax.tree.norm(p),
    "in a scan": lambda p, x: lax.scan(
        lambda c, w: (c + jax.tree.leaves(w)[0].sum(), None), 0.0, p["layers"]
    )[0],
    "in a call": lambda p, x: jax.jit(optax.tree.norm)(p),
    "under remat": lambda p, x: jax.checkpoint(lambda p: jax.tree.leaves(p)[0].sum())(p),
    "cast": lambda p, x: scanned(jax.tree.map(lambda w: w.astype(jnp.bfloat16), p), x),
    "average": lambda p, x: scanned(jax.tree.map(lambda w: 0.9 * w, p), x),
    "reshape": lambda p, x: gather(jax.tree.map(lambda w: w.reshape(-1), p))["head"].sum(),
    "only a scalar": lambda p, x: jax.tree.leaves(p["scale"])[0] * x.sum(),
    "predicate": lambda p, x: lax.cond(jax.tree.leaves(p["scale"])[0] > 0, jnp.sum, jnp.max, x),
    "carry": lambda p, x: lax.fori_loop(0, 2, lambda i, c: c * 2, jax.tree.leaves(p)[0]).sum(),
}


@pytest.mark.parametrize("loss", RAW.values(), ids=RAW)
def test_raw_use_is_an_error(loss):
    with pytest.raises(jzero.JzeroError, match="uses the raw value of this parameter"):
        probe(params(), loss)


def test_the_error_names_leaf_primitive_line_and_remedy():
    def penalty(model, x):
        weights = nnx.state(model, nnx.Param)
        return model(x).mean() + sum(
            jax.tree.leaves(jax.tree.map(lambda p: jnp.square(p).sum(), weights))
        )

    with pytest.raises(jzero.JzeroError) as error:
        probe(lambda rngs: Stack(rngs), penalty)
    text = str(error.value)
    assert text.startswith("embed/embedding: 'square' uses the raw value of this parameter at ")
    assert "test_probe.py:" in text and "which is one device's shard" in text
    assert "model.embed.embedding[...]" in text and "jzero.gather(...)" in text


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda w: w.T, "of shape (8, 8) is transposed before it is read"),
        (lambda w: w[:4], "of shape (8, 8) is read as (4, 8)"),
    ],
)
def test_cut_and_transposed_weights_are_errors(change, says):
    def loss(params, x):
        return gather(jax.tree.map(change, params))["w"].sum()

    with pytest.raises(jzero.JzeroError) as error:
        probe({"w": jnp.ones((8, 8))}, loss)
    assert says in str(error.value) and "read the whole leaf first" in str(error.value)


def test_layers_along_two_axes_are_an_error():
    def loss(params, x):
        rows = jax.tree.map(lambda w: w[0], params)
        columns = jax.tree.map(lambda w: w[:, 0], params)
        return (gather(rows)["w"] + gather(columns)["w"]).sum()

    with pytest.raises(jzero.JzeroError, match=r"along axes \(\d,\) in one place and \(\d,\)"):
        probe({"w": jnp.ones((8, 8, 8))}, loss)


def test_a_step_refuses_a_raw_penalty(mesh_of):
    zero = jzero.Zero(stage=3, mesh=mesh_of(8).storage)
    state = zero.init({"w": np.ones((8, 8), np.float32)}, optax.sgd(0.1))

    def loss(params, batch, rng):
        return sum(jnp.sum(w**2) for w in jax.tree.leaves(params)) + batch.sum()

    with pytest.raises(jzero.JzeroError, match="^w: .* raw value"):
        zero.train_step(loss)(state, jnp.ones((8, 8)))
