"""What a checkpoint says of the run that wrote it."""

import json
import reprlib
from collections.abc import Iterable
from typing import Any

from jzero.checkpoint.manifest import Facts
from jzero.errors import JzeroError
from jzero.setup import Setup
from jzero.state import State


def facts_of(
    setup: Setup, state: State, *, data: Any = None, trainable_only: bool = False
) -> Facts:
    """What a checkpoint of this state says of its run. Waits for the state.

    Arguments:
      setup: as the state is laid out.
      state: the state that is saved.
      data: this process's position in the data, as `as_json` gives it.
      trainable_only: whether parameters that are not trained are left out.
    """
    return Facts(
        stage=setup.config.stage,
        devices=setup.mesh.storage.size,
        mesh=dict(setup.mesh.storage.shape),
        config=setup.config.resolved(),
        dynamic_loss_scale=setup.scaling.dynamic,
        applied_steps=int(state.step) - int(state.skipped),
        trainable_only=trainable_only,
        data=(data,),
    )


def as_json(data: Any) -> Any:
    """A copy of a position in the data, as JSON gives it back.

    Raises:
      JzeroError: it would come back as something else; naming the first value that does.
    """
    copy = _copy(data)
    if copy is not _NONE:
        return copy
    try:
        fault = _fault(data, "") or "it changes"
    except RecursionError:
        fault = "it is nested too deeply"
    raise JzeroError(
        f"the position in the data would not come back from JSON as it is: {fault}; give "
        f"numbers, texts, lists, and dicts with texts as keys"
    )


_NONE = object()


def _copy(value: Any) -> Any:
    """The value as JSON gives it back; `_NONE` where that is something else."""
    try:
        copy = json.loads(json.dumps(value, allow_nan=False))
        return copy if copy == value else _NONE
    except (TypeError, ValueError, RecursionError):
        return _NONE


def _fault(value: Any, path: str) -> str | None:
    """The first value that JSON does not give back, and what it is; None where there is none."""
    inside: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"{path or 'it'} has the key {reprlib.repr(key)}"
        inside = ((f"{path}.{key}" if path else key, x) for key, x in value.items())
    elif isinstance(value, list):
        inside = ((f"{path}[{i}]", x) for i, x in enumerate(value))
    elif _copy(value) is not _NONE:
        return None
    elif isinstance(value, float):
        return f"{path or 'it'} is {value}"
    elif isinstance(value, int):
        return f"{path or 'it'} is a number of {value.bit_length()} bits"
    else:
        kind = type(value)
        module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
        return f"{path or 'it'} is a {module}{kind.__qualname__}"
    return next((fault for at, x in inside if (fault := _fault(x, at))), None)
