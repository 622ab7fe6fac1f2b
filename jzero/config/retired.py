"""Old and second spellings of keys, and keys that DeepSpeed has retired, brought to one form."""

from typing import Any

from pydantic_core import PydanticCustomError

from jzero.config.draft import MISSING, Draft
from jzero.config.values import read_flag
from jzero.errors import ConfigError

ZERO = "zero_optimization"

# Second spelling -> the spelling that the schema has.
ALIASES = {
    "bfloat16": "bf16",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": (
        f"{ZERO}.stage3_gather_16bit_weights_on_model_save"
    ),
} | {
    f"{ZERO}.{name}": f"{ZERO}.stage3_{name}"
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
}

# Flags that became a section of their own -> that section.
OFFLOADS = {
    f"{ZERO}.cpu_offload": f"{ZERO}.offload_optimizer",
    f"{ZERO}.cpu_offload_param": f"{ZERO}.offload_param",
    f"{ZERO}.cpu_offload_params": f"{ZERO}.offload_param",
}

# Keys that nothing reads any more, here or in DeepSpeed -> what to say.
RETIRED = {
    f"{ZERO}.grad_hooks": "a retired key; gradients are reduced inside one program",
    f"{ZERO}.cpu_offload_use_pin_memory": (
        "a retired key; DeepSpeed does not carry it over to offload_optimizer.pin_memory"
    ),
    "aio.thread_count": "DeepSpeed's parser ignores it too; its name there is intra_op_parallelism",
}


def flag(value: Any, path: str) -> bool:
    """A boolean that is needed before the schema is applied."""
    try:
        return read_flag(value)
    except PydanticCustomError:
        raise ConfigError(f"{path}: found {value!r}; allowed: true or false") from None


def _bare_zero(draft: Draft) -> None:
    """Read a bare boolean: true is stage 1 with the top-level `allgather_size`, false stage 0."""
    value = draft.get(ZERO)
    if value is MISSING or value is None or isinstance(value, dict):
        return
    if not isinstance(value, (bool, str)):
        return  # a list or a number: the schema refuses it
    stage = int(flag(value, ZERO))
    draft.data[ZERO] = {"stage": stage}
    size = draft.pop("allgather_size")
    if size is not MISSING:
        draft.set(f"{ZERO}.allgather_bucket_size", size)
        draft.spelled[f"{ZERO}.allgather_bucket_size"] = "allgather_size"
    draft.notices.append(f'{ZERO}: a bare boolean is deprecated; read as {{"stage": {stage}}}')


def normalise(draft: Draft) -> None:
    """Rename, move and drop keys in place.

    Raises: `ConfigError` where a key is given under two spellings.
    """
    _bare_zero(draft)
    for old, new in ALIASES.items():
        value = draft.pop(old)
        if value is MISSING:
            continue
        if draft.get(new) is not MISSING:
            raise ConfigError(f"{old}: given together with {new}, its other spelling; keep one")
        draft.set(new, value)
        draft.spelled[new] = old
    for old, new in OFFLOADS.items():
        value = draft.pop(old)
        if value is MISSING or value is None:
            continue
        if draft.get(new) is not MISSING:
            raise ConfigError(f"{old}: given together with {new}, which replaced it; keep {new}")
        on = flag(value, old)
        draft.set(new, {"device": "cpu" if on else "none"})
        draft.spelled[f"{new}.device"] = old
        if not on:
            draft.notices.append(f"{old}: a retired key; {new} replaced it")
    for old, text in RETIRED.items():
        if draft.pop(old) is not MISSING:
            draft.notices.append(f"{old}: no effect: {text}")
