"""Gather on use: a sharded parameter becomes whole at the place where the model reads it.

A model is given a `Sharded` in the place of each parameter. Reading it all-gathers the shard
(stage 3); the transpose of that read reduce-scatters the gradient (stages 2 and 3). So ZeRO-3's
backward needs no code of its own: ZeRO paper, section 5.3.
"""

import functools
import math
import operator
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.core import meta
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.errors import JzeroError
from jzero.partition import Leaf, spec_of


@dataclass(frozen=True)
class Recipe:
    """How one parameter is read: all that is static about it.

    Attributes:
      leaf: the parameter and what its stage shards.
      axes: the manual names of the ZeRO axes; empty outside the manual region.
      auto_axes: the mesh's other axes, which are automatic there.
      dtype: the dtype in which the model computes.
      reduce_dtype: the dtype of the gradient that a read hands back.
      mesh: outside the manual region, the mesh on which the array is placed.
    """

    leaf: Leaf
    axes: tuple[str, ...]
    auto_axes: tuple[str, ...]
    dtype: str
    reduce_dtype: str
    mesh: Mesh | None = None

    def dims(self, ndim: int) -> tuple[int, ...]:
        """The leaf's dimensions that an array of `ndim` still has: a scan takes layer axes away."""
        array = self.leaf.array
        gone = array.layer_axes[: len(array.shape) - ndim]
        if len(gone) != len(array.shape) - ndim:
            raise JzeroError(
                f"{array.path} of shape {array.shape} is read as an array of {ndim} dimensions, "
                f"and its layer axes are not known yet: run a training step first, or pass "
                f"zero.init(..., layer_axes={{{array.path!r}: 0}})"
            )
        return tuple(d for d in range(len(array.shape)) if d not in gone)

    def dim(self, ndim: int) -> int:
        """Where the sharded dimension is in an array of `ndim`."""
        assert self.leaf.dim is not None
        return self.dims(ndim).index(self.leaf.dim)

    def true_size(self) -> int:
        """The sharded dimension's size without padding."""
        assert self.leaf.dim is not None
        return self.leaf.array.shape[self.leaf.dim]

    def shape(self, ndim: int) -> tuple[int, ...]:
        return tuple(self.leaf.array.shape[d] for d in self.dims(ndim))


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

    def __neg__(self):
        return -read(self)

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


def _operator(name: str, reflected: bool):
    apply = getattr(operator, name)
    if reflected:
        return lambda self, other: apply(other, read(self))
    return lambda self, other: apply(read(self), other)


for _name in "add sub mul matmul truediv floordiv mod pow lt le gt ge".split():
    setattr(Sharded, f"__{_name}__", _operator(_name, reflected=False))
for _name in "add sub mul matmul truediv floordiv mod pow".split():
    setattr(Sharded, f"__r{_name}__", _operator(_name, reflected=True))


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
        value = checkpoint_name(value, _MARK + "x".join(map(str, value.shape)))
        return value.astype(recipe.dtype) if _is_float(value) else value
    if recipe.mesh is not None:
        return _whole_global(recipe, value)
    with jax.named_scope(f"zero_read/{recipe.leaf.path}"):
        if sharded.tap is None:
            return _whole(recipe, lax.stop_gradient(value))
        return _read(recipe, value, sharded.tap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(recipe: Recipe, value, tap):
    return _whole(recipe, value)


def _read_fwd(recipe: Recipe, value, tap):
    return _whole(recipe, value), None


def _read_bwd(recipe: Recipe, _, cotangent):
    # A cotangent has its primal's dtype: the tap, not the fp32 master, gets the gradient, so that
    # it is reduced and kept in the compute dtype.
    return None, _reduce(recipe, cotangent)


_read.defvjp(_read_fwd, _read_bwd)


def _whole(recipe: Recipe, value) -> jax.Array:
    """Cast, then gather: no whole copy in the storage dtype ever exists."""
    leaf = recipe.leaf
    x = value.astype(recipe.dtype) if _is_float(value) else value
    if not leaf.shard_parameter:
        return x
    dim = recipe.dim(x.ndim)
    with jax.named_scope("zero_gather"):
        x = manually(recipe, lambda x: lax.all_gather(x, recipe.axes, axis=dim, tiled=True), x)
    return lax.slice_in_dim(x, 0, recipe.true_size(), axis=dim) if leaf.is_padded else x


def _reduce(recipe: Recipe, cotangent) -> jax.Array:
    """The gradient of one read: summed over the ZeRO group into shards, or still local."""
    leaf = recipe.leaf
    x = cotangent.astype(recipe.reduce_dtype)
    if not leaf.shard_gradient:
        return x
    with jax.named_scope(f"zero_reduce_scatter/{leaf.path}"):
        return scatter(recipe, x)


def scatter(recipe: Recipe, x) -> jax.Array:
    """Pads and reduce-scatters a whole gradient over the ZeRO group."""
    leaf = recipe.leaf
    dim = recipe.dim(x.ndim)
    if leaf.is_padded:
        widths = [(0, 0)] * x.ndim
        widths[dim] = (0, leaf.padded - x.shape[dim])
        x = jnp.pad(x, widths)
    return manually(
        recipe,
        lambda x: lax.psum_scatter(x, recipe.axes, scatter_dimension=dim, tiled=True),
        x,
    )


def manually(recipe: Recipe, collective: Callable[[jax.Array], jax.Array], x) -> jax.Array:
    """Runs a collective on a leaf, or a gradient of it, where every mesh axis is manual.

    Otherwise the partitioner would first gather a dimension that a tensor axis shards, and XLA:CPU
    aborts on a bf16 reduction beside an automatic axis, even one of size 1.
    """
    spec = _other_spec(recipe, x.ndim)
    return jax.shard_map(
        collective, in_specs=spec, out_specs=spec, axis_names=set(recipe.auto_axes), check_vma=False
    )(x)


def _other_spec(recipe: Recipe, ndim: int) -> PartitionSpec:
    """How the axes that ZeRO leaves alone shard an array of `ndim`."""
    others = recipe.leaf.array.other_axes
    return spec_of([others[d] or None for d in recipe.dims(ndim)]) if others else PartitionSpec()


def _whole_global(recipe: Recipe, value) -> jax.Array:
    """The same read outside the manual region, for inference: a reshard at the place of use."""
    leaf = recipe.leaf
    x = value.astype(recipe.dtype) if _is_float(value) else value
    if not leaf.shard_parameter:
        return x
    assert recipe.mesh is not None
    x = lax.with_sharding_constraint(x, NamedSharding(recipe.mesh, _other_spec(recipe, x.ndim)))
    if leaf.is_padded:
        x = lax.slice_in_dim(x, 0, recipe.true_size(), axis=recipe.dim(x.ndim))
    return x


def _is_float(x) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)
