"""The network of scripts/deepspeed_fixtures.py, and what DeepSpeed calls its leaves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

import jzero
from jzero.paths import path_name

RULES = [
    {"ours": "embed/embedding", "theirs": ["embed.weight", "head.weight"]},
    {"ours": "frozen/kernel", "theirs": "frozen.weight", "transpose": True},
    {"ours": "frozen/bias", "theirs": "frozen.bias"},
    {"ours": "blocks/norm/scale", "theirs": "blocks.{layer}.norm.weight"},
    {"ours": "blocks/norm/bias", "theirs": "blocks.{layer}.norm.bias"},
    {"ours": "blocks/up/kernel", "theirs": "blocks.{layer}.up.weight", "transpose": True},
    {"ours": "blocks/up/bias", "theirs": "blocks.{layer}.up.bias"},
    {"ours": "blocks/down/kernel", "theirs": "blocks.{layer}.down.weight", "transpose": True},
    {"ours": "blocks/down/bias", "theirs": "blocks.{layer}.down.bias"},
    {"ours": "gain", "theirs": "gain"},
    {"ours": "empty", "theirs": "empty"},
]
TRAINED = ["embed.weight", "gain"] + [
    f"blocks.{layer}.{name}.{kind}"
    for layer in (0, 1)
    for name in ("norm", "up", "down")
    for kind in ("weight", "bias")
]


def as_theirs(name: str, leaf) -> np.ndarray:
    """Of the leaf `leaf(path)`, or a moment of it, what DeepSpeed has under a name."""
    if name == "embed.weight":
        return np.asarray(leaf("embed/embedding"))
    if name == "gain":
        return np.asarray(leaf("gain"))
    _, layer, module, kind = name.split(".")
    kind = "scale" if (module, kind) == ("norm", "weight") else kind
    array = np.asarray(leaf(f"blocks/{module}/{kind.replace('weight', 'kernel')}"))[int(layer)]
    return array.T if kind == "weight" else array


def name_map(leaves):
    """The rules for the leaves that there are: DeepSpeed's stage 3 had no empty parameter."""
    return [rule for rule in RULES if rule["ours"] in leaves]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, dtype):
        self.norm = nnx.LayerNorm(6, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.up = nnx.Linear(6, 10, dtype=dtype, rngs=rngs)
        self.down = nnx.Linear(10, 6, dtype=dtype, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Net(nnx.Module):
    """The script's `Model`, its blocks stacked and scanned over."""

    def __init__(self, rngs: nnx.Rngs, dtype, with_empty: bool):
        self.embed = nnx.Embed(11, 6, dtype=dtype, rngs=rngs)
        self.frozen = nnx.Linear(6, 6, dtype=dtype, rngs=rngs)
        self.blocks = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs, dtype)))(rngs)
        self.gain = nnx.Param(jnp.ones(1))
        if with_empty:
            self.empty = nnx.Param(jnp.zeros((0, 6)))

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = x + self.frozen(x)
        x, _ = jax.lax.scan(lambda x, block: (block(x), None), x, self.blocks)
        return self.embed.attend(x * self.gain[...]) + jnp.linspace(-0.1, 0.1, 11, dtype=x.dtype)


def loss_fn(model, batch, rng):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def decayed(params):
    """Which parameters had weight decay: not biases and norms, stacked or not."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path_name(path).endswith(("kernel", "embedding")), params
    )


def optimizer():
    """What the script's run had: two groups of parameters, a rate that differs at every step."""
    return optax.adamw(lambda step: 1e-2 / (1 + 0.2 * step), weight_decay=0.1, mask=decayed)


def trained(path: str) -> bool:
    return not path.startswith("frozen/")


def set_up(devices=2, tx=None, with_empty=True, trainable=trained, **keywords) -> jzero.Zero:
    """A `Zero` that knows the network, with no array yet."""
    keywords = {"stage": 2, "gradient_clipping": 1.0, "persistence_threshold": 0} | keywords
    zero = jzero.Zero(mesh=Mesh(np.array(jax.devices()[:devices]), ("data",)), **keywords)
    dtype = {"bf16": jnp.bfloat16, "fp16": jnp.float16}.get(keywords.get("precision"), jnp.float32)
    zero.setup_for(
        lambda rngs: Net(rngs, dtype, with_empty),
        tx or optimizer(),
        trainable=trainable,
    )
    return zero


def workload() -> jzero.Workload:
    """The same for a command, where what is frozen is so by its optimizer."""

    def parts(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: "trained" if trained(path_name(path)) else "frozen", params
        )

    return jzero.Workload(
        init=lambda rngs: Net(rngs, jnp.bfloat16, with_empty=True),
        loss_fn=loss_fn,
        batch=lambda rows: {"tokens": jax.ShapeDtypeStruct((rows, 6), jnp.int32)},
        tx=optax.partition({"trained": optimizer(), "frozen": optax.set_to_zero()}, parts),
    )


def with_average() -> jzero.Workload:
    """The same with an average of updates, of which DeepSpeed has no counterpart."""
    found = workload()
    return dataclasses.replace(found, tx=optax.chain(found.tx, optax.ema(0.9)))
