"""Which arrays of a training state are sharded, which stay whole, and why.

It is computed from specs alone; `jzero.measure` sums the arrays themselves.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jzero.explanation import KINDS, Explanation, Row
from jzero.layout import Layout, bytes_per_device, struct
from jzero.partition import STAGES
from jzero.paths import flatten
from jzero.setup import Setup
from jzero.state import State


def explain(
    layout: Layout,
    state: State,
    made_whole: Mapping[str, str] | None = None,
    accumulation: int = 1,
) -> Explanation:
    """The table of leaves of a training state.

    Arguments:
      layout: where everything lives.
      state: the state's arrays, or `jax.ShapeDtypeStruct`s with shardings: what the table says of
        an array is what its own sharding says.
      made_whole: path -> primitive, of `jzero.whole_init.whole_at_init`.
      accumulation: micro-batches in a step; decides the gradients' dtype.
    """
    made_whole = made_whole or {}
    rows = [
        *_parameters(layout, state, made_whole),
        *_masters(layout, state, made_whole),
        *_gradients(layout, accumulation),
        *_optimizer(layout, state),
        *_others(layout, state),
    ]
    rows.sort(key=lambda row: (KINDS.index(row.kind), -row.bytes_per_device))
    return Explanation(layout.stage, layout.mesh.group_size, tuple(rows))


def stage_table(setup: Setup, accumulation: int = 1) -> list[dict[str, int]]:
    """Bytes per device at each stage, of the same model, optimizer and mesh.

    Arguments:
      setup: the model and its optimizer as laid out at any stage.
      accumulation: micro-batches in a step; decides the gradients' dtype.

    Returns:
      For stages 0 to 3: {"stage", "params", "master", "gradients", "optimizer", "other", "state",
      "total"}, where `state` is what stays between steps, and `total` that and the gradients.
    """
    table = []
    for stage in STAGES:
        at = setup.at_stage(stage)
        found = explain(at.layout, at.abstract_state(), accumulation=accumulation)
        state = found.total_bytes_per_device
        table.append(
            {
                "stage": stage,
                **found.bytes_per_device,
                "gradients": found.gradient_bytes,
                "state": state,
                "total": state + found.gradient_bytes,
            }
        )
    return table


def _parameters(layout: Layout, state: State, made_whole: Mapping[str, str]) -> Iterator[Row]:
    for path, x in state.params.items():
        leaf = layout.leaves[path]
        if leaf.dim is not None and not leaf.shard_parameter and layout.stage < 3:
            reason = "whole: parameters are sharded from stage 3 on"
        else:
            reason = leaf.persistent or leaf.reason
        if leaf.shard_parameter:
            reason += _note(path, made_whole)
        yield _row(layout, "params", path, leaf.array.shape, x, leaf.shard_parameter, reason)


def _masters(layout: Layout, state: State, made_whole: Mapping[str, str]) -> Iterator[Row]:
    for path, x in state.master.items():
        leaf = layout.leaves[path]
        reason = leaf.reason + _note(path, made_whole)
        yield _row(layout, "master", path, leaf.array.shape, x, leaf.shard_state, reason)


def _gradients(layout: Layout, accumulation: int) -> Iterator[Row]:
    policy = layout.policy
    dtype = policy.communication if accumulation == 1 else policy.accumulation
    for path, leaf in layout.trained.items():
        sharded = leaf.shard_gradient
        shape = leaf.stored_shape if sharded else leaf.array.shape
        spec = leaf.spec(layout.mesh.shard_axes, sharded)
        reason = leaf.reason
        if leaf.shard_state and not sharded:
            reason = "whole in backward, then reduce-scattered once per step"
            if leaf.persistent:
                reason += f"; the parameter stays {leaf.persistent}"
        x = struct(shape, dtype, layout.mesh.sharding(spec))
        yield _row(layout, "gradients", path, leaf.array.shape, x, sharded, reason)


def _optimizer(layout: Layout, state: State) -> Iterator[Row]:
    leaves, arrays = flatten(layout.opt_leaves), flatten(state.opt_state)
    for path, x in arrays.items():
        leaf = leaves[path]
        yield _row(layout, "optimizer", path, leaf.array.shape, x, leaf.shard_state, leaf.reason)


def _others(layout: Layout, state: State) -> Iterator[Row]:
    numbers = {"step": state.step, "skipped": state.skipped, "rng": state.rng, "scale": state.scale}
    for path, x in flatten(numbers).items():
        reason = "whole: one number for the whole run"
        yield _row(layout, "other", path, tuple(x.shape), x, False, reason)
    for path, x in flatten({"variables": state.variables}).items():
        reason = "whole: variables that are not parameters are the same on every device"
        yield _row(layout, "other", path, tuple(x.shape), x, False, reason)


def _row(
    layout: Layout,
    kind: str,
    path: str,
    shape: tuple[int, ...],
    x: Any,
    planned: bool,
    reason: str,
) -> Row:
    """A row; `planned`: the layout shards this array."""
    spec, mesh = x.sharding.spec, layout.mesh
    axes = {a for entry in spec if entry for a in (entry if isinstance(entry, tuple) else (entry,))}
    sharded = mesh.group_size > 1 and not axes.isdisjoint(mesh.shard_axes)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    if planned and not sharded:
        reason = f"whole, against its plan: {reason}"
    whole = jax.ShapeDtypeStruct(x.shape, x.dtype)
    stage = STAGES[layout.stage]
    shards = {
        "params": stage.parameters,
        "master": stage.optimizer,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "other": False,
    }
    return Row(
        kind=kind,
        path=path,
        shape=shape,
        stored=tuple(x.shape),
        dtype=str(x.dtype),
        spec=_spec_text(spec),
        bytes_per_device=bytes_per_device(
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        ),
        total_bytes=bytes_per_device(whole),
        sharded=sharded,
        by_design=not sharded
        and (mesh.group_size == 1 or not shards[kind] or not shape or 0 in shape or is_key),
        reason=reason,
    )


def _note(path: str, made_whole: Mapping[str, str]) -> str:
    if path not in made_whole:
        return ""
    return f"; made whole on each device at init: its initialiser uses {made_whole[path]}"


def _spec_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
