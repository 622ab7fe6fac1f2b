"""The reader on programs compiled here, by XLA:CPU and, where it is installed, by XLA:GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from jzero.hlo import collectives, count_by, elements_by, memory


def test_counts_elements_dtypes_and_axes(
    target: str, make_mesh: Callable[..., Mesh], compile_step: Callable[[Mesh], Compiled]
):
    mesh = make_mesh(target, data=4, tensor=2)
    rows = collectives(compile_step(mesh), mesh)
    on_cpu = target.startswith("cpu")
    # XLA:CPU runs bf16 collectives in f32, and does not combine a layer's two gathers into one.
    dtype, gathers = ("f32", 30) if on_cpu else ("bf16", 15)
    assert count_by(rows, "all-gather", "data", dtype) == gathers
    assert elements_by(rows, "all-gather", "data", dtype) == 30 * 64 * 64
    assert count_by(rows, "reduce-scatter", "data", dtype) == 1
    assert elements_by(rows, "reduce-scatter", "data", dtype) == 64 * 64
    assert elements_by(rows, "all-reduce", "tensor", dtype) == 16 * 64
    assert elements_by(rows, "all-reduce", ("data", "tensor"), "f32") == 1
    assert elements_by(rows, "all-to-all", "data", dtype) == 8 * 64
    assert elements_by(rows, "collective-permute", "data", dtype) == 8 * 64
    assert elements_by(rows) == sum(row.elements or 0 for row in rows)


def test_the_other_order_of_axes(target: str, make_mesh: Callable[..., Mesh]):
    mesh = make_mesh(target, tensor=2, data=4)
    mapped = jax.shard_map(
        lambda x: lax.psum_scatter(x, "data", tiled=True),
        mesh=mesh,
        in_specs=P(None, "tensor"),
        out_specs=P("data", "tensor"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((16, 6), jnp.float32, sharding=NamedSharding(mesh, P(None, "tensor")))
    rows = collectives(jax.jit(mapped).lower(x).compile(), mesh)
    assert [(row.op, row.axes, row.count, row.elements, row.bytes) for row in rows] == [
        ("reduce-scatter", ("data",), 1, 16 * 3, 16 * 3 * 4 * 3 // 4)
    ]


def test_memory_of_a_donating_program(target: str, make_mesh: Callable[..., Mesh]):
    mesh = make_mesh(target, data=8)
    sharding = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((8 * 1024, 64), jnp.float32, sharding=sharding)
    step = jax.jit(lambda x: jnp.sin(x) * 2.0, donate_argnums=0, out_shardings=sharding)
    used = memory(step.lower(x).compile())
    one = 1024 * 64 * 4
    assert (used.argument_bytes, used.output_bytes, used.alias_bytes) == (one, one, one)
    assert used.peak_bytes == one + used.temp_bytes
    assert used.host_bytes == 0


def test_the_peak_holds_temporaries_on_cpu_too(
    target: str, make_mesh: Callable[..., Mesh], compile_step: Callable[[Mesh], Compiled]
):
    used = memory(compile_step(make_mesh(target, data=4, tensor=2)))
    assert used.temp_bytes > 0
    assert used.alias_bytes == 0
    assert used.peak_bytes > used.argument_bytes + used.output_bytes
    if target.startswith("cpu"):
        assert used.peak_bytes == used.argument_bytes + used.output_bytes + used.temp_bytes


def test_host_memory_is_counted_apart(target: str, make_mesh: Callable[..., Mesh]):
    if target.startswith("cpu"):
        pytest.skip("XLA:CPU does not tell host memory from the device's")
    mesh = make_mesh(target, data=8)
    on_device = NamedSharding(mesh, P("data"))
    # Compile-only GPUs list no memories, so a sharding of their own mesh would forget the kind.
    on_host = NamedSharding(mesh.abstract_mesh, P("data"), memory_kind="pinned_host")
    host, device = (
        jax.ShapeDtypeStruct((8 * 1024, 64), jnp.float32, sharding=sharding)
        for sharding in (on_host, on_device)
    )

    def add(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device) + y

    used = memory(jax.jit(add).trace(host, device).lower().compile())
    one = 1024 * 64 * 4
    assert (used.host_bytes, used.argument_bytes, used.output_bytes) == (one, one, one)
    assert used.peak_bytes == used.argument_bytes + used.output_bytes + used.temp_bytes
