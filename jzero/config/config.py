"""The configuration that the rest of jzero reads, and how it is loaded."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jzero.config import batch as batches
from jzero.config import check, keywords, retired, rules
from jzero.config.batch import Batch
from jzero.config.document import Document, Optimizer, Scheduler
from jzero.config.draft import Draft, copy
from jzero.config.save import write_json
from jzero.config.sections import Monitor
from jzero.config.source import read
from jzero.errors import ConfigError


@dataclass(frozen=True)
class LossScale:
    """How fp16 gradients are scaled: DeepSpeed's state machine, or a fixed scale."""

    initial: float
    dynamic: bool
    window: int
    hysteresis: int
    consecutive_hysteresis: bool
    minimum: float


class Config:
    """A checked configuration, immutable; made by `load`."""

    def __init__(self, document: Document, notices: tuple[str, ...] = ()):
        self._document = document
        self._notices = notices

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 to 3."""
        return self._document.zero_optimization.stage

    @property
    def compute_dtype(self) -> str:
        """The dtype that the model computes in: "float32", "bfloat16" or "float16"."""
        return rules.compute_dtype(self._document)

    @property
    def communication_dtype(self) -> str:
        """The dtype in which gradients are reduced; the compute dtype unless configured."""
        return self._document.communication_data_type or self.compute_dtype

    @property
    def accumulation_dtype(self) -> str:
        """The dtype of the gradient accumulator; "float32" unless configured."""
        return self._document.data_types.grad_accum_dtype or "float32"

    @property
    def gradient_clipping(self) -> float:
        """The largest global gradient norm; 0.0 is off."""
        return self._document.gradient_clipping

    @property
    def gradient_op(self) -> str:
        """How gradients of the devices are combined: "mean" or "sum"."""
        return self._document.gradient_allreduce_op

    @property
    def train_batch_size(self) -> int | None:
        """Samples per optimizer step on all devices, as given."""
        return self._document.train_batch_size

    @property
    def micro_batch_size(self) -> int | None:
        """Samples per device and micro-batch, as given."""
        return self._document.train_micro_batch_size_per_gpu

    @property
    def accumulation(self) -> int | None:
        """Micro-batches per optimizer step, as given."""
        return self._document.gradient_accumulation_steps

    def resolve_batch(self, size: int, axes: Mapping[str, int]) -> Batch:
        """The three batch sizes on a data-parallel group of `size` devices.

        Arguments: `size` and the mesh `axes`, name to size, that make it up.

        Raises: `ConfigError` if the sizes given do not fit together or do not suffice.

            >>> load({"train_batch_size": 32}).resolve_batch(8, {"data": 8})
            Batch(train=32, micro=4, accumulation=1)
        """
        optional = self._document.jzero.batch_keys_optional
        sizes = (self.train_batch_size, self.micro_batch_size, self.accumulation)
        return batches.resolve(*sizes, size, axes, optional)

    @property
    def persistence_threshold(self) -> int:
        """Stage 3: leaves of at most so many elements (per layer of a stacked leaf) stay whole."""
        return self._document.zero_optimization.stage3_param_persistence_threshold

    @property
    def model_persistence_threshold(self) -> int:
        """Stage 3: the most elements that stay whole in all."""
        return self._document.zero_optimization.stage3_model_persistence_threshold

    @property
    def shard_size(self) -> int | None:
        """Devices that share one copy of the state; None for all of them."""
        size = self._document.zero_optimization.mics_shard_size
        return size if size > 0 else None

    @property
    def prefetch_elements(self) -> int:
        """Elements gathered ahead of their use; 0 for none."""
        return self._document.zero_optimization.stage3_prefetch_bucket_size

    @property
    def live_elements(self) -> int:
        """The most elements of unrolled layers that are gathered at a time."""
        return self._document.zero_optimization.stage3_max_live_parameters

    @property
    def keep_gathered(self) -> bool:
        """Stage 3: whether gathered weights are kept for backward."""
        return self._document.jzero.keep_gathered

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale of fp16; None in other dtypes."""
        fp16 = self._document.fp16
        if not fp16.enabled:
            return None
        dynamic = fp16.loss_scale == 0
        return LossScale(
            initial=2.0**fp16.initial_scale_power if dynamic else fp16.loss_scale,
            dynamic=dynamic,
            window=fp16.loss_scale_window,
            hysteresis=fp16.hysteresis,
            consecutive_hysteresis=fp16.consecutive_hysteresis,
            minimum=fp16.min_loss_scale,
        )

    @property
    def steps_per_print(self) -> int | None:
        """Optimizer steps between two lines of progress."""
        return self._document.steps_per_print

    @property
    def tensorboard(self) -> Monitor:
        """TensorBoard's section: enabled, output_path, job_name."""
        return self._document.tensorboard

    @property
    def csv_monitor(self) -> Monitor:
        """The CSV monitor's section: enabled, output_path, job_name."""
        return self._document.csv_monitor

    @property
    def log_level(self) -> str | None:
        """How much is logged."""
        return self._document.log_level

    @property
    def dump_state(self) -> bool:
        """Whether to print the configuration and every leaf's spec at the start."""
        return self._document.dump_state

    @property
    def drop_last(self) -> bool:
        """Whether a short last batch is dropped."""
        return self._document.dataloader_drop_last

    @property
    def optimizer(self) -> Optimizer | None:
        """The optimizer's section (type, params), if there is one."""
        return self._document.optimizer

    @property
    def scheduler(self) -> Scheduler | None:
        """The scheduler's section (type, params), if there is one."""
        return self._document.scheduler

    @property
    def notices(self) -> tuple[str, ...]:
        """One line for each key given that has no effect, beginning with its path."""
        return self._notices

    def resolved(self) -> dict[str, Any]:
        """Every value that holds, defaults included, as JSON-able data in DeepSpeed's form.

        `load(config.resolved())` gives an equal configuration.
        """
        data = self._document.model_dump(mode="json")
        data["communication_data_type"] = self.communication_dtype
        data["data_types"]["grad_accum_dtype"] = self.accumulation_dtype
        if self.optimizer is not None and self.scheduler is not None:
            params, lr = data["scheduler"]["params"], data["optimizer"]["params"].get("lr")
            if "warmup_max_lr" in params and params["warmup_max_lr"] is None:
                params["warmup_max_lr"] = lr
        return data

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write `resolved()` to a JSON file, whole or not at all.

        Arguments: the file's path; its folder is made if it is not there.

        Raises: `JzeroError` if it cannot be written.

            >>> load(stage=2).save("run/config.json")  # doctest: +SKIP
        """
        write_json(path, self.resolved())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self.resolved() == other.resolved()

    def __hash__(self) -> int:
        return hash(json.dumps(self.resolved(), sort_keys=True))

    def __repr__(self) -> str:
        return f"Config(stage={self.stage}, compute_dtype={self.compute_dtype!r})"


Source = Config | Mapping[str, Any] | str | os.PathLike[str] | None


def load(source: Source = None, **options: Any) -> Config:
    """A configuration from a DeepSpeed-style file or dict, from keywords, or from both.

    Arguments: the source: a path to a JSON file, a dict (which counts as such a file), a
    `Config`, or None. Keywords override it and stand in for "auto": `stage`, `precision` ("fp32",
    "bf16", "fp16"), `train_batch_size`, `micro_batch_size`, `accumulation`, `gradient_clipping`,
    `communication_dtype`, `accumulation_dtype`, `persistence_threshold`, `shard_size`,
    `prefetch_elements`, `live_elements`, `keep_gathered`, `loss_scale` (0 is dynamic),
    `learning_rate`, `betas`, `eps`, `weight_decay`, `total_num_steps`, `warmup_num_steps`; None
    counts as not given. All down to
    `loss_scale` but `precision` may also go by their key's name in a file, so that
    `gradient_accumulation_steps` is `accumulation`.

    Raises: `ConfigError` naming the key's full path, what was found, and what is allowed.

    Keywords alone need no batch keys, clip nothing, and keep no parameter whole; a file has
    DeepSpeed's defaults.

        >>> load(stage=2, precision="bf16").communication_dtype
        'bfloat16'
    """
    if isinstance(source, Config) and not any(value is not None for value in options.values()):
        keywords.apply(Draft({}), options)  # an unknown keyword is an error even when it is None
        return source
    draft = Draft(_data(source))
    retired.normalise(draft)
    keywords.apply(draft, options)
    keywords.resolve_auto(draft, check.SEALED)
    document = check.read_document(draft)
    keywords.check_loss_scale(options, document.fp16.enabled)
    rules.check(document, draft)
    said = len(draft.notices)
    check.judge(document, draft)
    if isinstance(source, Config):
        # Its document spells out every key; the user gave only those that its notices name.
        said_before = (*source.notices, *draft.notices[:said])
        return Config(document, tuple(dict.fromkeys(said_before)))
    return Config(document, tuple(draft.notices))


def _data(given: Source) -> dict[str, Any]:
    if given is None:
        return {
            "gradient_clipping": 0.0,
            retired.ZERO: {"stage3_param_persistence_threshold": 0},
            "jzero": {"batch_keys_optional": True},
        }
    if isinstance(given, Config):
        return given._document.model_dump(mode="json")
    if isinstance(given, Mapping):
        return copy(given)
    if isinstance(given, (str, os.PathLike)):
        return copy(read(given))
    raise ConfigError(
        f"config: found {type(given).__name__}; allowed: "
        "a dict, a path to a JSON file, a Config, or None"
    )
