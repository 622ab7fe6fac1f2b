"""Compiling the real train step of a stage for a target, and reading what came out."""

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import optax
from jax.sharding import Mesh
from jax.stages import Compiled

from jzero import config as configs
from jzero import factory, hlo, targets, xla_options
from jzero.compare.refused import is_refused, needed, there
from jzero.compare.request import Request
from jzero.compare.row import Row
from jzero.compare.traffic import ratios, traffic, volume
from jzero.errors import JzeroError, RunFailed
from jzero.explain import explain
from jzero.factory import one_line
from jzero.plan.fit import JAX_FRACTION, USABLE
from jzero.plan.leaves import config_of
from jzero.plan.rows import size
from jzero.targets import Target
from jzero.workload import Workload
from jzero.zero import Zero


def measure(request: Request) -> dict[str, Any]:
    """Compiles one stage in this process.

    Arguments:
      request: the process must have been started with the target's environment.

    Returns:
      {"row": of `Row.as_dict`, "parameters", "micro_batch", "accumulate", "xla_flags"}; or {} where
      the process was started with flags for a layer scan and the model has none.

    Raises:
      JzeroError: a model, a configuration or a mesh that jzero cannot use, or no compiler.
      RunFailed: the compiler failed for another reason than memory.
    """
    target = targets.parse(request.target)
    workload = factory.load(request.model)
    zero = _zero(request, workload, target)
    began = time.perf_counter()
    lowered = _lower(zero, workload)
    traced = time.perf_counter() - began
    layout = zero.setup.layout
    layer = xla_options.layer_bytes(layout)
    if request.flags and not xla_options.preset(target.kind, layer):
        return {}
    options = xla_options.options(target.kind, layer)
    began = time.perf_counter()
    try:
        compiled = lowered.compile(compiler_options=dict(options.per_program))
    except Exception as error:
        if not is_refused(error):
            raise RunFailed(f"stage {request.stage} does not compile: {one_line(error)}") from error
        row = _refused(request.stage, str(error))
    else:
        seconds = time.perf_counter() - began
        row = _row(request.stage, zero, target, compiled, traced, seconds)
        if request.dump is not None:
            _dump(Path(request.dump), request.stage, compiled)
    return {
        "row": row.as_dict(),
        "parameters": sum(leaf.array.size for leaf in layout.leaves.values()),
        "micro_batch": zero.batch.micro or 1,
        "accumulate": zero.batch.accumulation,
        "xla_flags": [*xla_options.in_effect(), *xla_options.as_flags(options.per_program)],
    }


def _zero(request: Request, workload: Workload, target: Target) -> Zero:
    sizes, names = [size for _, size in request.axes], [name for name, _ in request.axes]
    mesh = Mesh(np.array(targets.devices(target)).reshape(sizes), names)
    # The axes' roles, before the configuration's batch sizes are held against them.
    data = Zero(stage=request.stage, mesh=mesh).mesh.data_size
    config = config_of(workload, data, request.accumulate, request.micro_batch)
    return Zero(configs.load(config, stage=request.stage), mesh=mesh)


def _lower(zero: Zero, workload: Workload):
    tx = workload.tx
    if tx is None and zero.config.optimizer is None:
        tx = optax.adamw(1e-4)
    batch = zero.batch
    rows = batch.train or (batch.micro or 1) * batch.accumulation * zero.mesh.data_size
    try:
        zero.setup_for(workload.init, tx, sample=workload.sample)
        return zero.train_step(workload.loss_fn).lower(workload.batch(rows))
    except JzeroError:
        raise
    except Exception as error:
        raise JzeroError(f"the workload cannot be traced: {one_line(error)}") from error


def _row(
    stage: int, zero: Zero, target: Target, compiled: Compiled, traced: float, seconds: float
) -> Row:
    setup = zero.setup
    memory = hlo.memory(compiled)
    text = compiled.as_text() or ""
    found = traffic(hlo.collectives(text, zero.mesh.manual), zero.mesh)
    ratio, ratio_elements = ratios(found, zero.mesh, setup.layout)
    state = explain(setup.layout, setup.abstract_state(), accumulation=setup.batch.accumulation)
    capacity = target.memory_bytes
    share = None if capacity is None else memory.peak_bytes / capacity
    fraction = None
    if share is not None and target.kind == "gpu" and share > JAX_FRACTION:
        fraction = math.ceil(share * 100) / 100
    return Row(
        stage=stage,
        argument_bytes=memory.argument_bytes,
        temp_bytes=memory.temp_bytes,
        alias_bytes=memory.alias_bytes,
        peak_bytes=memory.peak_bytes,
        host_bytes=memory.host_bytes,
        capacity_bytes=capacity,
        fits=None if share is None else share <= USABLE,
        mem_fraction=fraction,
        state_bytes=dict(state.bytes_per_device),
        collectives=found,
        comm_bytes=volume(found, zero.mesh),
        comm_ratio=ratio,
        comm_ratio_elements=ratio_elements,
        overlapped_fraction=hlo.overlapped_fraction(text, zero.mesh.manual),
        trace_seconds=round(traced, 3),
        compile_seconds=round(seconds, 3),
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
