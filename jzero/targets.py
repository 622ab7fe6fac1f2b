"""Accelerators to compile for, present or not: `h100:8`, `v5p:2x2x2`, `cpu:8`.

XLA's GPU and TPU compilers run without the hardware (`jax.experimental.topologies`). Parsing a
target touches no device; `devices` loads the compiler's plugin. Figures are in `jzero/data`.
"""

import functools
import importlib.resources
import importlib.util
import json
import math
import os
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.experimental import topologies

from jzero.errors import JzeroError

NODE = 8
"""GPUs of one node, which are those that NVLink joins."""

HERE = "here"
"""The devices present, as a target of `jzero compare` (jzero/compare/here.py)."""

_INSTALL = 'pip install ".[compile-only]" in a clone of jzero'
# TPU_ACCELERATOR_TYPE counts cores: a v5p chip has two. JAX sees one device for a chip.
_ACCELERATOR_TYPE = {"v5e": ("v5litepod", 1), "v5p": ("v5p", 2), "v6e": ("v6e", 1)}
_PLUGINS = {
    "gpu": ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    "tpu": ("libtpu",),
    "cpu": (),
}
# Figures that are not plain fields of XLA's GpuDeviceInfoProto.
_OTHER = frozenset(
    {
        "name",
        "compute_capability",
        "platform_name",
        "dnn_version_info",
        "bf16_flops",
        "nvlink_bytes_per_s",
        "network_bytes_per_s",
    }
)
_SWITCHES = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=120",
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
)


@dataclass(frozen=True)
class Target:
    """A number of accelerators of one model; figures are for one device, None where there are none.

    Attributes:
      name: as written, such as "h100:8".
      model: the part before the colon, a key of the device figures, or "cpu".
      kind: "gpu", "tpu" or "cpu".
      count: devices.
      topology: the compiler's own name for their arrangement ("1x1x8", "v5p:2x2x2"); "" on CPU.
      description: the maker's name of the device.
      memory_bytes: device memory.
      flops: dense bf16 operations per second.
      memory_bytes_per_s: bandwidth of the device's memory.
      link_bytes_per_s: one way, between a node's GPUs (NVLink) or over all links of a TPU (ICI).
      network_bytes_per_s: one way and per GPU, between nodes; None for a TPU.
    """

    name: str
    model: str
    kind: Literal["gpu", "tpu", "cpu"]
    count: int
    topology: str = ""
    description: str = "CPU"
    memory_bytes: int | None = None
    flops: float | None = None
    memory_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None


def parse(text: str) -> Target:
    """Reads a target such as `h100:8`, `a100-80g:64`, `v5p:2x2x2` or `cpu:8`.

    Arguments:
      text: a model, a colon, and for GPUs and CPU a number (up to 8 GPUs, or a multiple of 8, in
          nodes of 8), for TPUs a topology with as many dimensions as the model's torus has.

    Returns:
      The target. No device is touched.

    Raises:
      JzeroError: an unknown model, or a number or topology that cannot be.

    >>> parse("h100:16").topology, parse("v5p:2x2x2").count
    ('1x2x8', 8)
    """
    model, colon, size = text.strip().lower().partition(":")
    if model == "cpu":
        return Target(f"cpu:{size}", model, "cpu", _number(text, size))
    if model in _figures("gpu"):
        count = _number(text, size)
        if count > NODE and count % NODE:
            low = count // NODE * NODE
            raise JzeroError(
                f"target {text!r}: GPUs come in nodes of {NODE}, so above {NODE} their number must "
                f"be a multiple of {NODE}: {model}:{low} or {model}:{low + NODE}"
            )
        figures = _figures("gpu")[model]
        return Target(
            f"{model}:{count}",
            model,
            "gpu",
            count,
            topology=f"1x{max(1, count // NODE)}x{min(count, NODE)}",
            link_bytes_per_s=figures["nvlink_bytes_per_s"],
            network_bytes_per_s=figures["network_bytes_per_s"],
            **_common(figures),
        )
    if model in _figures("tpu"):
        figures = _figures("tpu")[model]
        dims = size.split("x")
        if len(dims) != figures["torus_dims"] or not all(_positive(dim) for dim in dims):
            example = "x".join(["2"] * figures["torus_dims"])
            raise JzeroError(
                f"target {text!r}: a {model} topology has {figures['torus_dims']} dimensions, "
                f"as in {model}:{example}"
            )
        return Target(
            f"{model}:{size}",
            model,
            "tpu",
            math.prod(int(dim) for dim in dims),
            topology=f"{model}:{size}",
            link_bytes_per_s=figures["ici_bytes_per_s"],
            **_common(figures),
        )
    if model == HERE:
        raise JzeroError(f"target {text!r}: only `jzero compare` looks at the devices present")
    known = ", ".join(["cpu", *_figures("gpu"), *_figures("tpu")])
    hint = "" if colon else "; a target is a model and a size, as in h100:8"
    raise JzeroError(f"target {text!r}: unknown accelerator {model!r}, known are {known}{hint}")


def environment(target: Target) -> dict[str, str]:
    """Environment variables that a process needs before it imports JAX to compile for a target.

    Arguments:
      target: from `parse`.

    Returns:
      Variables to set; for CPU, `XLA_FLAGS` with this process's own flags in front.
    """
    variables = {"JAX_PLATFORMS": "cpu"}
    if target.kind == "tpu":
        variables |= _tpu_variables(target)
    if target.kind == "cpu":
        count = f"--xla_force_host_platform_device_count={target.count}"
        variables["XLA_FLAGS"] = " ".join(
            [os.environ.get("XLA_FLAGS", ""), count, *_SWITCHES]
        ).strip()
    return variables


def devices(target: Target) -> list[Any]:
    """JAX devices to build a mesh from: compile-only for a GPU or TPU target, real ones for CPU.

    Arguments:
      target: from `parse`. Start the process with `environment(target)` set.

    Returns:
      As many devices as the target has, in order; a GPU node's stand side by side.

    Raises:
      JzeroError: the compiler's plugin is not installed or not usable, or there are fewer CPU
          devices than asked for.
    """
    if target.kind == "cpu":
        return _cpu(target)
    if target.kind == "gpu":
        return _described(
            target, "cuda", target_config=_gpu_config(target.model), topology=target.topology
        )
    for name, value in _tpu_variables(target).items():
        # libtpu leaves a warning as the value where it looked for a TPU host in vain.
        if os.environ.get(name, "WARNING").startswith("WARNING"):
            os.environ[name] = value
    return _described(target, "tpu")


def _cpu(target: Target) -> list[Any]:
    found = jax.devices("cpu")
    if len(found) < target.count:
        raise JzeroError(
            f"target {target.name!r}: this process has {len(found)} CPU device(s); start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={target.count}"
        )
    return found[: target.count]


def _described(target: Target, platform: str, **options: str) -> list[Any]:
    if not plugin_installed(target.kind):
        raise JzeroError(
            f"target {target.name!r} needs XLA's {target.kind.upper()} compiler, which is not "
            f"installed: {_INSTALL}"
        )
    name = target.topology if platform == "tpu" else target.name
    try:
        return list(topologies.get_topology_desc(name, platform=platform, **options).devices)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        hint = (
            ""
            if jax.config.jax_platforms == "cpu"  # pyright: ignore[reportAttributeAccessIssue]
            else "; start the process with JAX_PLATFORMS=cpu"
        )
        raise JzeroError(
            f"target {target.name!r}: the {target.kind.upper()} compiler gives no devices: "
            f"{reason}{hint}"
        ) from error


def plugin_installed(kind: Literal["gpu", "tpu", "cpu"]) -> bool:
    """Whether the compiler for a kind of target is installed; nothing is loaded.

    Arguments:
      kind: a target's kind; XLA:CPU is always there.

    Returns:
      True where `devices` finds its plugin.
    """
    try:
        modules = _PLUGINS[kind]
        return not modules or any(importlib.util.find_spec(module) for module in modules)
    except ModuleNotFoundError:  # jax_plugins itself is missing
        return False


def _gpu_config(model: str) -> str:
    """A GpuTargetConfigProto (xla/stream_executor/device_description.proto) in text form."""
    figures = _figures("gpu")[model]
    shared = json.loads(_text("gpu"))["_common"]
    fields = figures | shared
    major, minor = figures["compute_capability"]
    dnn_major, dnn_minor = shared["dnn_version_info"]
    lines = "\n".join(f"  {name}: {value}" for name, value in fields.items() if name not in _OTHER)
    return (
        f"gpu_device_info {{\n"
        f"  cuda_compute_capability {{ major: {major} minor: {minor} }}\n{lines}\n}}\n"
        f'platform_name: "{shared["platform_name"]}"\n'
        f"dnn_version_info {{ major: {dnn_major} minor: {dnn_minor} }}\n"
        f'device_description_str: "{figures["name"]}"\n'
    )


def _tpu_variables(target: Target) -> dict[str, str]:
    prefix, cores = _ACCELERATOR_TYPE[target.model]
    return {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing runs, so processes need not take turns
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": f"{prefix}-{target.count * cores}",
    }


def _common(figures: dict[str, Any]) -> dict[str, Any]:
    return {
        "description": figures["name"],
        "memory_bytes": figures["device_memory_size"],
        "flops": figures["bf16_flops"],
        "memory_bytes_per_s": figures["memory_bandwidth"],
    }


def _number(text: str, size: str) -> int:
    if not _positive(size):
        raise JzeroError(
            f"target {text!r}: {size!r} is not a number of devices; write one, as in h100:8"
        )
    return int(size)


def _positive(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


@functools.cache
def _text(kind: str) -> str:
    return (importlib.resources.files("jzero") / "data" / f"{kind}.json").read_text(
        encoding="utf-8"
    )


@functools.cache
def _figures(kind: str) -> dict[str, dict[str, Any]]:
    return {
        name: figures
        for name, figures in json.loads(_text(kind)).items()
        if not name.startswith("_")
    }
