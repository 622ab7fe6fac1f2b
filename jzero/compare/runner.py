"""Running the workers, one after another, and putting their rows together."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from jzero import targets, xla_options
from jzero.compare.here import is_here
from jzero.compare.request import Request, mesh_axes
from jzero.compare.row import Result, Row
from jzero.errors import JzeroError, RunFailed

_SHOWN = 2000
"""Characters of a dead worker's last words."""


def compare(
    request: Request,
    stages: Sequence[int],
    report: Callable[[Row], None] = lambda row: None,
    begin: Callable[[int], None] = lambda stage: None,
) -> Result:
    """Compiles a workload's train step at each stage, each in its own process.

    On the devices present it runs too. This process never touches them: it would keep them from
    the others.

    Arguments:
      request: the workload, target and mesh; its stage is passed over.
      stages: those to compile, in order.
      report: is given each row as it is there.
      begin: is told each stage before it starts.

    Returns:
      All rows; one that was refused for memory is a row too.

    Raises:
      JzeroError: a model, a configuration or a mesh that jzero cannot use; no compiler or devices.
      RunFailed: a program that does not compile or run, for another reason.
    """
    target, line = None, ""
    if not is_here(request.target):
        target = targets.parse(request.target)
        mesh_axes(target, request.mesh, request.replicas)
        if not targets.plugin_installed(target.kind):
            targets.devices(target)  # says what to install
        wanted = _options(target.kind)
        request = replace(request, flags=tuple(xla_options.as_flags(wanted.per_process)))
        line = wanted.line
    answers = []
    for stage in stages:
        begin(stage)
        answer = _work(replace(request, stage=stage), target)
        if not answer:  # no layer scan: not with flags that are meant for one
            request = replace(request, flags=())
            answer = _work(replace(request, stage=stage), target)
        answers.append(answer)
        report(Row.from_dict(answer["row"]))
    first = answers[0]
    notices = dict.fromkeys(notice for answer in answers for notice in answer["notices"])
    return Result(
        model=request.model,
        parameters=first["parameters"],
        target=first["target"],
        devices=first["devices"],
        platform=first["platform"],
        description=first["description"],
        memory_bytes=first["memory_bytes"],
        jax=jax.__version__,
        mesh=first["mesh"],
        micro_batch=first["micro_batch"],
        accumulate=first["accumulate"],
        xla_flags=tuple(first["xla_flags"]),
        environment=line if request.flags else first["environment"],
        notices=tuple(notices),
        rows=tuple(Row.from_dict(answer["row"]) for answer in answers),
    )


def _options(kind: str) -> xla_options.Options:
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        jax.config.update("jax_platforms", "cpu")  # asked of XLA:CPU: no other plugin is loaded
    return xla_options.options(kind, xla_options.Layers(scanned=1))


def _environment(target: targets.Target | None, flags: Sequence[str]) -> dict[str, str]:
    """Of a worker; without a target, the user's own."""
    variables = dict(os.environ)
    if target is not None:
        variables |= targets.environment(target)
    # A program from the cache has no record of its buffers, nor the time that it takes to compile.
    variables["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    variables["XLA_FLAGS"] = " ".join([variables.get("XLA_FLAGS", ""), *flags]).strip()
    # What this process can import, and no more: not the folder that it happens to be in.
    variables["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return variables


def _work(request: Request, target: targets.Target | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jzero-compare-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log.txt"
        command = [sys.executable, "-P", "-m", "jzero.compare.worker", str(result)]
        with log.open("wb") as said:
            worker = subprocess.Popen(
                command,
                env=_environment(target, request.flags),
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=said,
            )
            try:
                worker.communicate(json.dumps(request.as_dict()).encode())
            finally:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
        if not result.is_file():
            last = log.read_text(encoding="utf-8", errors="replace").strip()[-_SHOWN:]
            raise RunFailed(
                f"stage {request.stage}: its process ended with exit code {worker.returncode} and "
                f"said {last or 'nothing'}"
            )
        answer = json.loads(result.read_text(encoding="utf-8"))
    if "failed" in answer:
        raise (JzeroError if answer["usage"] else RunFailed)(answer["failed"])
    return answer
