"""What is to be compiled: one workload, one target, one stage."""

from dataclasses import asdict, dataclass
from typing import Any

from jzero.errors import JzeroError
from jzero.targets import Target

Axes = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Request:
    """One program to compile.

    Attributes:
      model: `FILE.py:FACTORY`.
      target: a target's name; `here` for the devices present, where the step also runs.
      stage: 0 to 3.
      mesh, replicas: of the mesh over the target's devices, see `mesh_axes`.
      micro_batch, accumulate: instead of the workload's configuration's; None leaves them.
      prefetch: elements that stage 3 may gather ahead, instead of the configuration's; None
        leaves them.
      dump: where to write the compiled module's text; None for nowhere.
      flags: XLA options that the process was started with, for models with a layer scan.
    """

    model: str
    target: str
    stage: int
    mesh: Axes | None = None
    replicas: int | None = None
    micro_batch: int | None = None
    accumulate: int | None = None
    prefetch: int | None = None
    dump: str | None = None
    flags: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "Request":
        mesh = data["mesh"] and tuple((name, size) for name, size in data["mesh"])
        return Request(**{**data, "mesh": mesh, "flags": tuple(data["flags"])})


def mesh_axes(target: Target, mesh: Axes | None, replicas: int | None) -> Axes:
    """The axes of the mesh over a target's devices.

    Arguments:
      target: the devices.
      mesh: axes and sizes as the user gave them; None for one axis `data`.
      replicas: devices over which the shards repeat, as an axis `replica` before the others.

    Raises:
      JzeroError: sizes that do not make the target's number of devices.

    >>> from jzero.targets import parse
    >>> mesh_axes(parse("h100:16"), None, 2)
    (('replica', 2), ('data', 8))
    """
    count, repeat = target.count, replicas or 1
    if mesh is None:
        if count % repeat:
            raise JzeroError(
                f"--replicas {repeat}: does not divide the {count} devices of {target.name}"
            )
        mesh = (("data", count // repeat),)
    elif replicas is not None and "replica" in dict(mesh):
        raise JzeroError("--replicas: --mesh has an axis replica already; give one of them")
    axes = mesh if replicas is None else (("replica", repeat), *mesh)
    product = 1
    for _, size in axes:
        product *= size
    if product != count:
        made = " x ".join(f"{name}={size}" for name, size in axes)
        raise JzeroError(
            f"--mesh: {made} makes {product} devices, but {target.name} has {count}; give sizes "
            f"whose product is {count}"
        )
    return axes
