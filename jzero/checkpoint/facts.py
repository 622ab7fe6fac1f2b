"""What a checkpoint says of the run that wrote it."""

import json
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
      data: this process's position in the data, anything that JSON has.
      trainable_only: whether parameters that are not trained are left out.

    Raises:
      JzeroError: a position that JSON would not give back as it is.
    """
    return Facts(
        stage=setup.config.stage,
        devices=setup.mesh.storage.size,
        mesh=dict(setup.mesh.storage.shape),
        config=setup.config.resolved(),
        dynamic_loss_scale=setup.scaling.dynamic,
        applied_steps=int(state.step) - int(state.skipped),
        trainable_only=trainable_only,
        data=(as_json(data),),
    )


def as_json(data: Any) -> Any:
    """A copy of a position in the data, as JSON gives it back.

    Raises:
      JzeroError: it would come back as something else.
    """
    try:
        copy = json.loads(json.dumps(data, allow_nan=False))
        if copy == data:
            return copy
    except (TypeError, ValueError):
        pass
    raise JzeroError(
        f"the position in the data, {data!r:.200}, would not come back from JSON as it is; give "
        f"numbers, texts, lists, and dicts with texts as keys"
    )
