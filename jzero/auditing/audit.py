"""Reading one compiled function, jzero's step or any other, into a report."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.stages import Compiled

from jzero import hlo
from jzero.auditing.arguments import Role, arguments
from jzero.auditing.frames import frames
from jzero.auditing.kept import kept
from jzero.auditing.largest import largest
from jzero.auditing.moved import moved
from jzero.auditing.origins import Origins
from jzero.auditing.packed import unpack
from jzero.auditing.report import Report
from jzero.errors import JzeroError
from jzero.hlo.flow import Flow
from jzero.hlo.text import Module, parse
from jzero.mesh import make_zero_mesh


def audit(
    compiled: Compiled | str,
    mesh: Mesh | AbstractMesh,
    *,
    axes: Sequence[str] | str | None = None,
    replica_axes: Sequence[str] | str = (),
    weights: Sequence[str] | None = None,
    small: int | None = None,
) -> Report:
    """Says what a compiled function needs and sends, and whether it moves what ZeRO does not.

    Arguments:
      compiled: any compiled function, `jax.jit(f).lower(...).compile()`, for devices that are there
        or not (`zero.train_step(loss).lower(batch).compile()` for jzero's own step); or the text of
        one, which tells everything but memory.
      mesh: the mesh that it was compiled for, as its user knows it (of a `Zero`,
        `zero.mesh.storage`).
      axes: the mesh axes that the state is sharded over; by default `data` and `fsdp`, those that
        the mesh has, or the only axis of a mesh with one.
      replica_axes: those over which the shards repeat; by default `replica`.
      weights: names of the arguments that are training state, where the program does not tell:
        ("params", "opt_state") for f(params, opt_state, batch). All others are then the batch.
      small: elements up to which a sum over the batch is a loss, a norm or a count, and no
        activation; by default 1024, and less for toy models.

    Returns:
      The report. Its `assert_...` methods are for tests; `print(report)` is for people.

    Raises:
      JzeroError: something that is not compiled, another mesh, or an axis or argument not there.

    >>> import jax, jax.numpy as jnp, jzero
    >>> def step(w, x):
    ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    >>> w, x = jnp.ones((64, 64)), jnp.ones((8, 64))
    >>> compiled = jax.jit(step, donate_argnums=0).lower(w, x).compile()
    >>> report = jzero.audit(compiled, jax.sharding.Mesh(jax.devices()[:1], ("data",)))
    >>> report.assert_no_collective_on_activations()
    >>> report.assert_peak_below(100_000)
    """
    text = _text(compiled)
    header = text[text.find("HloModule") :].split("\n", 1)[0]
    if "is_scheduled=true" not in header:
        raise JzeroError(
            "audit: this is not the text of a compiled module: pass what compiled.as_text() returns"
        )
    module = parse(text)
    _check_mesh(compiled, module, mesh)
    shard_axes, replicas = _roles(mesh, axes, replica_axes)
    flow = Flow(module)
    unpack(flow)
    known = arguments(flow, header, weights)
    origins = Origins(flow, known, small)
    sites = hlo.sites(module, mesh)
    lines = frames(text)
    found = moved(flow, origins, sites, lines)
    held = kept(flow, origins, found)
    state, batch, unsure = (
        tuple(sorted({each.root for each in known.of(role)}))
        for role in (Role.STATE, Role.BATCH, Role.UNSURE)
    )
    return Report(
        mesh=dict(mesh.shape),
        shard_axes=shard_axes,
        replica_axes=replicas,
        memory=None if isinstance(compiled, str) else hlo.memory(compiled),
        collectives=tuple(hlo.total(sites)),
        overlapped_fraction=hlo.overlapped_fraction(module, mesh),
        moved=tuple(found),
        kept=None if held is None else tuple(held),
        largest=tuple(largest(flow, lines)),
        state=state,
        batch=batch,
        unsure=unsure,
    )


def _text(compiled: Any) -> str:
    if isinstance(compiled, str):
        return compiled
    if not isinstance(compiled, Compiled):
        kind = type(compiled).__name__
        how = ".compile()" if isinstance(compiled, jax.stages.Lowered) else ".lower(...).compile()"
        raise JzeroError(f"audit: a {kind} is not a compiled function; pass what its {how} gives")
    text = compiled.as_text()
    if not text:
        raise JzeroError("audit: this backend gives no text of a compiled program")
    return text


def _check_mesh(compiled: Compiled | str, module: Module, mesh: Mesh | AbstractMesh) -> None:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise JzeroError(
            f"audit: a {type(mesh).__name__} is not a mesh; pass a jax.sharding.Mesh, of a Zero "
            "zero.mesh.storage"
        )
    devices = module.partitions * module.replicas
    if devices != mesh.size:
        raise JzeroError(
            f"audit: the program runs on {devices} devices, but the mesh {dict(mesh.shape)} has "
            f"{mesh.size}; pass the mesh that it was compiled for"
        )
    if isinstance(compiled, str) or isinstance(mesh, AbstractMesh):
        return
    given = [device.id for device in mesh.devices.flat]
    for sharding in jax.tree.leaves(compiled.input_shardings):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            there = [device.id for device in sharding.mesh.devices.flat]
            if sorted(there) == sorted(given) and there != given:
                raise JzeroError(
                    f"audit: the mesh has the program's devices in another order, {given} where "
                    f"the program has {there}; pass the mesh that it was compiled for"
                )


def _roles(
    mesh: Mesh | AbstractMesh, axes: Sequence[str] | str | None, replica_axes: Sequence[str] | str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The ZeRO axes and the replica axes; none where the mesh does not say which they are."""
    named = {"data", "fsdp"}.intersection(mesh.axis_names)
    if axes is None and not named and len(mesh.axis_names) > 1:
        return (), ()
    roles = make_zero_mesh(mesh, axes, replica_axes)
    return roles.shard_axes, roles.replica_axes
