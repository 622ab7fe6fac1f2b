"""Keywords of `load`: each writes one key, over what a file says or "auto" in it."""

import difflib
from collections.abc import Iterator
from typing import Any

from pydantic_core import PydanticCustomError

from jzero.config import keys
from jzero.config.document import Document
from jzero.config.draft import MISSING, Draft
from jzero.config.retired import ALIASES, ZERO
from jzero.config.values import read_dtype
from jzero.errors import ConfigError

PATHS = {
    "stage": f"{ZERO}.stage",
    "train_batch_size": "train_batch_size",
    "micro_batch_size": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "communication_dtype": "communication_data_type",
    "accumulation_dtype": "data_types.grad_accum_dtype",
    "persistence_threshold": f"{ZERO}.stage3_param_persistence_threshold",
    "shard_size": f"{ZERO}.mics_shard_size",
    "prefetch_elements": f"{ZERO}.stage3_prefetch_bucket_size",
    "live_elements": f"{ZERO}.stage3_max_live_parameters",
    "keep_gathered": "jzero.keep_gathered",
    "loss_scale": "fp16.loss_scale",
}
OPTIMIZER = ("learning_rate", "betas", "eps", "weight_decay")
SCHEDULER = ("total_num_steps", "warmup_num_steps")
KEYWORDS = (*PATHS, "precision", *OPTIMIZER, *SCHEDULER)

# The same by the keys' own names in a file: `gradient_accumulation_steps` is `accumulation`.
KEY_PATHS = {
    path.split(".")[-1]: target
    for target in PATHS.values()
    for path in (target, *(old for old, new in ALIASES.items() if new == target))
}

# What other libraries call these -> what to use.
OTHER_NAMES = {
    **dict.fromkeys(
        ("dtype", "param_dtype", "mixed_precision", "bf16", "bfloat16"), 'precision="bf16"'
    ),
    **dict.fromkeys(("fp16", "float16"), 'precision="fp16" (or "bf16")'),
    "lr": "learning_rate",
    **dict.fromkeys(("max_grad_norm", "clip", "clip_grad", "grad_clip"), "gradient_clipping"),
    **dict.fromkeys(("grad_accum", "accumulation_steps"), "accumulation"),
    "reshard_after_forward": "keep_gathered (its opposite)",
    "reduce_dtype": "communication_dtype",
    "zero_stage": "stage",
    "batch_size": "train_batch_size (of all devices) or micro_batch_size (of one)",
}

# Keys that may be "auto" -> the keyword that then has to say what they are.
AUTO_KEYWORDS = {
    "gradient_clipping": "gradient_clipping",
    "communication_data_type": "communication_dtype",
    "data_types.grad_accum_dtype": "accumulation_dtype",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "fp16.loss_scale": "loss_scale",
    f"{ZERO}.stage": "stage",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.muon_lr": "learning_rate",
    "optimizer.params.adam_lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.total_num_steps": "total_num_steps",
    "scheduler.params.warmup_num_steps": "warmup_num_steps",
}
# "auto" is the same as leaving them out: they follow from the others.
AUTO_UNSET = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)
# Elsewhere these are derived from a model's width; here their default serves.
AUTO_DEFAULT = (
    f"{ZERO}.reduce_bucket_size",
    f"{ZERO}.allgather_bucket_size",
    f"{ZERO}.sub_group_size",
    f"{ZERO}.stage3_prefetch_bucket_size",
    f"{ZERO}.stage3_param_persistence_threshold",
    f"{ZERO}.stage3_max_live_parameters",
    f"{ZERO}.stage3_max_reuse_distance",
    "scheduler.params.warmup_min_lr",
)
AUTO_ALLOWED = ("pipeline.stages",)


def nearest(name: str, known: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str | None:
    """The known name most like a misspelt one, None if nothing is like it."""
    lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(name.lower(), list(lower), n=1, cutoff=cutoff)
    return lower[found[0]] if found else None


def _unknown(name: str) -> ConfigError:
    """What to say of a keyword that does not exist."""
    places = [path for path, _ in keys.walk(Document) if path.split(".")[-1] == name]
    if name in OTHER_NAMES:
        hint = f"use {OTHER_NAMES[name]}"
    elif 0 < len(places) <= 3:
        hint = f"it is a key of the configuration: {' or '.join(places)}"
    elif close := nearest(name, KEYWORDS):
        hint = f"did you mean {close}?"
    else:
        hint = f"known: {', '.join(KEYWORDS)}"
    return ConfigError(f"{name}: unknown keyword; {hint}")


def _once(given: dict[str, Any]) -> None:
    """No key is given under two of its names."""
    taken: dict[str, str] = {}
    for name in given:
        path = PATHS.get(name) or KEY_PATHS.get(name, name)
        other = taken.setdefault(path, name)
        if other != name:
            raise ConfigError(f"{name}: given together with {other}, its other name; keep one")


def _type(draft: Draft, section: str) -> str:
    value = draft.get(f"{section}.type")
    return value.strip().lower() if isinstance(value, str) else ""


def _write(draft: Draft, path: str, keyword: str, value: Any) -> None:
    draft.set(path, value)
    target = "" if keyword == path else f", for {path}"
    draft.spelled[path] = f"{keyword} (keyword{target})"


def _learning_rate(draft: Draft, value: Any) -> None:
    for name in ("muon_lr", "adam_lr"):
        if draft.get(f"optimizer.params.{name}") == "auto":
            _write(draft, f"optimizer.params.{name}", "learning_rate", value)
    kind, peak = _type(draft, "scheduler"), "scheduler.params.warmup_max_lr"
    if kind == "warmupdecaylr" or (kind == "warmuplr" and draft.get(peak) not in (MISSING, None)):
        _write(draft, peak, "learning_rate", value)
    elif kind in ("onecycle", "lrrangetest"):
        draft.notices.append("learning_rate: no effect: the scheduler sets rates of its own")


def _precision(draft: Draft, value: Any) -> None:
    try:
        dtype = read_dtype(value)
    except PydanticCustomError as error:
        raise ConfigError(f"precision: found {value!r}; allowed: {error.message()}") from None
    for section, name in (("fp16", "float16"), ("bf16", "bfloat16")):
        _write(draft, f"{section}.enabled", "precision", dtype == name)


def apply(draft: Draft, keywords: dict[str, Any]) -> None:
    """Write keywords into a draft; a keyword that is None counts as not given.

    Raises: `ConfigError` for an unknown keyword, saying what to use instead; for a key given under
    two names; and for an optimizer's value where there is no `optimizer` to take it.
    """
    for name in keywords:
        if name not in KEYWORDS and name not in KEY_PATHS:
            raise _unknown(name)
    given = {name: value for name, value in keywords.items() if value is not None}
    _once(given)
    for name, value in given.items():
        path = PATHS.get(name) or KEY_PATHS.get(name)
        if path is not None:
            _write(draft, path, name, value)
        elif name == "precision":
            _precision(draft, value)
        elif name in OPTIMIZER:
            if not isinstance(draft.get("optimizer"), dict):
                raise ConfigError(
                    f"{name}: given, but the configuration has no optimizer to take it"
                )
            key = "lr" if name == "learning_rate" else name
            _write(draft, f"optimizer.params.{key}", name, value)
            if name == "learning_rate":
                _learning_rate(draft, value)
        else:
            _steps(draft, name, value)


def _steps(draft: Draft, name: str, value: Any) -> None:
    """A number of steps, for the schedules that have one; a training script may always pass it."""
    kind = _type(draft, "scheduler")
    takes = {
        "total_num_steps": ("warmupdecaylr", "warmupcosinelr"),
        "warmup_num_steps": ("warmuplr", "warmupdecaylr", "warmupcosinelr"),
    }[name]
    if kind in takes:
        _write(draft, f"scheduler.params.{name}", name, value)
    else:
        what = "this scheduler has no such key" if kind else "there is no scheduler"
        draft.notices.append(f"{name} (keyword): no effect: {what}")


def resolve_auto(draft: Draft, sealed: tuple[str, ...]) -> None:
    """Replace every "auto" that is left, or refuse it by the name of its key.

    Arguments: `sealed`, the top-level sections that are not looked into.
    """
    for path, value in list(_leaves(draft.data)):
        if not isinstance(value, str) or value.strip().lower() != "auto":
            continue
        if path in AUTO_ALLOWED or path.split(".")[0] in sealed:
            continue
        if path in AUTO_UNSET:
            draft.pop(path)
        elif path in AUTO_DEFAULT:
            draft.pop(path)
            draft.notices.append(f'{draft.name(path)}: "auto" is the default here')
        elif path in AUTO_KEYWORDS:
            keyword = AUTO_KEYWORDS[path]
            raise ConfigError(
                f'{draft.name(path)}: found "auto" and nothing to take it from; '
                f"pass {keyword}=... or write the value"
            )
        else:
            raise ConfigError(
                f'{draft.name(path)}: found "auto", which this key cannot be; '
                "write the value or remove the key"
            )


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{index}]")
    else:
        yield path, value


def check_loss_scale(keywords: dict[str, Any], fp16: bool) -> None:
    """A loss scale given as a keyword must be used."""
    if keywords.get("loss_scale") is not None and not fp16:
        raise ConfigError('loss_scale: only fp16 has a loss scale; pass precision="fp16" with it')
