"""Gather on use: what a model is given in the place of each parameter.

A `Sharded` becomes the whole parameter when it is read: all-gathered at stage 3, as it is below.
"""

import builtins
import functools
import math
import operator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jzero.errors import JzeroError
from jzero.gather import cast, read_with_tap, whole, whole_global
from jzero.recipe import Recipe

# Set while a model is traced only to learn how it reads its parameters (jzero.probe).
_recording: ContextVar[bool] = ContextVar("recording", default=False)
_MARK = "zero_read/"


@contextmanager
def recording():
    """Reads are only marked in the jaxpr; the values must be whole."""
    token = _recording.set(True)
    try:
        yield
    finally:
        _recording.reset(token)


def marked_shape(name: str) -> tuple[int, ...] | None:
    """The shape that a model reads where a jaxpr has the primitive `name` with this name, if any.

    Example:
      >>> marked_shape("zero_read/4x8"), marked_shape("zero_read/"), marked_shape("residual")
      ((4, 8), (), None)
    """
    if not name.startswith(_MARK):
        return None
    return tuple(int(n) for n in name.removeprefix(_MARK).split("x") if n)


@jax.tree_util.register_pytree_with_keys_class
class Sharded(meta.AxisMetadata):
    """Stands for a whole parameter in a model, and becomes it when it is read.

    A pytree node, so that a scan over layers slices it; a Linen box, so that `nn.Module.param`
    unboxes it; and, for NNX, a value that gathers on any use as an array.
    """

    __slots__ = ("recipe", "tap", "value")

    def __init__(self, value: Any, tap: Any, recipe: Recipe):
        self.value = value  # the stored array: a shard or whole, fp32 or compute dtype
        self.tap = tap  # zeros that only backward sees: its cotangent is the reduced gradient
        self.recipe = recipe

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return ((key("value"), self.value), (key("tap"), self.tap)), self.recipe

    def tree_flatten(self):
        return (self.value, self.tap), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe, children):
        value, tap = children
        return cls(value, tap, recipe)

    # Linen's box protocol. A scan's axis is told by the array's rank, so nothing to keep.
    def unbox(self) -> jax.Array:
        return read(self)

    def replace_boxed(self, val):
        return val

    def add_axis(self, index: int, params: dict[Any, Any]):
        return self

    def remove_axis(self, index: int, params: dict[Any, Any]):
        return self

    # As an array.
    @property
    def ndim(self) -> int:
        return self.value.ndim

    @property
    def shape(self) -> tuple[int, ...]:
        if not self.recipe.leaf.shard_parameter:
            return self.value.shape
        return self.recipe.shape(self.ndim)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self):
        return jnp.dtype(self.recipe.dtype)

    def __jax_array__(self) -> jax.Array:
        return read(self)

    def __getitem__(self, index):
        whole = read(self)
        return whole if index is Ellipsis else whole[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return iter(read(self))

    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(read(self), name)

    def __repr__(self) -> str:
        return f"Sharded({self.recipe.leaf.path}, shape={self.shape}, dtype={self.dtype})"


def _operator(name: str, reflected: bool = False):
    apply = getattr(operator, name, None) or getattr(builtins, name)

    def method(self, *others):
        if reflected:
            return apply(others[0], read(self))
        return apply(read(self), *others)

    return method


_BINARY = "add sub mul matmul truediv floordiv mod pow divmod and_ or_ xor lshift rshift".split()
for _name in _BINARY:
    setattr(Sharded, f"__{_name.rstrip('_')}__", _operator(_name))
    setattr(Sharded, f"__r{_name.rstrip('_')}__", _operator(_name, reflected=True))
for _name in "eq ne lt le gt ge neg pos abs invert round float int bool complex index".split():
    setattr(Sharded, f"__{_name}__", _operator(_name))
# Comparing gives an array, as for any array; as a key, an object stands for itself.
Sharded.__hash__ = object.__hash__


def gather(tree):
    """Makes the parameters of a subtree whole, at the place where they are used.

    Call it inside a loss function on a plain pytree of parameters, layer by layer: what is gathered
    is freed after its use, and gathered again in backward. Flax models need no call.

    Arguments:
      tree: a pytree that holds parameters as jzero hands them out; other leaves pass through.

    Returns:
      The same tree with whole arrays, in the compute dtype, with their true shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> gather({"already whole": jnp.ones(2)})["already whole"].shape
      (2,)
    """
    return jax.tree.map(lambda x: read(x) if is_sharded(x) else x, tree, is_leaf=is_sharded)


def is_sharded(x) -> bool:
    return isinstance(x, Sharded)


def read(sharded: Sharded) -> jax.Array:
    """The whole parameter that a `Sharded` stands for."""
    recipe, value = sharded.recipe, sharded.value
    if _recording.get():
        return cast(recipe, _marked(recipe.leaf.path, value))
    if recipe.mesh is not None:
        return whole_global(recipe, value)
    with jax.named_scope(f"zero_read/{recipe.leaf.path}"):
        if sharded.tap is None:
            return whole(recipe, lax.stop_gradient(value))
        return read_with_tap(recipe, value, sharded.tap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _marked(path: str, value):
    return checkpoint_name(value, _MARK + "x".join(map(str, value.shape)))


def _marked_forward(path: str, value):
    return _marked(path, value), None


def _marked_backward(path: str, _, cotangent):
    # Nobody differentiates the recording but the loss itself; for real, its gradients would be
    # shards and zeros.
    raise JzeroError(
        f"{path}: the loss takes a gradient with respect to this parameter itself; make the "
        f"weights whole first and differentiate with respect to those: whole = "
        f"jzero.gather(params), or for NNX jzero.gather(nnx.state(model)) merged into a model again"
    )


_marked.defvjp(_marked_forward, _marked_backward)
