"""Which leaves of a state come from a checkpoint, and which from elsewhere."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from jzero.checkpoint.differences import differences, refusal
from jzero.checkpoint.entries import PARTS, Entry
from jzero.checkpoint.manifest import Manifest
from jzero.errors import JzeroError

SCALE = "progress/scale/"


@dataclass(frozen=True)
class RestoreReport:
    """Where each leaf of a restored state comes from.

    Attributes:
      taken: names of the leaves from the checkpoint.
      from_base: name -> why it comes from `base`.
      from_config: name -> why it is as the configuration says; "" where it is in both runs.
      unused: name -> why a leaf of the checkpoint is not taken, of the parts asked for.
    """

    taken: tuple[str, ...]
    from_base: Mapping[str, str]
    from_config: Mapping[str, str]
    unused: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{len(self.taken)} leaves from the checkpoint"]
        for where, leaves in (
            ("from base", self.from_base),
            ("from the configuration", self.from_config),
            ("not taken", self.unused),
        ):
            lines += [f"{name}: {where}, {why}" for name, why in leaves.items() if why]
        return "\n".join(lines)


def choose(
    folder: Path,
    saved: Manifest,
    wanted: Mapping[str, Entry],
    parts: Collection[str],
    *,
    dynamic_loss_scale: bool,
    has_base: bool,
    strict: bool,
) -> RestoreReport:
    """Decides where each leaf comes from.

    Arguments:
      folder: the step folder, for messages.
      saved: its manifest.
      wanted: name -> leaf of the state that is to be made.
      parts: which parts to take from the checkpoint.
      dynamic_loss_scale: whether the state's loss scale follows overflows. It is taken only from a
        run whose did: otherwise it is no counter but a setting.
      has_base: whether there is a state for the rest.
      strict: whether a leaf that differs is an error.

    Raises:
      JzeroError: leaves that differ; a base that is needed and missing; a part that is none.
    """
    unknown = set(parts) - set(PARTS)
    if unknown:
        raise JzeroError(f"parts: {sorted(unknown)[0]!r} is none of {', '.join(PARTS)}")
    found = differences(saved.leaves, wanted, parts)
    from_config, from_base, unused = {}, {}, {}
    before = saved.facts.dynamic_loss_scale
    if "progress" in parts and not (dynamic_loss_scale and before):
        settings = [name for name in (*wanted, *saved.leaves) if name.startswith(SCALE)]
        found = {name: x for name, x in found.items() if name not in settings}
        why = "the loss scale was dynamic in the saved run" if before else ""
        if dynamic_loss_scale:
            why = "the loss scale is dynamic only now"
        from_config = dict.fromkeys((name for name in settings if name in wanted), why)
    for name, entry in wanted.items():
        if entry.part not in parts:
            from_base[name] = "not among the parts asked for"
        elif name in found and saved.facts.trainable_only and not entry.trained:
            if found[name].saved is None:
                from_base[name] = "not trained, and left out of the checkpoint"
                del found[name]
    if found and strict:
        raise refusal(str(folder), list(found.values()))
    for name, difference in found.items():
        (unused if difference.expected is None else from_base)[name] = str(difference)
    if from_base and not has_base:
        name, why = next(iter(from_base.items()))
        raise JzeroError(
            f"{folder}: {len(from_base)} leaves are not taken from it ({name}: {why}); give "
            f"base=zero.init(...), where they come from"
        )
    taken = tuple(name for name in wanted if name not in from_base and name not in from_config)
    return RestoreReport(taken, from_base, from_config, unused)
