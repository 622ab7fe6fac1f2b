"""What an audit says of something that it cannot read."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from steps import build_mesh

import jzero
from jzero.errors import JzeroError


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return build_mesh("cpu:8", data=8)


@pytest.fixture(scope="module")
def lowered(mesh: Mesh) -> Any:
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(jnp.sum).lower(x)


@pytest.fixture(scope="module")
def compiled(lowered: Any) -> Any:
    return lowered.compile()


def refuses(text: str, *args: Any, **options: Any) -> None:
    with pytest.raises(JzeroError, match=re.escape(text)):
        jzero.audit(*args, **options)


def test_what_is_not_compiled(lowered: Any, mesh: Mesh):
    refuses("a Lowered is not a compiled function; pass what its .compile() gives", lowered, mesh)
    how = "pass what its .lower(...).compile() gives"
    refuses(f"a PjitFunction is not a compiled function; {how}", jax.jit(jnp.sum), mesh)
    for text in (lowered.as_text(), lowered.as_text(dialect="hlo"), "a text"):
        refuses("not the text of a compiled module: pass what compiled.as_text()", text, mesh)


def test_another_mesh(compiled: Any, mesh: Mesh):
    four = Mesh(mesh.devices[:4], ("data",))
    refuses(
        "the program runs on 8 devices, but the mesh {'data': 4} has 4; pass the mesh that it was "
        "compiled for",
        compiled,
        four,
    )
    backwards = Mesh(mesh.devices[::-1], ("data",))
    refuses("the mesh has the program's devices in another order", compiled, backwards)
    refuses("a tuple is not a mesh; pass a jax.sharding.Mesh", compiled, (8,))
    assert jzero.audit(compiled, AbstractMesh((8,), ("data",))).mesh == {"data": 8}


def test_axes_and_arguments_that_are_not_there(compiled: Any, mesh: Mesh):
    refuses("axis 'fsdp' is not in the mesh", compiled, mesh, axes="fsdp")
    refuses(
        "weights: no argument of the program is 'params'; it has",
        compiled,
        mesh,
        weights=["params"],
    )
    report = jzero.audit(compiled, mesh)
    with pytest.raises(JzeroError, match="axis 'tensor' is not in the mesh"):
        report.assert_no_collective_on_activations("tensor")


def test_a_mesh_that_does_not_say_its_axes(compiled: Any, mesh: Mesh):
    """All axes are asked about then; a volume needs to know."""
    other = Mesh(mesh.devices.reshape(4, 2), ("x", "y"))
    report = jzero.audit(compiled, other)
    assert report.shard_axes == ()
    report.assert_no_collective_on_activations()
    with pytest.raises(JzeroError, match=re.escape("say which: audit(..., axes=...)")):
        report.assert_volume(2, 64)
    assert jzero.audit(compiled, other, axes="x", replica_axes="y").replica_axes == ("y",)
