"""The smaller sections of a configuration: precision, monitors, checkpoints, and so on."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from jzero.config.keys import Section, not_yet, notice, refused, section, works
from jzero.config.values import (
    AboveZero,
    Count,
    Dtype,
    Flag,
    Int,
    Number,
    Positive,
    Size,
    Text,
    Texts,
    one_of,
    plain,
    read_number,
    whole,
)

TagValidation = Annotated[str, BeforeValidator(one_of("Ignore", "Warn", "Fail"))]
LogLevel = Annotated[
    str, BeforeValidator(one_of("debug", "info", "warning", "error", "critical", "fatal"))
]

# The scale is kept in float32.
ScalePower = Annotated[int, BeforeValidator(whole(least=0, most=127))]


def _stages(value: Any) -> str:
    if not isinstance(value, str) or value.lower() != "auto":
        read_number(plain(value), 'a whole number or "auto"')
    return str(value).lower()


class Fp16(Section):
    """`fp16`."""

    enabled: Flag = works(
        False, "compute in float16 with loss scaling; master weights stay float32"
    )
    auto_cast: Flag = not_yet(False, "the batch is not cast for the model")
    loss_scale: Size = works(0.0, "a fixed loss scale; 0 is dynamic")
    initial_scale_power: ScalePower = works(16, "the first dynamic scale is 2 to this power")
    loss_scale_window: Positive = works(1000, "clean steps before the scale doubles")
    hysteresis: Positive = works(2, "overflows before the scale halves")
    consecutive_hysteresis: Flag = works(False, "every clean step refills the hysteresis")
    min_loss_scale: AboveZero = works(1.0, "an overflow at this scale is an error")
    fp16_master_weights_and_grads: Flag = not_yet(False, "master weights are float32")


class Bf16(Section):
    """`bf16`."""

    enabled: Flag = works(False, "compute in bfloat16; master weights stay float32")
    immediate_grad_update: Flag = notice(
        False, "gradients reach the accumulator as XLA schedules it"
    )
    check_grad_overflow: Flag = notice(
        True, "a step that is not finite is always skipped", bites=lambda v: not v
    )
    bf16_master_weights_and_grads: Flag = not_yet(False, "master weights are float32")
    bf16_optimizer_states: Flag = not_yet(False, "moments are float32")


class DataTypes(Section):
    """`data_types`."""

    grad_accum_dtype: Dtype | None = works(
        None,
        "the accumulator over micro-batches; null is float32 (in DeepSpeed, the model's dtype)",
    )
    param_dtype: Dtype | None = works(None, "must agree with fp16 and bf16")
    buffer_dtype: Dtype | None = not_yet(None, "mutable collections keep their dtype")


class ActivationCheckpointing(Section):
    """`activation_checkpointing`."""

    partition_activations: Flag = not_yet(False, "saved activations are not sharded further")
    contiguous_memory_optimization: Flag = notice(False, "XLA lays out memory")
    number_checkpoints: Count | None = notice(
        None, "rematerialisation is the model's, by jax.checkpoint"
    )
    cpu_checkpointing: Flag = not_yet(False, "saved activations stay on the device")
    synchronize_checkpoint_boundary: Flag = notice(False, "one program has no such boundary")
    profile: Flag = notice(False, "a profiler trace shows rematerialisation")


class FlopsProfiler(Section):
    """`flops_profiler`."""

    enabled: Flag = not_yet(False, "no report of flops is written")
    recompute_fwd_factor: Number = notice(0.0, "no report of flops is written")
    profile_step: Int = notice(1, "no report of flops is written")
    module_depth: Int = notice(-1, "no report of flops is written")
    top_modules: Int = notice(1, "no report of flops is written")
    detailed: Flag = notice(True, "no report of flops is written")
    output_file: Text | None = notice(None, "no report of flops is written")


class Monitor(Section):
    """`tensorboard` and `csv_monitor`."""

    enabled: Flag = works(
        False,
        "loss, learning rate and loss scale over global samples, "
        "written by the training step as results arrive",
    )
    output_path: Text = works("", "where to; empty is the run's own folder")
    job_name: Text = works("DeepSpeedJobName", "the folder inside output_path")


class Wandb(Section):
    """`wandb`."""

    enabled: Flag = not_yet(False, "nothing is sent to Weights & Biases")
    group: Text | None = notice(None, "nothing is sent to Weights & Biases")
    team: Text | None = notice(None, "nothing is sent to Weights & Biases")
    project: Text = notice("deepspeed", "nothing is sent to Weights & Biases")


class Comet(Section):
    """`comet`."""

    enabled: Flag = refused(False, "nothing is sent to Comet")
    samples_log_interval: Int = notice(100, "nothing is sent to Comet")
    project: Text | None = notice(None, "nothing is sent to Comet")
    workspace: Text | None = notice(None, "nothing is sent to Comet")
    api_key: Text | None = notice(None, "nothing is sent to Comet")
    experiment_name: Text | None = notice(None, "nothing is sent to Comet")
    experiment_key: Text | None = notice(None, "nothing is sent to Comet")
    online: Flag | None = notice(None, "nothing is sent to Comet")
    mode: Text | None = notice(None, "nothing is sent to Comet")


class CommsLogger(Section):
    """`comms_logger`."""

    enabled: Flag = not_yet(False, "no log of collectives is written")
    verbose: Flag = notice(False, "no log of collectives is written")
    prof_all: Flag = notice(True, "no log of collectives is written")
    debug: Flag = notice(False, "no log of collectives is written")
    prof_ops: Texts = notice([], "no log of collectives is written")


class Throughput(Section):
    """`timers.throughput`."""

    enabled: Flag = notice(True, "no throughput is reported", bites=bool)
    synchronized: Flag = notice(True, "no throughput is reported")


class Timers(Section):
    """`timers`."""

    throughput: Throughput = section(Throughput)


_WRITER = "each process writes its own pieces, in the background"


class ParallelWrite(Section):
    """`checkpoint.parallel_write`."""

    pipeline_stage: Flag = notice(False, _WRITER, bites=bool)


class Writer(Section):
    """`checkpoint.writer`."""

    type: Annotated[str, BeforeValidator(one_of("MOCK", "PYTHON", "FAST"))] = notice(
        "FAST", _WRITER
    )
    io_buffer_size: Count = notice(64 * 1024 * 1024, _WRITER)
    io_buffer_double: Flag = notice(True, _WRITER)
    show_statistics: Flag = notice(False, _WRITER)
    data_parallel: (
        Annotated[str, BeforeValidator(one_of("REPLICA", "SOCKET", "MACHINE"))] | None
    ) = notice(None, _WRITER)
    decoupled: Flag = notice(False, _WRITER)
    io_multiplier: Count = notice(1, _WRITER)


class Checkpoint(Section):
    """`checkpoint`."""

    tag_validation: TagValidation = notice(
        "Warn", "steps are named by their number", bites=lambda v: v != "Warn"
    )
    load_universal: Flag = notice(
        False,
        "every checkpoint fits any stage and any number of devices; those of DeepSpeed are "
        "converted by `jzero checkpoint import-deepspeed`",
        bites=bool,
    )
    use_node_local_storage: Flag = refused(
        False, "all processes write to one folder, on a file system that they share"
    )
    parallel_write: ParallelWrite = section(ParallelWrite)
    checkpoint_serialization: Flag = notice(
        True, "arrays are written as Zarr, not pickled", bites=lambda v: not v
    )
    writer: Writer | None = notice(None, _WRITER)


class Aio(Section):
    """`aio`."""

    block_size: Count = notice(1_048_576, "there is no NVMe offload")
    queue_depth: Count = notice(8, "there is no NVMe offload")
    intra_op_parallelism: Count = notice(1, "there is no NVMe offload")
    single_submit: Flag = notice(False, "there is no NVMe offload")
    overlap_events: Flag = notice(True, "there is no NVMe offload")
    use_gds: Flag = notice(False, "there is no NVMe offload")


class TensorParallel(Section):
    """`tensor_parallel`."""

    autotp_size: Count = not_yet(0, "models are not split for you", bites=lambda v: v > 1)
    preset_model: Text | None = notice(None, "models are not split for you")
    tp_overlap_comm: Flag = notice(False, "models are not split for you")
    partition_config: dict | None = notice(None, "models are not split for you")


class Pipeline(Section):
    """`pipeline`."""

    stages: Annotated[str, BeforeValidator(_stages)] = not_yet("auto", "there is no pipeline")
    partition: Text = not_yet("best", "there is no pipeline")
    seed_layers: Flag = not_yet(False, "there is no pipeline")
    activation_checkpoint_interval: Count = not_yet(0, "there is no pipeline")
    pipe_partitioned: Flag = notice(True, "there is no pipeline")
    grad_partitioned: Flag = notice(True, "there is no pipeline")


class Compile(Section):
    """`compile`."""

    deepcompile: Flag = notice(False, "every step is compiled")
    free_activation: Flag = notice(False, "every step is compiled")
    offload_activation: Flag = refused(False, "activations stay on the device")
    offload_opt_states: Flag = refused(False, "use zero_optimization.offload_optimizer")
    offload_parameters: Flag = refused(False, "use zero_optimization.offload_param")
    double_buffer: Flag = notice(True, "every step is compiled")
    symmetric_memory: Flag = notice(False, "every step is compiled")
    debug_log: Flag = notice(False, "every step is compiled")
    sync_before_reduce: Flag = notice(False, "every step is compiled")
    sync_after_reduce: Flag = notice(False, "every step is compiled")
    sync_before_allgather: Flag = notice(False, "every step is compiled")
    sync_after_allgather: Flag = notice(False, "every step is compiled")
    passes: Texts | None = notice(None, "XLA runs its own passes")


class Jzero(Section):
    """`jzero`: what DeepSpeed has no key for."""

    keep_gathered: Flag = works(False, "stage 3: keep gathered weights for backward")
    batch_keys_optional: Flag = works(
        False,
        "without batch keys, take the micro-batch from the first batch (set by keywords alone)",
    )
