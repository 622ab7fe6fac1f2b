"""What a compiled program needs of one device's memory, from the compiler's own analysis."""

from dataclasses import dataclass

import jax
from jax.stages import Compiled

from jzero.errors import JzeroError


@dataclass(frozen=True)
class Memory:
    """Bytes on one device; `host_bytes` lie in its host's memory instead.

    Attributes:
      argument_bytes: inputs on the device.
      output_bytes: outputs, donated buffers that they reuse included.
      temp_bytes: what the program needs besides inputs and outputs.
      alias_bytes: output bytes that lie in donated inputs.
      peak_bytes: the most in use at once, inputs and outputs included.
      host_bytes: inputs, outputs and temporaries that live in host memory, aliases once.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    peak_bytes: int
    host_bytes: int


def memory(compiled: Compiled) -> Memory:
    """Reads the memory analysis of a compiled function.

    On CPU the compiler's peak leaves temporaries out, so there the peak is
    argument + output + temp - alias. On GPU and TPU it counts host memory in, so a program that
    uses host memory is given that same sum where it is smaller.

    Arguments:
      compiled: `jit(f).lower(...).compile()`, for devices present or compile-only.

    Returns:
      The figures, in bytes for one device.

    Raises:
      JzeroError: the backend gives no memory analysis.
    """
    stats = compiled.memory_analysis()
    if stats is None:
        raise JzeroError("this backend gives no memory analysis of a compiled program")
    argument, output = stats.argument_size_in_bytes, stats.output_size_in_bytes
    temp, alias = stats.temp_size_in_bytes, stats.alias_size_in_bytes
    peak = stats.peak_memory_in_bytes
    total = argument + output + temp - alias
    host = (
        stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        + stats.host_temp_size_in_bytes
        - stats.host_alias_size_in_bytes
    )
    if _platform(compiled) == "cpu" or not peak:
        peak = total
    elif host:
        peak = min(peak, total)
    return Memory(argument, output, temp, alias, peak, host)


def _platform(compiled: Compiled) -> str | None:
    # The default backend says nothing here: a compile-only program is built under another one.
    for sharding in jax.tree.leaves((compiled.output_shardings, compiled.input_shardings)):
        for device in sharding.device_set:
            return device.platform
    return None
