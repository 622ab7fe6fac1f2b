"""The ZeRO stages as PartitionSpecs: which dimension of each leaf is sharded, and why.

ZeRO (Rajbhandari et al., SC'20, arXiv 1910.02054), section 5: the stages differ in nothing but in
which of three kinds of training state are sharded over the data-parallel group.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.errors import JzeroError
from jzero.mesh import ZeroMesh


@dataclass(frozen=True)
class Stage:
    """What one stage shards: True means that a device keeps 1/N."""

    optimizer: bool  # moments and fp32 master weights: P_os
    gradients: bool  # P_os+g
    parameters: bool  # P_os+g+p


STAGES = {
    0: Stage(optimizer=False, gradients=False, parameters=False),
    1: Stage(optimizer=True, gradients=False, parameters=False),
    2: Stage(optimizer=True, gradients=True, parameters=False),
    3: Stage(optimizer=True, gradients=True, parameters=True),
}


@dataclass(frozen=True)
class Array:
    """One array as the user knows it, before anything is sharded.

    Attributes:
      path: names from the root of its tree, joined by "/".
      shape: global shape, without padding.
      dtype: its dtype's name.
      layer_axes: axes that the model loops over (a scan over layers); never sharded.
      other_axes: for each dimension, the mesh axes that shard it already (tensor parallelism).
      trained: whether a gradient is taken.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    layer_axes: tuple[int, ...] = ()
    other_axes: tuple[tuple[str, ...], ...] = ()
    trained: bool = True

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def layer_size(self) -> int:
        """Elements of one layer of a stacked leaf."""
        return math.prod(s for d, s in enumerate(self.shape) if d not in self.layer_axes)


@dataclass(frozen=True)
class Leaf:
    """Where one parameter lives.

    Attributes:
      array: the parameter as the user knows it.
      dim: the dimension sharded over the ZeRO axes, or None where the leaf cannot shard.
      padded: the size of that dimension as stored; larger than the true one where N does not
        divide it.
      shard_state: master weights and optimizer state are sharded (stage 1 and up).
      shard_gradient: the gradient is reduce-scattered in backward (stage 2 and up); otherwise, and
        if there is a shard_state, once a step.
      shard_parameter: the parameter itself is sharded between steps (stage 3).
      reason: why it has this dim, or none, in words.
      persistent: why the parameter stays whole though its state shards, in words; otherwise empty.
    """

    array: Array
    dim: int | None
    padded: int
    shard_state: bool
    shard_gradient: bool
    shard_parameter: bool
    reason: str
    persistent: str = ""

    @property
    def path(self) -> str:
        return self.array.path

    @property
    def is_padded(self) -> bool:
        return self.dim is not None and self.padded != self.array.shape[self.dim]

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return stored_shape(self.array.shape, self.dim, self.padded)

    def spec(self, zero_axes: tuple[str, ...], sharded: bool, others: bool = True) -> PartitionSpec:
        """The leaf's PartitionSpec.

        Arguments:
          zero_axes: names of the ZeRO axes.
          sharded: the spec of a shard, or of the leaf as gathered.
          others: name the tensor axes too (storage), or only the ZeRO axes (the manual region).
        """
        entries: list[tuple[str, ...] | None] = [None] * len(self.array.shape)
        if others:
            for d, axes in enumerate(self.array.other_axes):
                entries[d] = axes or None
        if sharded and self.dim is not None:
            entries[self.dim] = zero_axes
        return spec_of(entries)


def spec_of(entries) -> PartitionSpec:
    """A PartitionSpec in its shortest form: no trailing None, one name not in a tuple."""
    short = [e[0] if isinstance(e, tuple) and len(e) == 1 else e for e in entries]
    while short and short[-1] is None:
        short.pop()
    return PartitionSpec(*short)


def stored_shape(shape: tuple[int, ...], dim: int | None, padded: int) -> tuple[int, ...]:
    if dim is None:
        return shape
    return shape[:dim] + (padded,) + shape[dim + 1 :]


def choose_dim(
    shape: tuple[int, ...], group: int, taken: frozenset[int] | set[int]
) -> tuple[int | None, int, str]:
    """The dimension to shard over `group` devices: the first that divides, or the cheapest to pad.

    The first rather than the largest: collectives on a minor dimension make XLA transpose.

    Arguments:
      shape: the leaf's shape.
      group: devices in the ZeRO group.
      taken: dimensions that must not be sharded (layer axes, tensor-parallel dimensions).

    Returns:
      (dimension or None, its size as stored, the reason in words).

    Example:
      >>> choose_dim((40, 5120, 13824), 8, taken={0})
      (1, 5120, 'dim 1 of 5120 divides by 8')
      >>> choose_dim((50257, 768), 6, taken=set())
      (1, 768, 'dim 1 of 768 divides by 6')
      >>> choose_dim((50257, 770), 6, taken=set())[:2]
      (0, 50262)
      >>> choose_dim((), 8, taken=set())
      (None, 0, 'whole: a scalar')
    """
    if not shape:
        return None, 0, "whole: a scalar"
    if math.prod(shape) == 0:
        return None, 0, "whole: no elements"
    if group == 1:
        return None, 0, "whole: one device in the ZeRO group"
    free = [d for d in range(len(shape)) if d not in taken and shape[d] > 1]
    if not free:
        return None, 0, "whole: no dimension is free to shard"
    for d in free:
        if shape[d] % group == 0:
            return d, shape[d], f"dim {d} of {shape[d]} divides by {group}"
    size = math.prod(shape)
    added = {d: (-shape[d] % group) * (size // shape[d]) for d in free}
    d = min(free, key=lambda d: added[d])
    padded = shape[d] + (-shape[d] % group)
    return d, padded, f"dim {d} of {shape[d]} stored as {padded}: no dimension divides by {group}"


def place(
    arrays: Mapping[str, Array],
    stage: int,
    mesh: ZeroMesh,
    persistence_threshold: int = 0,
    model_persistence_threshold: int = 2**63 - 1,
) -> dict[str, Leaf]:
    """Decides for each parameter what a stage keeps of it on each device.

    Arguments:
      arrays: path -> the parameter as the user knows it.
      stage: 0 to 3.
      mesh: the mesh and its ZeRO axes.
      persistence_threshold: at stage 3, parameters of at most so many elements (of one layer) stay
        whole, and their gradients until the end of a step; their master weights and optimizer
        state still shard.
      model_persistence_threshold: at most so many elements stay whole in total; a parameter that
        would exceed it is sharded, a later and smaller one may still fit.

    Returns:
      path -> Leaf, in the same order.
    """
    kept = 0
    leaves = {}
    for path, array in arrays.items():
        leaf = _place_one(array, STAGES[stage], mesh)
        if leaf.shard_parameter and array.trained and array.layer_size <= persistence_threshold:
            if kept + array.size <= model_persistence_threshold:
                kept += array.size
                leaf = replace(
                    leaf,
                    shard_gradient=False,
                    shard_parameter=False,
                    persistent=f"whole: {array.layer_size} elements are at most the persistence "
                    f"threshold {persistence_threshold}",
                )
        leaves[path] = leaf
    return leaves


def _place_one(array: Array, stage: Stage, mesh: ZeroMesh) -> Leaf:
    other = {d for d, axes in enumerate(array.other_axes) if axes}
    for d in other:
        size = math.prod(mesh.storage.shape[a] for a in array.other_axes[d])
        if array.shape[d] % size:
            raise JzeroError(
                f"{array.path}: dim {d} of shape {array.shape} is sharded over mesh axis "
                f"{'x'.join(array.other_axes[d])} of size {size}, which does not divide it; "
                f"change the model's annotation or the mesh"
            )
    if not is_shardable(array.dtype):
        dim, padded, reason = None, 0, "whole: a PRNG key"
    else:
        dim, padded, reason = choose_dim(
            array.shape, mesh.group_size, other | set(array.layer_axes)
        )
    if not array.trained:
        reason += "; not trained: no master weights, no gradient, no optimizer state"
    if array.trained and not stage.optimizer:
        dim, padded, reason = None, 0, "whole: stage 0 shards nothing"
    if not array.trained and not stage.parameters:
        dim, padded = None, 0
        reason = "whole below stage 3; not trained: no master weights, gradient or optimizer state"
    can = dim is not None
    return Leaf(
        array,
        dim,
        padded,
        shard_state=can and stage.optimizer and array.trained,
        shard_gradient=can and stage.gradients and array.trained,
        shard_parameter=can and stage.parameters,
        reason=reason,
    )


def is_shardable(dtype: str) -> bool:
    return not dtype.startswith("key<")


def is_float(dtype: str) -> bool:
    """Whether a gradient can be taken: integers, booleans and keys are never trained."""
    return is_shardable(dtype) and bool(jnp.issubdtype(jnp.dtype(dtype), jnp.floating))
