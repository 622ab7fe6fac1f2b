"""Weights in a checkpoint, and rules that give them other names and shapes."""

import jax.numpy as jnp
import numpy as np

from jzero.checkpoint import Facts, write_leaves
from jzero.checkpoint.safetensors.folder import find

RULES = [
    {"ours": "embed", "theirs": ["tokens.weight", "head.weight"]},
    {"ours": "layers/w", "theirs": "layers.{layer}.w", "transpose": True},
    {"ours": "layers/norm", "theirs": "layers.{layer}.norm"},
    {"ours": "heads/{n}/w", "theirs": "head{n}", "reshape": [4, 4], "transpose": [1, 0]},
    {"ours": None, "theirs": "layers.{layer}.inv_freq"},
]


def numbers(shape, dtype, start=0):
    count = int(np.prod(shape))
    return (np.arange(start, start + count) % 50).reshape(shape).astype(jnp.dtype(dtype))


STACK = {
    "params/embed": numbers((6, 4), "float32"),
    "params/layers/w": numbers((3, 4, 8), "float32", 3) / 7,
    "params/layers/norm": numbers((3, 4), "bfloat16", 1),
    "params/heads/0/w": numbers((4, 2, 2), "float32"),
    "params/table": numbers((5,), "int32"),
    "optimizer/0/mu/embed": numbers((6, 4), "float32"),
}
NAMES = [*RULES, {"ours": "table", "theirs": "table"}]


def save(root, leaves=STACK, step=3, **facts):
    """A step folder with these arrays."""
    arrays = [(name, x.shape, x.dtype.name, x) for name, x in leaves.items()]
    return write_leaves(root, step, arrays, Facts(**facts))


def values_in(out):
    return {name: np.asarray(tensor.read()) for name, tensor in find([out]).items()}
