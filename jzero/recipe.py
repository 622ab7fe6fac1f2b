"""How one parameter is read: what is static about it, so that it can sit in a treedef."""

from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jzero.errors import JzeroError
from jzero.partition import Leaf, spec_of


@dataclass(frozen=True)
class Recipe:
    """How one parameter is read.

    Attributes:
      leaf: the parameter and what its stage shards.
      axes: the manual names of the ZeRO axes; empty outside the manual region.
      auto_axes: the mesh's other axes, which are automatic there.
      dtype: the dtype in which the model computes.
      reduce_dtype: the dtype of the gradient that a read hands back.
      by_bits: cast in a way that XLA:TPU leaves in the layer loop; see `jzero.rounding`.
      mesh: outside the manual region, the mesh on which the array is placed.
    """

    leaf: Leaf
    axes: tuple[str, ...]
    auto_axes: tuple[str, ...]
    dtype: str
    reduce_dtype: str
    by_bits: bool = False
    mesh: Mesh | AbstractMesh | None = None

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

    def other_spec(self, ndim: int) -> PartitionSpec:
        """How the axes that ZeRO leaves alone shard an array of `ndim`."""
        others = self.leaf.array.other_axes
        return spec_of([others[d] or None for d in self.dims(ndim)]) if others else PartitionSpec()
