"""The devices that are really there, as a target: all of them, `here`, or the first N, `here:N`."""

import os
from collections.abc import Iterable
from typing import Any

import jax

from jzero.errors import JzeroError
from jzero.plan.fit import JAX_FRACTION
from jzero.targets import HERE, Target


def is_here(text: str) -> bool:
    """Whether a target's name asks for the devices present; none is touched.

    Raises:
      JzeroError: it does, but for a number that cannot be.

    >>> is_here("here"), is_here("here:2"), is_here("h100:8")
    (True, True, False)
    """
    name, colon, number = text.strip().lower().partition(":")
    if name != HERE:
        return False
    if colon and not (number.isascii() and number.isdigit() and int(number) > 0):
        raise JzeroError(
            f"target {text!r}: {number!r} is not a number of devices; write here for all of them "
            f"or here:2 for two"
        )
    return True


def present(text: str) -> tuple[Target, list[Any]]:
    """The devices of this process.

    Arguments:
      text: `here` or `here:N`, as `is_here` takes it.

    Returns:
      The target, and its JAX devices.

    Raises:
      JzeroError: no backend starts, there are fewer devices than asked for, or they belong to
        several processes.
    """
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where a plugin does not load
        reason = str(error) or f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS', '')}"
        raise JzeroError(
            f"target {text!r}: JAX finds no devices: {reason.splitlines()[0]}"
        ) from error
    if jax.process_count() > 1:
        raise JzeroError(
            f"target {text!r}: the devices belong to {jax.process_count()} processes, and compare "
            f"runs in one; compile for as many with a target such as h100:16"
        )
    _, colon, number = text.partition(":")
    if colon and int(number) > len(devices):
        raise JzeroError(
            f"target {text!r}: there are {len(devices)} devices ({devices[0].device_kind}); write "
            f"here for all of them"
        )
    devices = devices[: int(number)] if colon else devices
    first = devices[0]
    where = "" if first.device_kind == first.platform else f", {first.platform}"
    return Target(
        name=text.strip().lower(),
        model=HERE,
        kind=first.platform,
        count=len(devices),
        description=f"{len(devices)} x {first.device_kind}{where}",
        memory_bytes=capacity(first),
    ), devices


def capacity(device: Any) -> int | None:
    """A device's memory; None where it does not tell, as a CPU."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None or device.platform != "gpu":
        return limit
    # Of a GPU's memory the allocator has a share, and tells that.
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    given = next((os.environ[name] for name in names if os.environ.get(name)), JAX_FRACTION)
    return round(limit / float(given))


def peak(devices: Iterable[Any]) -> int | None:
    """The most memory in use at once since the process began, on the fullest of some devices.

    None where a device does not tell, as a CPU.
    """
    told = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    found = [each for each in told if each is not None]
    return max(found) if len(found) == len(told) else None
