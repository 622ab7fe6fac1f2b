"""The device mesh as ZeRO sees it: axes that shard the state, repeat it, or are left alone."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jzero.errors import JzeroError

# Inside a step the ZeRO axes go by another name, and the user's name is an axis of size 1.
# So a model that constrains its activations to P("data") runs unchanged: there, it says nothing.
MANUAL = "zero_"


@dataclass(frozen=True)
class ZeroMesh:
    """A device mesh with the role of each axis.

    Attributes:
      storage: the mesh that state and batches are placed on, with the user's axis names. Abstract
        where only specs are wanted: then there are no devices, and no arrays can be made.
      manual: the same devices with each data axis under its manual name (`zero_data`) beside an
        axis of size 1 that keeps the user's name.
      shard_axes: the user's names of the axes that the state is sharded over: the ZeRO group.
      replica_axes: data axes over which the shards repeat (hybrid sharding).
    """

    storage: Mesh | AbstractMesh
    manual: Mesh | AbstractMesh
    shard_axes: tuple[str, ...]
    replica_axes: tuple[str, ...] = ()

    @property
    def data_axes(self) -> tuple[str, ...]:
        """All axes that the batch is spread over, replicas first."""
        return self.replica_axes + self.shard_axes

    @property
    def other_axes(self) -> tuple[str, ...]:
        """Axes that ZeRO leaves automatic: tensor, sequence, expert."""
        return tuple(a for a in self.storage.axis_names if a not in self.data_axes)

    @property
    def auto_axes(self) -> tuple[str, ...]:
        """What stays automatic inside a step: other axes, and data axes by their user's names."""
        return self.other_axes + self.data_axes

    @property
    def group_size(self) -> int:
        """Devices that share one copy of the state: N of the ZeRO paper."""
        return math.prod(self.storage.shape[a] for a in self.shard_axes)

    @property
    def replicas(self) -> int:
        return math.prod(self.storage.shape[a] for a in self.replica_axes)

    @property
    def data_size(self) -> int:
        """Devices that see different rows of the batch."""
        return self.group_size * self.replicas

    def manual_names(self, axes: Sequence[str]) -> tuple[str, ...]:
        return tuple(MANUAL + a for a in axes)

    @property
    def manual_shard_axes(self) -> tuple[str, ...]:
        return self.manual_names(self.shard_axes)

    @property
    def manual_data_axes(self) -> tuple[str, ...]:
        return self.manual_names(self.data_axes)

    def context(self) -> AbstractContextManager[Any]:
        """Where jzero traces and runs: a mesh that the user has set may have Explicit axes."""
        if jax.sharding.get_abstract_mesh().empty:
            return nullcontext()
        if isinstance(self.manual, AbstractMesh):
            return jax.sharding.use_abstract_mesh(self.manual)
        return jax.set_mesh(self.manual)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """Where an array with this spec, in the user's axis names, is stored."""
        return NamedSharding(self.storage, spec)

    @cached_property
    def platform(self) -> str:
        """Of the devices, as JAX names it; "" for a mesh without devices."""
        if isinstance(self.storage, AbstractMesh):
            return ""
        return self.storage.devices.flat[0].platform

    def settle(self, array: Any) -> None:
        """On virtual CPU devices, waits for an array.

        Two programs in flight can each hold threads of XLA:CPU's pool that the other's collectives
        wait for, and hang.
        """
        if self.platform == "cpu" and self.storage.size > 1:
            jax.block_until_ready(array)

    @cached_property
    def whole(self) -> NamedSharding:
        return self.sharding(PartitionSpec())

    @cached_property
    def batch(self) -> NamedSharding:
        """Rows spread over every data axis."""
        return self.sharding(PartitionSpec(self.data_axes))

    @cached_property
    def local_data_size(self) -> int:
        """Of the devices that see different rows, those that this process feeds."""
        if isinstance(self.storage, AbstractMesh):
            return self.data_size
        here = jax.process_index()
        local = sum(d.process_index == here for d in self.storage.devices.flat)
        return max(local * self.data_size // self.storage.devices.size, 1)


def make_zero_mesh(
    mesh: Mesh | AbstractMesh | None = None,
    axes: Sequence[str] | str | None = None,
    replica_axes: Sequence[str] | str = (),
    shard_size: int | None = None,
) -> ZeroMesh:
    """Gives every axis of a mesh its role in ZeRO.

    Arguments:
      mesh: the user's mesh, of any axis types; by default one axis `data` over all devices. An
        `AbstractMesh` serves for specs, without devices.
      axes: names of the axes to shard over; by default `data` and `fsdp`, those that the mesh has,
        or the only axis of a mesh with one.
      replica_axes: names of data axes over which shards repeat; by default `replica` if present.
      shard_size: shard over groups of this many devices and repeat across groups
        (`mics_shard_size`); only with a mesh of one axis.

    Returns:
      A `ZeroMesh`.

    Raises:
      JzeroError: an axis the mesh lacks, or a group size that does not divide it.
    """
    if mesh is None:
        devices = np.array(jax.devices())
        mesh = Mesh(devices, ("data",))
    replicas = (replica_axes,) if isinstance(replica_axes, str) else tuple(replica_axes)
    if axes is None:
        shards = tuple(a for a in mesh.axis_names if a in ("data", "fsdp"))
        if not shards and len(mesh.axis_names) == 1:
            shards = tuple(mesh.axis_names)
        if not replicas:
            replicas = tuple(a for a in mesh.axis_names if a == "replica")
    else:
        shards = (axes,) if isinstance(axes, str) else tuple(axes)
    if not shards:
        raise JzeroError(
            f"mesh axes {tuple(mesh.axis_names)}: none is named data or fsdp; say which to shard "
            f"over with axes=, for example axes={mesh.axis_names[0]!r}"
        )
    for axis in shards + replicas:
        if axis not in mesh.axis_names:
            raise JzeroError(f"axis {axis!r} is not in the mesh; its axes are {dict(mesh.shape)}")
    both = set(shards) & set(replicas)
    if both:
        raise JzeroError(f"axis {both.pop()!r} cannot both shard the state and repeat it")
    if shard_size is not None:
        mesh, shards, replicas = _split_group(mesh, shards, replicas, shard_size)
    names = tuple(mesh.axis_names)
    sizes = tuple(mesh.shape[a] for a in names)
    data = replicas + shards
    inner_names = tuple(MANUAL + a if a in data else a for a in names) + data
    if len(set(inner_names)) != len(inner_names):
        raise JzeroError(f"mesh axes {names}: names that begin with {MANUAL!r} are jzero's own")
    storage = _reshaped(mesh, sizes, names)
    manual = _reshaped(mesh, sizes + (1,) * len(data), inner_names)
    return ZeroMesh(storage, manual, shards, replicas)


def _reshaped(
    mesh: Mesh | AbstractMesh, sizes: tuple[int, ...], names: tuple[str, ...]
) -> Mesh | AbstractMesh:
    """The same devices, or the same lack of them, under other axes, which are all automatic."""
    types = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=types)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=types)


def _split_group(
    mesh: Mesh | AbstractMesh,
    shards: tuple[str, ...],
    replicas: tuple[str, ...],
    shard_size: int,
) -> tuple[Mesh | AbstractMesh, tuple[str, ...], tuple[str, ...]]:
    if len(mesh.axis_names) != 1 or replicas:
        raise JzeroError(
            f"zero_optimization.mics_shard_size={shard_size} needs a mesh of one axis, found "
            f"{dict(mesh.shape)}; give the mesh a replica axis instead"
        )
    total = mesh.size
    if shard_size < 1 or total % shard_size:
        raise JzeroError(
            f"zero_optimization.mics_shard_size={shard_size} does not divide the {total} devices "
            f"of mesh axis {shards[0]!r}"
        )
    if shard_size == total:
        return mesh, shards, replicas
    sizes, names = (total // shard_size, shard_size), ("replica", shards[0])
    return _reshaped(mesh, sizes, names), shards, ("replica",)
