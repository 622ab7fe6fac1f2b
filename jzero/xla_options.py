"""The XLA options that hide a step's traffic behind its computation, per platform, in one place.

XLA takes an option for one program (`jax.jit(..., compiler_options=...)`) or for the whole process
(`XLA_FLAGS`, read once, before JAX starts a backend). Which ones it takes per program differs by
version, so the running JAX is asked. A flag that the user's own `XLA_FLAGS` names is left alone.
"""

import functools
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jzero.layout import Layout

log = logging.getLogger("jzero")

Value = bool | int

_COMBINE = 31_457_287
"""XLA:GPU's own threshold, in bytes; a preset never combines less."""


@dataclass(frozen=True)
class Options:
    """A preset, split by how the running JAX takes it.

    Attributes:
      per_program: for `compiler_options`.
      per_process: those that it takes in XLA_FLAGS alone.
    """

    per_program: Mapping[str, Value]
    per_process: Mapping[str, Value]

    @property
    def flags(self) -> list[str]:
        """All of them as they would stand in XLA_FLAGS."""
        return as_flags({**self.per_program, **self.per_process})

    @property
    def line(self) -> str:
        """What to set in the environment for those that need it; "" where none does."""
        return f'XLA_FLAGS="{" ".join(as_flags(self.per_process))}"' if self.per_process else ""


def preset(platform: str, layer_bytes: int = 0) -> dict[str, Value]:
    """The options for a platform, whichever way they are given.

    On a GPU: collectives are prefetched across the iterations of a layer scan, and those of one
    layer are combined into one. With them a layer's gather runs while the layer before it computes,
    and one more layer is held in memory. XLA:TPU and XLA:CPU are left as they are.

    Arguments:
      platform: "gpu" ("cuda"), "tpu" or "cpu".
      layer_bytes: of the largest layer as it is gathered; see `layer_bytes`.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    combine = max(_COMBINE, math.ceil(layer_bytes * 1.05))
    return {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_all_gather_combine_threshold_bytes": combine,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": combine,
    }


def options(platform: str, layer_bytes: int = 0) -> Options:
    """The preset without what the user's XLA_FLAGS already decide, split by how JAX takes it."""
    given = named(os.environ.get("XLA_FLAGS", ""))
    wanted = {k: v for k, v in preset(platform, layer_bytes).items() if k not in given}
    taken = {name: value for name, value in wanted.items() if is_taken(name)}
    return Options(taken, {k: v for k, v in wanted.items() if k not in taken})


def compiler_options(platform: str, layer_bytes: int = 0) -> dict[str, Value]:
    """The options for `jax.jit(..., compiler_options=...)`; {} where there are none.

    Those that the running JAX takes in XLA_FLAGS alone are named in a log message, with the line.
    """
    found = options(platform, layer_bytes)
    if found.line:
        log.info(
            "this JAX (%s) takes some options that hide traffic in the environment alone, set "
            "before it starts: %s",
            jax.__version__,
            found.line,
        )
    return dict(found.per_program)


def layer_bytes(layout: Layout) -> int:
    """Bytes of the largest layer as it is gathered or its gradients are reduced, on one device.

    A layer is one of a scanned stack, or an entry of a list; where there are none, the largest
    leaf.
    """
    policy = layout.policy
    width = max(jnp.dtype(policy.compute).itemsize, jnp.dtype(policy.communication).itemsize)
    layers: dict[str, int] = {}
    singles = [0]
    for path, leaf in layout.leaves.items():
        others = [a for axes in leaf.array.other_axes for a in axes]
        share = math.prod(layout.mesh.storage.shape[a] for a in others)
        size = width * leaf.array.layer_size // share
        stack = _stack(path, leaf.array.layer_axes, leaf.array.shape)
        if stack is None:
            singles.append(size)
        else:
            layers[stack] = layers.get(stack, 0) + size
    return max(layers.values() if layers else singles)


def as_flags(wanted: Mapping[str, Value]) -> list[str]:
    """
    >>> as_flags({"xla_a": True, "xla_b": 5})
    ['--xla_a=true', '--xla_b=5']
    """
    return [f"--{name}={str(value).lower()}" for name, value in wanted.items()]


def named(flags: str) -> set[str]:
    """The names of the flags in a value of XLA_FLAGS."""
    return {flag.lstrip("-").partition("=")[0] for flag in flags.split() if flag.startswith("--")}


@functools.cache
def is_taken(name: str) -> bool:
    """Whether the running JAX takes an option per program: asked with the smallest of programs.

    Options are checked before a backend sees them, so XLA:CPU answers for all where it is there.
    """
    try:
        device: Any = jax.devices("cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    value = preset("gpu")[name]
    sharding = jax.sharding.SingleDeviceSharding(device)
    empty = jax.jit(lambda: jnp.zeros(()), out_shardings=sharding).lower()
    try:
        empty.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True


def _stack(path: str, axes: tuple[int, ...], shape: tuple[int, ...]) -> str | None:
    names = path.split("/")
    for depth, name in enumerate(names):
        if name.isdigit():  # an entry of a list of layers
            return "/".join(names[: depth + 1])
    return f"{names[0]} x {[shape[axis] for axis in axes]}" if axes else None
