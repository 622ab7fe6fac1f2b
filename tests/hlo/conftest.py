"""Meshes, present and compile-only, and a small program whose traffic is known by hand."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jzero import targets
from jzero.errors import JzeroError

LAYERS, MICRO_BATCHES, WIDTH = 5, 3, 64


def build_mesh(target: str, **axes: int) -> Mesh:
    devices = np.array(targets.devices(targets.parse(target)))
    return Mesh(
        devices.reshape(tuple(axes.values())), tuple(axes), axis_types=(AxisType.Auto,) * len(axes)
    )


@pytest.fixture(params=["cpu:8", "h100:8"])
def target(request: pytest.FixtureRequest) -> str:
    """Each target in turn; the GPU's is skipped where its compiler is not installed."""
    try:
        targets.devices(targets.parse(request.param))
    except JzeroError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def make_mesh() -> Callable[..., Mesh]:
    return build_mesh


@pytest.fixture
def compile_step() -> Callable[[Mesh], Compiled]:
    return step


def step(mesh: Mesh) -> Compiled:
    """Per micro-batch and layer two gathers over `data`; then one of each other collective.

    Weights are (layers, WIDTH / data, WIDTH) on a device, the batch is 8 rows of WIDTH.
    """

    def body(x: jax.Array, first: jax.Array, second: jax.Array):
        def layer(x: jax.Array, weights: tuple[jax.Array, jax.Array]):
            one, two = (lax.all_gather(weight, "data", tiled=True) for weight in weights)
            return jnp.tanh(x @ one) @ two, None

        def micro_batch(x: jax.Array, _: None):
            return lax.scan(layer, x, (first, second))[0], None

        x, _ = lax.scan(micro_batch, x, None, length=MICRO_BATCHES)
        scattered = lax.psum_scatter(x.T @ x, "data", tiled=True)
        return (
            lax.psum(scattered, "tensor"),
            lax.psum(jnp.sum(x.astype(jnp.float32)), ("data", "tensor")),
            lax.all_to_all(x, "data", split_axis=1, concat_axis=0, tiled=True),
            lax.ppermute(x, "data", [(0, 1), (1, 2), (2, 3), (3, 0)]),
        )

    def argument(*shape: int, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P("data"), P(None, "data"), P(None, "data")),
        out_specs=(P("data"), P(), P("data"), P("data")),
        check_vma=False,
    )
    weights = argument(LAYERS, WIDTH, WIDTH, spec=P(None, "data"))
    batch = argument(8 * mesh.shape["data"], WIDTH, spec=P("data"))
    return jax.jit(mapped).trace(batch, weights, weights).lower().compile()
