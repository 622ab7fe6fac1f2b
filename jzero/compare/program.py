"""Compiling the real train step of a stage for a target, and reading what came out."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled

from jzero import config as configs
from jzero import factory, hlo, targets, xla_options
from jzero.compare.here import is_here, present
from jzero.compare.notes import notes
from jzero.compare.refused import is_refused, needed, there
from jzero.compare.request import Axes, Request, mesh_axes
from jzero.compare.row import Row
from jzero.compare.running import run
from jzero.compare.schedule import schedule
from jzero.compare.split import peak_split
from jzero.compare.traffic import ratios, traffic, user_axes, volume
from jzero.errors import JzeroError, RunFailed
from jzero.explain import explain
from jzero.factory import one_line
from jzero.hlo.buffers import compile_with_buffers
from jzero.hlo.flow import Flow
from jzero.hlo.large import largest
from jzero.hlo.peak import Peak, peak
from jzero.plan.fit import fits, memory_setting
from jzero.plan.leaves import config_of, optimizer_of
from jzero.targets import Target
from jzero.units import size
from jzero.workload import Workload
from jzero.zero import Zero


def compile_stage(request: Request) -> dict[str, Any]:
    """Compiles one stage in this process, and runs it where the target is the devices present.

    Arguments:
      request: the process must have been started with the target's environment.

    Returns:
      {"row": of `Row.as_dict`, and of `Result` what all stages share}; or {} where the process was
      started with flags for a layer scan and the model has none.

    Raises:
      JzeroError: a model, a configuration or a mesh that jzero cannot use; no compiler or devices.
      RunFailed: the compiler, or the program as it ran, failed for another reason than memory.
    """
    workload = factory.load(request.model)
    target, devices = _devices(request.target)
    axes = mesh_axes(target, request.mesh, request.replicas)
    zero = _zero(request, workload, axes, devices)
    began = time.perf_counter()
    lowered = _lower(zero, workload)
    traced = time.perf_counter() - began
    layout = zero.setup.layout
    layers = zero.setup.prefetched
    if request.flags and not layers.scanned:
        return {}
    options = xla_options.options(target.kind, layers)
    began = time.perf_counter()
    try:
        compiled, buffers = compile_with_buffers(lowered, options.per_program)
    except Exception as error:
        if not is_refused(error):
            raise RunFailed(f"stage {request.stage} does not compile: {one_line(error)}") from error
        row = _refused(request.stage, str(error))
    else:
        seconds = time.perf_counter() - began
        most = None if buffers is None else peak(buffers)
        row = _row(request.stage, zero, workload, target, compiled, most)
        row = replace(row, trace_seconds=round(traced, 3), compile_seconds=round(seconds, 3))
        if request.dump is not None:
            _dump(Path(request.dump), request.stage, compiled)
        if is_here(request.target):
            row = _run(row, compiled, zero, workload)
    return {
        "row": row.as_dict(),
        "parameters": sum(leaf.array.size for leaf in layout.leaves.values()),
        "target": target.name,
        "devices": target.count,
        "platform": target.kind,
        "description": target.description,
        "memory_bytes": target.memory_bytes,
        "mesh": dict(axes),
        "micro_batch": zero.batch.micro or 1,
        "accumulate": zero.batch.accumulation,
        "xla_flags": [*xla_options.in_effect(), *xla_options.as_flags(options.per_program)],
        "environment": options.line,
    }


def _devices(name: str) -> tuple[Target, list[Any]]:
    if is_here(name):
        return present(name)
    target = targets.parse(name)
    return target, targets.devices(target)


def _zero(request: Request, workload: Workload, axes: Axes, devices: list[Any]) -> Zero:
    sizes, names = [size for _, size in axes], [name for name, _ in axes]
    mesh = Mesh(np.array(devices).reshape(sizes), names)
    # The axes' roles, before the configuration's batch sizes are held against them.
    data = Zero(stage=request.stage, mesh=mesh).mesh.data_size
    config = config_of(workload, data, request.accumulate, request.micro_batch)
    config = configs.load(config, stage=request.stage, prefetch_elements=request.prefetch)
    return Zero(config, mesh=mesh)


def _lower(zero: Zero, workload: Workload):
    try:
        zero.setup_for(workload.init, optimizer_of(workload, zero.config), sample=workload.sample)
        return zero.train_step(workload.loss_fn).lower(workload.batch(_rows(zero)))
    except JzeroError:
        raise
    except Exception as error:
        raise JzeroError(f"the workload cannot be traced: {one_line(error)}") from error


def _rows(zero: Zero) -> int:
    """Of the global batch."""
    batch = zero.batch
    return batch.train or (batch.micro or 1) * batch.accumulation * zero.mesh.data_size


def _row(
    stage: int,
    zero: Zero,
    workload: Workload,
    target: Target,
    compiled: Compiled,
    most: Peak | None,
) -> Row:
    setup = zero.setup
    memory = hlo.memory(compiled)
    program = hlo.parse(compiled)
    split = large = None
    if most is not None:
        flow = Flow(program)
        split, large = peak_split(most, flow, memory), largest(most, flow)
    found = traffic(hlo.collectives(program, zero.mesh.manual), zero.mesh)
    ratio, ratio_elements = ratios(found, zero.mesh, setup.layout)
    hidden = hlo.overlapped_fraction(program, zero.mesh.manual)
    state = explain(setup.layout, setup.abstract_state(), accumulation=setup.batch.accumulation)
    capacity = target.memory_bytes
    share = None if capacity is None else memory.peak_bytes / capacity
    return Row(
        stage=stage,
        argument_bytes=memory.argument_bytes,
        temp_bytes=memory.temp_bytes,
        alias_bytes=memory.alias_bytes,
        peak_bytes=memory.peak_bytes,
        peak_split=split,
        largest=large,
        host_bytes=memory.host_bytes,
        capacity_bytes=capacity,
        fits=fits(share),
        mem_fraction=memory_setting(share) if target.kind == "gpu" else None,
        state_bytes=dict(state.bytes_per_device),
        collectives=found,
        comm_bytes=volume(found, zero.mesh),
        comm_ratio=ratio,
        comm_ratio_elements=ratio_elements,
        overlapped_fraction=hidden,
        schedule=schedule(program, zero.mesh.manual, user_axes(zero.mesh)),
        notes=notes(found, hidden, setup, workload, _rows(zero)),
    )


def _run(row: Row, compiled: Compiled, zero: Zero, workload: Workload) -> Row:
    """The row, with what running the step took."""
    try:
        ran = run(compiled, zero, workload, optimizer_of(workload, zero.config), _rows(zero))
    except JzeroError:
        raise
    except Exception as error:
        if not is_refused(error):
            raise RunFailed(f"stage {row.stage} does not run: {one_line(error)}") from error
        wanted = needed(str(error))
        more = "" if wanted is None else f": {size(wanted)} could not be allocated"
        return replace(row, error=f"it compiles, but runs out of memory as it runs{more}")
    said = row.notes or ()
    if ran.peak_bytes is not None and ran.step_peak_bytes is None:
        said += (
            f"making the state took more memory than a step, {size(ran.peak_bytes)}, so a step's "
            f"own peak is not measured",
        )
    return replace(
        row,
        measured_peak_bytes=ran.step_peak_bytes,
        seconds_per_step=ran.median,
        seconds_fastest=min(ran.seconds),
        seconds_slowest=max(ran.seconds),
        timed_steps=len(ran.seconds),
        notes=said,
    )


def _refused(stage: int, message: str) -> Row:
    needs, has = needed(message), there(message)
    error = "the compiler refuses the program: it does not fit"
    if needs is not None:
        error += f"; it needs {size(needs)}"
        error += "" if has is None else f" of {size(has)}"
    else:
        error += f": {' '.join(message.split())[:300]}"
    return Row(stage=stage, peak_bytes=needs, fits=False, error=error)


def _dump(folder: Path, stage: int, compiled: Compiled) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage{stage}.hlo.txt"
    beside = path.with_suffix(".part")
    beside.write_text(compiled.as_text() or "", encoding="utf-8")
    beside.replace(path)
