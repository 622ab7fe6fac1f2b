"""XLA's buffer assignment, from a dump built by hand and from programs compiled here."""

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.errors import JzeroError
from jzero.hlo import memory
from jzero.hlo.buffers import Allocation, Buffer, Event, Value, compile_with_buffers, read
from jzero.hlo.flow import Flow
from jzero.hlo.large import largest
from jzero.hlo.peak import peak
from jzero.hlo.text import parse

TUPLE, ARRAY = 13, 11  # PrimitiveType


def varint(number: int) -> bytes:
    *low, high = [number >> shift & 127 for shift in range(0, max(1, number.bit_length()), 7)]
    return bytes([*(byte | 128 for byte in low), high])


def message(*fields: tuple[int, int | str | bytes]) -> bytes:
    """A protocol buffer's bytes."""
    found = b""
    for number, value in fields:
        if isinstance(value, int):
            found += varint(number << 3) + varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            found += varint(number << 3 | 2) + varint(len(data)) + data
    return found


def shape(*elements: bytes) -> bytes:
    return message((2, TUPLE), *((4, each) for each in elements))


array = message((2, ARRAY), (3, b"\x02\x03"))


def instruction(number: int, name: str, opcode: str, gives: bytes, *more: tuple[int, bytes]):
    return message((1, name), (2, opcode), (3, gives), (35, number), *more)


def computation(number: int, name: str, root: int, *instructions: bytes) -> bytes:
    return message((1, name), *((2, each) for each in instructions), (5, number), (6, root))


def buffer(number: int, size: int, color: int, at: int, *index: int) -> tuple[int, bytes]:
    where = message((4, at), *([(3, b"".join(map(varint, index)))] if index else []))
    return 1, message((1, number), (2, size), (3, where), (4, color))


def allocation(*fields: tuple[int, int]) -> tuple[int, bytes]:
    return 3, message(*fields)


# A reduction of two arrays, wrapped, as XLA:GPU runs it; before it an argument, ((a), (b, c)).
WRAPPED = computation(1, "wrapped", 300, instruction(300, "scatter", "x", shape(array, array)))
START = shape(shape(array, array), shape(array, array), array)
MAIN = computation(
    2,
    "main",
    12,
    instruction(11, "argument", "parameter", shape(array, shape(array, array))),
    instruction(12, "scatter-start", "async-start", START, (38, varint(1))),
)
MODULE = message((1, "step"), (3, WRAPPED), (3, MAIN))
ASSIGNMENT = message(
    buffer(500, 64, 0, 11, 1, 1),
    buffer(501, 2**40, 0, 300, 1),
    buffer(502, 8, 5, 300),
    allocation((1, 0), (2, 64), (5, 1), (6, 3)),
    allocation((1, 1), (2, 16), (3, 1)),
    allocation((1, 2), (2, 8), (8, 5), (12, 1)),
    allocation((1, 3), (2, 2**40), (11, 1)),
    (4, message((1, message((2, 501))), (1, message((1, 2), (2, 500), (5, 501))), (2, 1))),
    (4, message((1, message((1, 1), (2, 502))))),
)


def test_reads_a_dump():
    found = read(message((1, MODULE), (3, ASSIGNMENT)))
    assert found.all == {
        500: Buffer(64, 0, Value("main", "argument", 2)),
        # What a wrapped instruction gives is, in the text, the start's, behind its operands.
        501: Buffer(2**40, 0, Value("main", "scatter-start", 3)),
        502: Buffer(8, 5, Value("main", "scatter-start", 2)),
    }
    assert found.allocations == (
        Allocation(64, 0, argument=3, held=True),
        Allocation(8, 5, argument=None, held=True),
        Allocation(2**40, 0, argument=None, held=False),
    )
    assert found.traces == ((Event(0, 501, 0), Event(2, 500, 501)), (Event(1, 502, 0),))


def test_what_is_no_dump():
    whole = message((1, MODULE), (3, ASSIGNMENT))
    with pytest.raises(JzeroError, match="no protocol buffer, or are cut short"):
        read(whole[:-1])
    assert read(message((1, MODULE))) is None, "of a program from JAX's compilation cache"


def lowered(mesh: Mesh):
    """Two products with a weight that is gathered, (8, 512) on a device and 1 MiB when whole."""

    def body(x: jax.Array, weight: jax.Array) -> jax.Array:
        with jax.named_scope("my_gather"):
            whole = lax.all_gather(weight, "data", tiled=True)
        return jnp.tanh(x @ whole) @ whole.T

    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    mapped = jax.shard_map(body, mesh=mesh, check_vma=False, **specs)
    rows, weight = (
        jax.ShapeDtypeStruct(dims, jnp.float32, sharding=NamedSharding(mesh, P("data")))
        for dims in ((64, 512), (512, 512))
    )
    return jax.jit(mapped).lower(rows, weight)


def test_a_compiled_program(target: str, make_mesh: Callable[..., Mesh]):
    step = lowered(make_mesh(target, data=8))
    compiled, buffers = compile_with_buffers(step)
    text = compiled.as_text()
    assert buffers is not None and text == step.compile().as_text(), "the dump changes nothing"
    found, used = peak(buffers), memory(compiled)
    assert found is not None and found.bytes <= used.peak_bytes <= found.allocated
    if not target.startswith("cpu"):  # where the compiler's peak is all that is allocated
        assert found.bytes == used.peak_bytes
    whole = largest(found, Flow(parse(text)), 1)[0]
    assert whole.shape is not None and whole.bytes == whole.shape.bytes == 512 * 512 * 4
    assert whole.opcode.startswith("all-gather") and "my_gather/all_gather" in whole.source
    arguments = {each.argument: each.bytes for each in found.held if each.argument is not None}
    assert arguments == {0: 8 * 512 * 4, 1: 64 * 512 * 4}


def test_ones_own_dump_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_mesh: Callable[..., Mesh]
):
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to={tmp_path}")
    compiled, buffers = compile_with_buffers(lowered(make_mesh("cpu:8", data=8)))
    assert buffers is None and compiled.as_text()
