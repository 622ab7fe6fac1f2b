"""Training steps compiled for a target, and what their collectives do to which parameter."""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
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

Volume = dict[tuple[str, tuple[str, ...]], int | None]

SCOPES = ("zero_gather", "zero_reduce", "zero_reduce_scatter", "zero_gather_updated")


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

    @property
    def memory(self) -> hlo.Memory:
        return hlo.memory(self.compiled)

    def size(self, chosen: Callable[[str], bool] = lambda path: True) -> int:
        """Elements of the chosen parameters; of all of them, the ZeRO paper's psi."""
        return sum(leaf.array.size for path, leaf in self.leaves.items() if chosen(path))

    def without_numbers(self, site: hlo.Site) -> hlo.Site | None:
        """A sum over devices without the few numbers in it; None where nothing else is.

        They are a loss's weight before backward, its total and weight after it, and a square for
        each leaf; XLA may join them.
        """
        leaves = len(self.zero.setup.layout.differentiated)
        sizes = (1, 2, 3, leaves, leaves + 2)
        numbers = [x for x in site.operands if len(x.dims) < 2 and x.elements in sizes]
        total = sum(x.elements for x in numbers)
        if site.op != "all-reduce" or total > leaves + 3 or site.elements is None:
            return site
        rest = tuple(x for x in site.operands if x not in numbers)
        return replace(site, operands=rest, elements=site.elements - total) if rest else None

    @property
    def large(self) -> list[hlo.Site]:
        """The collectives that move tensors."""
        sites = [self.without_numbers(site) for site in self.sites]
        return [site for site in sites if site is not None]

    @property
    def volume(self) -> Volume:
        """(op, axes by the user's names) -> elements in a step, sums of scalars left out."""
        found: Volume = {}
        for row in hlo.total(self.large):
            key = row.op, tuple(axis.removeprefix("zero_") for axis in row.axes)
            assert key not in found, f"{key} in two dtypes"
            found[key] = row.elements
        return found

    @property
    def dtypes(self) -> dict[str, set[str]]:
        """op -> dtypes, sums of scalars left out."""
        ops = {site.op for site in self.large}
        return {op: {site.dtype for site in self.large if site.op == op} for op in ops}

    @property
    def gathers(self) -> dict[str, int]:
        """path -> gathers in a step where the model reads the parameter, loops multiplied out."""
        return self._runs("all-gather", "zero_read")

    @property
    def scatters(self) -> dict[str, int]:
        """path -> reduce-scatters of its gradient inside backward."""
        return self._runs("reduce-scatter", "zero_reduce_scatter")

    @property
    def updates(self) -> dict[str, int]:
        """path -> gathers after the optimizer's update."""
        return self._runs("all-gather", "zero_gather_updated")

    def _runs(self, op: str, scope: str) -> dict[str, int]:
        found: Counter[str] = Counter()
        for site in self.large:
            if site.op != op or f"{scope}/" not in site.source:
                continue
            rest = site.source.split(f"{scope}/")[-1]
            paths = [path for path in self.leaves if rest.startswith((f"{path}/", f"{path})"))]
            assert paths and site.count is not None, site
            found[max(paths, key=len)] += site.count
        return dict(found)

    def assert_only_weights(self) -> None:
        """Not one activation moves: jzero's own collectives alone, on tensors shaped like weights.

        Beside them few sums of few scalars.
        """
        shards, shapes = self.zero.mesh.group_size, set()
        for leaf in self.leaves.values():
            sizes = list(leaf.array.shape)
            if leaf.dim is not None:
                sizes[leaf.dim] //= shards
            for dims in (leaf.array.shape, tuple(sizes)):
                shapes |= {dims, dims[len(leaf.array.layer_axes) :]}
        for site in self.large:
            assert any(scope in site.source.split("/") for scope in SCOPES), site
            assert all(operand.dims in shapes for operand in site.operands), site
        scalars = [site.count for site in self.sites if self.without_numbers(site) is None]
        micro_batches = self.zero.batch.accumulation
        assert sum(count or 0 for count in scalars) <= micro_batches + 1 and None not in scalars


def compiled(
    zero: jzero.Zero, loss: Callable[..., Any], batch: Any, options: dict[str, str] | None = None
) -> Step:
    """Compiles the training step of a model that is set up."""
    program = zero.train_step(loss).lower(batch).compile(compiler_options=options)
    return Step(zero, program, tuple(hlo.sites(program, zero.mesh.manual)))


def build_mesh(target: str, **axes: int) -> Mesh:
    devices = np.array(targets.devices(targets.parse(target)))
    return Mesh(devices.reshape(tuple(axes.values())), tuple(axes))


def compile_net(
    net: Net,
    target: str = "cpu:8",
    rows: int = 1,
    axes: tuple[tuple[str, int], ...] = (("data", 8),),
    tx: optax.GradientTransformation | None = None,
    trainable: Any = None,
    **settings: Any,
) -> Step:
    """Compiles a training step of the network, without an array of it.

    Arguments:
      net: the network.
      target: what to compile for.
      rows: of one device and micro-batch.
      axes: the mesh's axes and sizes.
      tx, trainable: as `Zero.init` takes them.
      settings: of `Zero`; bf16 and clipping if they do not say.
    """
    settings = {"precision": "bf16", "gradient_clipping": 1.0, **settings}
    zero = jzero.Zero(mesh=build_mesh(target, **dict(axes)), **settings)
    tx = optax.adamw(1e-3) if tx is None else tx
    zero.setup_for(net.init, tx, sample=net.sample, trainable=trainable)
    shape = (rows * zero.batch.accumulation * zero.mesh.data_size, LENGTH)
    batch = {
        "tokens": jax.ShapeDtypeStruct(shape, jnp.int32),
        "weight": jax.ShapeDtypeStruct(shape, jnp.float32),
    }
    return compiled(zero, net.loss, batch)


step = functools.cache(compile_net)
