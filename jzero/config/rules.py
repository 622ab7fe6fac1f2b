"""Rules that concern more than one key."""

from jzero.config.document import Document
from jzero.config.draft import Draft
from jzero.config.retired import ZERO
from jzero.errors import ConfigError


def compute_dtype(document: Document) -> str:
    """The dtype that the model computes in, by NumPy's name."""
    if document.fp16.enabled:
        return "float16"
    return "bfloat16" if document.bf16.enabled else "float32"


def check(document: Document, draft: Draft) -> None:
    """Refuse combinations that contradict themselves.

    Raises: `ConfigError` naming the keys.
    """
    if document.fp16.enabled and document.bf16.enabled:
        raise ConfigError(
            f"{draft.name('fp16.enabled')}: found true together with {draft.name('bf16.enabled')}; "
            "allowed: one of them, or neither for float32"
        )
    dtype = compute_dtype(document)
    wanted = document.data_types.param_dtype
    if wanted is not None and wanted != dtype:
        raise ConfigError(
            f'data_types.param_dtype: found "{wanted}", but fp16 and bf16 make it "{dtype}"; '
            "change one of them"
        )
    zero = document.zero_optimization
    name = draft.name(f"{ZERO}.mics_shard_size")
    if zero.mics_shard_size < -1:
        raise ConfigError(
            f"{name}: found {zero.mics_shard_size}; allowed: -1 or 0 (off), or a number of devices"
        )
    optimizer = document.optimizer
    if optimizer is not None and optimizer.type == "SGD":
        if optimizer.params.nesterov and optimizer.params.momentum == 0:
            raise ConfigError(
                "optimizer.params.nesterov: found true with momentum 0; give it a momentum"
            )
    if document.scheduler is not None:
        _check_scheduler(document, draft)


def _check_scheduler(document: Document, draft: Draft) -> None:
    scheduler = document.scheduler
    assert scheduler is not None
    params = scheduler.params
    if document.optimizer is None:
        draft.notices.append(
            "scheduler: no effect: there is no optimizer that it could schedule; a transformation "
            "of your own brings its schedule along (this one is "
            "jzero.config.build_schedule(config.scheduler, lr))"
        )
    low, high = getattr(params, "warmup_min_lr", 0.0), getattr(params, "warmup_max_lr", None)
    if scheduler.type == "OneCycle":
        low, high = params.cycle_min_lr, params.cycle_max_lr
    if high is not None and low > high:
        raise ConfigError(
            f"scheduler.params: the lower rate {low:g} is above the upper rate {high:g}; swap them"
        )
