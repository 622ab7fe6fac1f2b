"""Where every array of the state lives: shapes, dtypes and shardings, before any exists."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jzero.mesh import ZeroMesh
from jzero.partition import Leaf, is_float
from jzero.recipe import Recipe

MASTER = "float32"  # of master weights, and of what the optimizer sees


@dataclass(frozen=True)
class Policy:
    """The dtypes of a run: numpy names.

    Attributes:
      compute: of the weights as the model reads them.
      communication: in which gradients are reduced.
      accumulation: in which gradients are summed over micro-batches.
    """

    compute: str
    communication: str
    accumulation: str


@dataclass(frozen=True)
class Layout:
    """Which arrays the state has, and how each is stored.

    Attributes:
      mesh: the mesh and its ZeRO axes.
      stage: 0 to 3.
      policy: dtypes.
      leaves: path -> parameter, in the model's order.
      opt_leaves: a pytree like the Optax state, of Leaf.
      unused: trained parameters whose gradient the optimizer never looks at: none is taken.
    """

    mesh: ZeroMesh
    stage: int
    policy: Policy
    leaves: Mapping[str, Leaf]
    opt_leaves: Any = None
    unused: frozenset[str] = frozenset()

    @cached_property
    def trained(self) -> dict[str, Leaf]:
        return {path: leaf for path, leaf in self.leaves.items() if leaf.array.trained}

    @cached_property
    def differentiated(self) -> dict[str, Leaf]:
        """The parameters of which a gradient is taken and reduced."""
        return {path: leaf for path, leaf in self.trained.items() if path not in self.unused}

    def compute_dtype(self, leaf: Leaf) -> str:
        if not is_float(leaf.array.dtype):
            return leaf.array.dtype
        return self.policy.compute

    def has_master(self, leaf: Leaf) -> bool:
        """Whether master weights exist beside the parameter: not in fp32, where they are one."""
        return leaf.array.trained and self.compute_dtype(leaf) != MASTER

    def has_parameter(self, leaf: Leaf) -> bool:
        """Whether a copy in the compute dtype exists between steps.

        At stage 3 the shard of the master is cast as it is gathered, so none does.
        """
        return not (self.has_master(leaf) and leaf.shard_parameter)

    def parameter(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        return self._struct(leaf, self.compute_dtype(leaf), leaf.shard_parameter)

    def master(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        return self._struct(leaf, MASTER, leaf.shard_state)

    def optimizer(self, leaf: Leaf) -> jax.ShapeDtypeStruct:
        return self._struct(leaf, leaf.array.dtype, leaf.shard_state)

    def _struct(self, leaf: Leaf, dtype: str, sharded: bool) -> jax.ShapeDtypeStruct:
        shape = leaf.stored_shape if sharded else leaf.array.shape
        spec = leaf.spec(self.mesh.shard_axes, sharded)
        return struct(shape, dtype, self.mesh.sharding(spec))

    def parameters(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {p: self.parameter(x) for p, x in self.leaves.items() if self.has_parameter(x)}

    def masters(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {p: self.master(x) for p, x in self.leaves.items() if self.has_master(x)}

    def optimizer_state(self) -> Any:
        return jax.tree.map(self.optimizer, self.opt_leaves, is_leaf=is_leaf)

    def other_shards(self, leaf: Leaf) -> int:
        """In how many pieces the axes that ZeRO leaves alone cut a leaf."""
        shape = self.mesh.storage.shape
        return math.prod(shape[axis] for axes in leaf.array.other_axes for axis in axes)

    def recipe(self, leaf: Leaf, accumulate: bool) -> Recipe:
        """How the leaf is read inside the manual region.

        A gradient that is summed over micro-batches before it is reduced loses nothing until then.
        """
        compute, reduced = self.compute_dtype(leaf), self.policy.communication
        if accumulate and not leaf.shard_gradient and is_float(compute):
            reduced = str(jnp.promote_types(compute, reduced))
        return Recipe(
            leaf,
            self.mesh.manual_shard_axes,
            self.mesh.auto_axes,
            compute,
            reduced,
            by_bits=leaf.shard_parameter and self.mesh.platform == "tpu",
        )

    def global_recipe(self, leaf: Leaf) -> Recipe:
        """How the leaf is read outside of it, by a model for inference."""
        dtype = self.compute_dtype(leaf)
        return Recipe(leaf, (), (), dtype, dtype, mesh=self.mesh.storage)

    def manual_spec(self, leaf: Leaf, sharded: bool) -> PartitionSpec:
        return leaf.spec(self.mesh.manual_shard_axes, sharded, others=False)


def is_leaf(x) -> bool:
    return isinstance(x, Leaf)


def struct(
    shape: tuple[int, ...], dtype: str, sharding: NamedSharding | None = None
) -> jax.ShapeDtypeStruct:
    """A ShapeDtypeStruct from a dtype's name; "key<fry>" is a PRNG key's."""
    if dtype.startswith("key<"):
        kind = jax.eval_shape(lambda: jax.random.key(0, impl=_key_impl(dtype))).dtype
        return jax.ShapeDtypeStruct(shape, kind, sharding=sharding)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def _key_impl(dtype: str) -> str:
    tags = {"fry": "threefry2x32", "rbg": "rbg", "urbg": "unsafe_rbg"}
    tag = dtype.removeprefix("key<").removesuffix(">")
    return tags.get(tag, tag)


def bytes_per_device(x: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array's piece on each device."""
    shape = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), x.dtype))
        return math.prod(shape) * data.size * data.dtype.itemsize
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize
