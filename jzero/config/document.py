"""The whole configuration as one schema."""

from typing import Annotated, Any

from pydantic import BeforeValidator

from jzero.config import sections as s
from jzero.config.keys import Section, Verdict, not_yet, notice, off, refused, section, works
from jzero.config.values import Count, Dtype, Flag, Positive, Size, Text, one_of
from jzero.config.zero_section import ZeroOptimization

ReduceOp = Annotated[str, BeforeValidator(one_of("mean", "sum"))]

# Since 0.19.3 this is what DeepSpeed does with a file that says nothing about clipping.
FILE_GRADIENT_CLIPPING = 1.0


def _more_than_one(value: int | None) -> bool:
    return value is not None and value > 1


class Optimizer(Section):
    """`optimizer`."""

    type: Text = works(..., "Adam, AdamW, Lamb, Lion, Adagrad, Muon or SGD")
    params: Any = works({}, "the optimizer's own keys, listed below")
    legacy_fusion: Flag = notice(False, "XLA fuses the update")


class Scheduler(Section):
    """`scheduler`."""

    type: Text = works(..., "WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle or LRRangeTest")
    params: Any = works({}, "the schedule's own keys, listed below")


class Document(Section):
    """A configuration."""

    train_batch_size: Positive | None = works(None, "samples per optimizer step, on all devices")
    train_micro_batch_size_per_gpu: Positive | None = works(
        None, "samples per device and micro-batch"
    )
    gradient_accumulation_steps: Positive | None = works(None, "micro-batches per optimizer step")
    managed_gradient_accumulation: Flag = not_yet(True, "a step is always a whole optimizer step")
    zero_optimization: ZeroOptimization = section(ZeroOptimization)
    optimizer: Optimizer | None = works(None, "built from Optax")
    scheduler: Scheduler | None = works(None, "a function of the optimizer step, from 0")
    fp16: s.Fp16 = section(s.Fp16)
    bf16: s.Bf16 = section(s.Bf16)
    data_types: s.DataTypes = section(s.DataTypes)
    communication_data_type: Dtype | None = works(
        None, "the dtype in which gradients are reduced; null is the compute dtype"
    )
    seq_parallel_communication_data_type: Dtype = notice("float32", "there is no sequence axis")
    torch_autocast: Any = off("the compute dtype is that of bf16 or fp16")
    amp: Any = off("use bf16 or fp16")
    gradient_clipping: Size = works(
        FILE_GRADIENT_CLIPPING, "the largest global gradient norm; 0 is off"
    )
    prescale_gradients: Flag = notice(False, "the mean is the same")
    gradient_predivide_factor: Size = notice(1.0, "the mean is the same")
    gradient_allreduce_op: ReduceOp = works("mean", "sum multiplies the mean by the device count")
    sparse_gradients: Flag = refused(False, "gradients are dense")
    disable_allgather: Flag = notice(False, "DeepSpeed never reads it either")
    zero_allow_untested_optimizer: Flag = notice(False, "any Optax transformation may be used")
    zero_force_ds_cpu_optimizer: Flag = notice(True, "there is no CPU optimizer")
    activation_checkpointing: s.ActivationCheckpointing = section(s.ActivationCheckpointing)
    steps_per_print: Positive | None = works(None, "optimizer steps between two lines of progress")
    wall_clock_breakdown: Flag = notice(
        False, "a step is one program without such phases; a profiler trace shows them"
    )
    memory_breakdown: Flag = notice(False, "zero.explain() shows what each device keeps")
    dump_state: Flag = works(False, "prints the configuration and every leaf's spec")
    log_level: s.LogLevel | None = works(None, "how much is logged")
    flops_profiler: s.FlopsProfiler = section(s.FlopsProfiler)
    tensorboard: s.Monitor = section(s.Monitor)
    csv_monitor: s.Monitor = section(s.Monitor)
    wandb: s.Wandb = section(s.Wandb)
    comet: s.Comet = section(s.Comet)
    comms_logger: s.CommsLogger = section(s.CommsLogger)
    timers: s.Timers = section(s.Timers)
    checkpoint: s.Checkpoint = section(s.Checkpoint)
    aio: s.Aio = section(s.Aio)
    dataloader_drop_last: Flag = works(False, "drops a short last batch, which would not shard")
    vocabulary_size: Count | None = notice(None, "leaves that do not divide are padded")
    tensor_parallel: s.TensorParallel = section(s.TensorParallel)
    sequence_parallel_size: Count | None = not_yet(
        None, "there is no sequence axis", bites=_more_than_one
    )
    data_parallel_size: Count | None = not_yet(
        None, "the data-parallel size is that of the mesh", bites=_more_than_one
    )
    expert_parallel: Any = off("there is no expert axis", Verdict.NOT_YET)
    use_data_before_expert_parallelism: Flag = not_yet(False, "there is no expert axis")
    pipeline: s.Pipeline = section(s.Pipeline)
    compile: s.Compile = section(s.Compile)
    graph_harvesting: Flag = notice(False, "every step is compiled")
    autotuning: Any = off("nothing is tuned; compare the stages and choose")
    elasticity: Any = off("it takes over the batch keys; give those yourself")
    nebula: Any = off("nothing is written to Nebula")
    datastates_ckpt: Any = off("there is no DataStates engine")
    curriculum_learning: Any = off("it changes the data")
    data_efficiency: Any = off("it changes the data")
    progressive_layer_drop: Any = off("it changes the model")
    compression_training: Any = off("it changes the model")
    quantize_training: Any = off("it changes the model")
    eigenvalue: Any = off("it serves quantize_training")
    sparse_attention: Any = off("attention is the model's own")
    weight_quantization: Any = off("it changes the model")
    hybrid_engine: Any = off("generation uses the model as it is")
    jzero: s.Jzero = section(s.Jzero)
