"""Going on with a run: from which checkpoint, and whether this is the same run."""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from data import Corpus

from jzero.checkpoint import DamagedCheckpoint
from jzero.checkpoint.checkpointer import Checkpointer
from jzero.checkpoint.restore import Restored
from jzero.config import Config
from jzero.errors import JzeroError

LAST = 0  # in the place of a step: the last one that there is


def identity(model: str, corpus: Corpus, rows: int) -> dict[str, Any]:
    """What two parts of one run share: the option or the key that decides it -> its value.

    The stage, the number of devices and how rows are split among them may change: they leave the
    numbers alone.
    """
    text = f"{len(corpus.train)} tokens with checksum {zlib.crc32(corpus.train.data):08x}"
    return {"--model": model, "--data": text, "train_batch_size": rows}


def resume(
    checkpoints: Checkpointer,
    step: int,
    run: Mapping[str, Any],
    config: Config,
    steps: int,
    say: Callable[[str], None],
) -> Restored | None:
    """The state and the position to go on from; None where the run starts afresh.

    Arguments:
        checkpoints: of the run.
        step: of which checkpoint, or `LAST`. Later ones are set aside.
        run: this run's `identity`.
        config: this run's configuration; what changed in it is said.
        steps: where this run is to end.
        say: prints a line.

    Raises:
        JzeroError: a damaged checkpoint, one of another run, or no such step.
    """
    try:
        saved = checkpoints.manifest(None if step == LAST else step)
    except DamagedCheckpoint as error:
        if error.before is None:
            raise
        raise JzeroError(f"{error}; --resume {error.before} does both") from None
    if saved is None:
        say(f"No checkpoint in {checkpoints.folder}: starting afresh")
        return None
    where = f"the checkpoint of step {saved.step} in {checkpoints.folder}"
    position = saved.facts.data[0]
    if not isinstance(position, dict) or not isinstance(position.get("run"), dict):
        raise JzeroError(f"{where} is not one that this script has saved")
    for key, value in run.items():
        found = position["run"].get(key)
        if found != value:
            raise JzeroError(
                f"{key}: {where} was saved with {found}, and this run has {value}: give the same, "
                "or start another run in a folder of its own"
            )
    if saved.step > steps:
        raise JzeroError(f"--steps {steps}: {where} is past that already")
    restored = checkpoints.restore(saved.step)
    aside = checkpoints.set_aside(after=saved.step)
    if aside is not None:
        say(f"Later checkpoints are in {aside} now")
    facts = saved.facts
    say(f"Going on from step {saved.step} (stage {facts.stage}, devices: {facts.devices})")
    for line in changes(facts.config or {}, config.resolved()):
        say(f"Changed since: {line}")
    return restored


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key of a configuration whose value is another one now."""
    before, after = dict(flatten(old)), dict(flatten(new))
    for key in dict.fromkeys([*before, *after]):
        if before.get(key) != after.get(key):
            yield f"{key}: {json.dumps(after.get(key))}, was {json.dumps(before.get(key))}"


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
