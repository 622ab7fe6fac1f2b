"""Training steps compiled for a target, and what their collectives do to which parameter."""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled
from models import LENGTH, Net

import jzero
from jzero import hlo, targets
from jzero.partition import Leaf

# One sum of total and weight per micro-batch, and one of the leaves' squared norms per step.
SCALARS = 64


@dataclass(frozen=True)
class Step:
    """A compiled training step.

    Attributes:
      zero: what it was made with.
      compiled: the program.
      sites: its collectives.
    """

    zero: jzero.Zero
    compiled: Compiled
    sites: tuple[hlo.Site, ...]

    @property
    def leaves(self) -> dict[str, Leaf]:
        return dict(self.zero.setup.layout.leaves)

    def size(self, chosen: Callable[[str], bool] = lambda path: True) -> int:
        """Elements of the chosen parameters; of all, the ZeRO paper's psi."""
        return sum(leaf.array.size for path, leaf in self.leaves.items() if chosen(path))

    @property
    def large(self) -> list[hlo.Site]:
        """The collectives that move tensors; the others add up a few scalars."""
        return [site for site in self.sites if not is_scalar(site)]

    def volume(self) -> dict[tuple[str, tuple[str, ...]], int | None]:
        """(op, axes without their prefix) -> elements in a step, scalars left out."""
        found: dict[tuple[str, tuple[str, ...]], int | None] = {}
        for row in hlo.total(self.large):
            axes = tuple(axis.removeprefix("zero_") for axis in row.axes)
            assert (row.op, axes) not in found, "two dtypes"
            found[row.op, axes] = row.elements
        return found

    def dtypes(self) -> dict[str, set[str]]:
        """op -> dtypes, scalars left out."""
        found: dict[str, set[str]] = {}
        for site in self.large:
            found.setdefault(site.op, set()).add(site.dtype)
        return found

    def runs(self, op: str, scope: str) -> dict[str, int]:
        """path -> how often a step runs `op` on that parameter within `scope`, loops included."""
        found: Counter[str] = Counter()
        for site in self.large:
            path = re.search(rf"{scope}/([\w/]+?)\)*/(?:{SCOPES}|{op.replace('-', '_')})", site.source)
            if site.op == op and path:
                assert site.count is not None
                found[path[1].removesuffix("/shard_map/while/body/closed_call")] += site.count
        return dict(found)

    @property
    def gathers(self) -> dict[str, int]:
        return self.runs("all-gather", "zero_read")

    @property
    def scatters(self) -> dict[str, int]:
        return self.runs("reduce-scatter", "zero_reduce_scatter")

    @property
    def updates(self) -> dict[str, int]:
        return self.runs("all-gather", "zero_gather_updated")

    @property
    def memory(self) -> hlo.Memory:
        return hlo.memory(self.compiled)


SCOPES = "zero_gather|shard_map"


def is_scalar(site: hlo.Site) -> bool:
    return site.op == "all-reduce" and site.elements is not None and site.elements <= SCALARS


def lower(
    net: Net,
    target: str = "cpu:8",
    rows: int = 1,
    tx: optax.GradientTransformation | None = None,
    trainable: Any = None,
    shape: tuple[tuple[str, int], ...] = (("data", 8),),
    options: tuple[tuple[str, str], ...] = (),
    **settings: Any,
) -> Step:
    """Compiles a training step of the network.

    Arguments:
      net: the network.
      target: what to compile for.
      rows: of one device and micro-batch.
      tx, trainable: as `Zero.init` takes them.
      shape: the mesh's axes and sizes.
      options: of the compiler.
      settings: of `Zero`; bf16 if they do not say.
    """
    names, sizes = zip(*shape, strict=True)
    mesh = Mesh(np.array(targets.devices(targets.parse(target))).reshape(sizes), names)
    zero = jzero.Zero(mesh=mesh, **{"precision": "bf16", "gradient_clipping": 1.0, **settings})
    tx = optax.adamw(1e-3) if tx is None else tx
    zero.setup_for(net.init, tx, sample=net.sample, trainable=trainable)
    total = rows * zero.batch.accumulation * zero.mesh.data_size
    batch = {
        "tokens": jax.ShapeDtypeStruct((total, LENGTH), jnp.int32),
        "weight": jax.ShapeDtypeStruct((total, LENGTH), jnp.float32),
    }
    compiled = zero.train_step(net.loss).lower(batch).compile(compiler_options=dict(options))
    return Step(zero, compiled, tuple(hlo.sites(compiled, zero.mesh.manual)))


step = functools.cache(lower)


def assert_only_weights(step: Step, shards: int = 8) -> None:
    """No activation is moved: each collective is one of jzero's, on tensors shaped like weights.

    And there are few sums of scalars, of a few numbers each.
    """
    shapes = set()
    for leaf in step.leaves.values():
        stored = leaf.array.shape
        for dims in (stored, stored[1:] if leaf.array.layer_axes else stored):
            shapes.add(dims)
            dim = leaf.dim if leaf.dim is None else leaf.dim - (len(stored) - len(dims))
            if dim is not None:
                shapes.add(dims[:dim] + (dims[dim] // shards,) + dims[dim + 1 :])
    for site in step.large:
        assert re.search(r"zero_(gather|reduce|reduce_scatter|gather_updated)\b", site.source), site
        assert all(operand.dims in shapes for operand in site.operands), site
    scalars = hlo.total(site for site in step.sites if is_scalar(site))
    assert sum(row.count or 0 for row in scalars) <= step.zero.batch.accumulation + 1
    assert sum(row.elements or 0 for row in scalars) <= 2 * step.zero.batch.accumulation + len(
        step.leaves
    )
