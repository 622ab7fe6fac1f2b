"""The XLA options that hide a step's traffic behind its computation, per platform, in one place.

XLA takes an option for one program (`jax.jit(..., compiler_options=...)`) or for the whole process
(`XLA_FLAGS`, read once, before JAX starts a backend). Which ones it takes per program differs by
version, so the running JAX is asked. A flag that the user's own `XLA_FLAGS` names is left alone.
"""

import functools
import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jzero.layout import Layout

log = logging.getLogger("jzero")

Value = bool | str  # as JAX takes them

_COMBINE = 31_457_287
"""XLA:GPU's own threshold, in bytes; a preset never combines less."""

_UNROLLED: Mapping[str, Value] = {
    "xla_gpu_enable_analytical_latency_estimator": True,
    "xla_gpu_dot_merger_threshold_mb": "0",
    "xla_gpu_reduce_scatter_combine_threshold_bytes": str(1 << 20),
}
"""Of unrolled layers: no merged products, and no more than 1 MiB of shards combined."""


@dataclass(frozen=True)
class Layers:
    """A step's layers, as far as presets differ.

    Attributes:
      scanned: bytes of the largest layer of a scan as it is gathered, 0 where there is no scan to
        prefetch in; see `layer_bytes`.
      unrolled: whether unrolled layers are gathered ahead of their use.
    """

    scanned: int = 0
    unrolled: bool = False


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
    def line(self) -> str:
        """What to set in the environment for those that need it; "" where none does."""
        return f'XLA_FLAGS="{" ".join(as_flags(self.per_process))}"' if self.per_process else ""


def preset(platform: str, layers: Layers) -> dict[str, Value]:
    """The options for a platform, whichever way they are given.

    On a GPU, for a layer scan: collectives are prefetched across its iterations, and those of one
    layer are combined into one. So a layer's gather runs while the layer before it computes, and
    one more layer is held in memory.

    Unrolled layers hide each collective behind a product of their own. XLA has a second estimate of
    how long collectives take, which spreads them so. Of reduce-scatters it combines only the small
    ones: what waits for a whole layer's gradients ends up behind nothing. Products that share an
    input, as those for keys and values, are not merged: that one would wait for both weights.

    XLA:TPU and XLA:CPU are left as they are.

    Arguments:
      platform: "gpu" ("cuda"), "tpu" or "cpu".
      layers: of the step.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    if not layers.scanned:
        return dict(_UNROLLED) if layers.unrolled else {}
    combine = str(max(_COMBINE, math.ceil(layers.scanned * 1.05)))
    wanted: dict[str, Value] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_all_gather_combine_threshold_bytes": combine,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": combine,
    }
    if jax.__version_info__ >= (0, 11):
        # Its estimates there end stage 2's reduce-scatter before any product has started.
        wanted["xla_gpu_enable_analytical_sol_latency_estimator"] = False
    return wanted


def options(platform: str, layers: Layers) -> Options:
    """The preset without what the user's XLA_FLAGS already decide, split by how JAX takes it."""
    given = named(in_effect())
    wanted = {k: v for k, v in preset(platform, layers).items() if k not in given}
    taken = {name: value for name, value in wanted.items() if is_taken(name)}
    return Options(taken, {k: v for k, v in wanted.items() if k not in taken})


def compiler_options(platform: str, layers: Layers) -> dict[str, Value]:
    """The options for `jax.jit(..., compiler_options=...)`; {} where there are none.

    Those that the running JAX takes in XLA_FLAGS alone are named in a log message, with the line.
    """
    found = options(platform, layers)
    if found.line:
        log.info(
            "this JAX (%s) takes some options that hide traffic in the environment alone, set "
            "before it starts: %s",
            jax.__version__,
            found.line,
        )
    return dict(found.per_program)


def layer_bytes(layout: Layout) -> int:
    """Bytes of a scan's largest layer as it is gathered or its gradients are reduced, on a device.

    0 for a model without a scan over layers.
    """
    policy = layout.policy
    width = max(jnp.dtype(policy.compute).itemsize, jnp.dtype(policy.communication).itemsize)
    stacks: dict[tuple[int, ...], int] = {}  # by the scan's length: a stack has leaves of any name
    for leaf in layout.leaves.values():
        array = leaf.array
        if not array.layer_axes:
            continue
        length = tuple(array.shape[axis] for axis in array.layer_axes)
        size = width * array.layer_size // layout.other_shards(leaf)
        stacks[length] = stacks.get(length, 0) + size
    return max(stacks.values(), default=0)


def in_effect() -> list[str]:
    """The flags in this process's XLA_FLAGS."""
    return os.environ.get("XLA_FLAGS", "").split()


def as_flags(wanted: Mapping[str, Value]) -> list[str]:
    """
    >>> as_flags({"xla_a": True, "xla_b": "5"})
    ['--xla_a=true', '--xla_b=5']
    """
    return [f"--{name}={str(value).lower()}" for name, value in wanted.items()]


def named(flags: Iterable[str]) -> set[str]:
    """
    >>> named(["--xla_a=true"])
    {'xla_a'}
    """
    return {flag.lstrip("-").partition("=")[0] for flag in flags}


@functools.cache
def is_taken(name: str) -> bool:
    """Whether the running JAX takes an option per program: asked with the smallest of programs.

    Options are checked before a backend sees them, so XLA:CPU answers for all where it is there.
    """
    try:
        device: Any = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        device = jax.local_devices()[0]
    value = (preset("gpu", Layers(scanned=1)) | preset("gpu", Layers(unrolled=True)))[name]
    with jax.set_mesh(Mesh(np.array([device]), ("alone",))):  # whichever mesh the user has set
        empty = jax.jit(lambda: jnp.zeros(())).lower()
    try:
        empty.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" in str(error):
            return False
        raise
    return True
