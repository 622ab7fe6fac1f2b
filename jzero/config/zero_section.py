"""The `zero_optimization` section, key by key."""

import sys
from typing import Annotated

from pydantic import BeforeValidator

from jzero.config.keys import Section, not_yet, notice, refused, section, works
from jzero.config.values import Count, Flag, Fraction, Int, Text, Texts, one_of, whole

Stage = Annotated[int, BeforeValidator(whole(least=0, most=3))]
Device = Annotated[str, BeforeValidator(one_of("none", "cpu", "nvme"))]

PERSISTENCE_THRESHOLD = 100_000

_BUCKETS = "there are no buckets; XLA's combiner thresholds, in bytes, are the nearest relative"
_LIVE = "a layer's gathered weights are not kept for backward unless keep_gathered=True"
_NVME = "it only matters to NVMe offload"


def _more_than_one(value: int) -> bool:
    return value > 1


class OffloadParam(Section):
    """`zero_optimization.offload_param`."""

    device: Device = not_yet("none", "parameters stay on the device")
    nvme_path: Text | None = notice(None, _NVME)
    buffer_count: Count = notice(5, _NVME)
    buffer_size: Count = notice(100_000_000, _NVME)
    max_in_cpu: Count = notice(1_000_000_000, _NVME)
    pin_memory: Flag = notice(True, "nothing is offloaded")


class OffloadOptimizer(Section):
    """`zero_optimization.offload_optimizer`."""

    device: Device = not_yet("none", "optimizer state stays on the device")
    nvme_path: Text | None = notice(None, _NVME)
    buffer_count: Count = notice(4, _NVME)
    pin_memory: Flag = notice(True, "nothing is offloaded")
    pipeline_read: Flag = notice(False, _NVME)
    pipeline_write: Flag = notice(False, _NVME)
    fast_init: Flag = notice(False, _NVME)
    ratio: Fraction = refused(1.0, "the update is never split between host and device")
    super_offload: Flag = refused(False, "SuperOffload is specific to DeepSpeed's CPU Adam")
    cpuadam_cores_perc: Fraction = notice(0.8, "there is no CPU Adam")


class LeafModule(Section):
    """`zero_optimization.leaf_module`."""

    classes: Texts | None = notice(None, "devices run one program and cannot gather out of step")
    names: Texts | None = notice(None, "devices run one program and cannot gather out of step")
    name_suffixes: Texts | None = notice(
        None, "devices run one program and cannot gather out of step"
    )


class ZeroOptimization(Section):
    """`zero_optimization`."""

    stage: Stage = works(
        0,
        "0: nothing is sharded; 1: optimizer state and master; 2: gradients too; 3: parameters too",
    )
    contiguous_gradients: Flag = notice(True, "gradients are not copied into a flat buffer")
    reduce_scatter: Flag = notice(True, "sharded gradients are always reduce-scattered")
    reduce_bucket_size: Count = notice(500_000_000, _BUCKETS)
    use_multi_rank_bucket_allreduce: Flag = notice(True, _BUCKETS)
    allgather_partitions: Flag = notice(True, "updated parameters are always all-gathered")
    allgather_bucket_size: Count = notice(500_000_000, _BUCKETS)
    overlap_comm: Flag | None = notice(
        None, "XLA schedules communication inside one program, so there is no race to avoid"
    )
    load_from_fp32_weights: Flag = refused(
        True, "master weights are always restored from the fp32 weights of a checkpoint"
    )
    elastic_checkpoint: Flag = notice(
        False, "every checkpoint fits any number of devices", bites=bool
    )
    offload_param: OffloadParam = section(OffloadParam)
    offload_optimizer: OffloadOptimizer = section(OffloadOptimizer)
    zenflow: dict | None = refused(None, "it changes the update rule")
    sub_group_size: Count = notice(1_000_000_000, "the update is one fused program")
    stage3_prefetch_bucket_size: Count = works(
        50_000_000,
        "elements gathered ahead of their use, at least the next layer; of a layer scan exactly "
        "one layer, whatever the number; 0 for none",
    )
    stage3_param_persistence_threshold: Count = works(
        PERSISTENCE_THRESHOLD,
        "stage 3: parameters of at most so many elements (of one layer, in a stacked leaf) "
        "stay whole; their master and moments still shard, and each step reduces and gathers them "
        "once",
    )
    stage3_model_persistence_threshold: Count = works(
        sys.maxsize, "stage 3: the most elements kept whole in all"
    )
    stage3_max_live_parameters: Count = works(
        1_000_000_000,
        "the most elements of unrolled layers that are gathered at a time, if a layer is no larger",
    )
    stage3_max_reuse_distance: Count = notice(1_000_000_000, _LIVE)
    stage3_gather_16bit_weights_on_model_save: Flag = notice(
        False, "`jzero checkpoint export` writes whole weights of any stage", bites=bool
    )
    stage3_module_granularity_threshold: Count = notice(0, "gathers follow the reads of the model")
    stage3_use_all_reduce_for_fetch_params: Flag = notice(False, "gathers are all-gathers")
    stage3_allgather_sequential: Flag = notice(False, "XLA schedules the gathers")
    ignore_unused_parameters: Flag = refused(
        True,
        "an unused parameter has a gradient of exactly zero and cannot be told from a used one",
    )
    legacy_stage1: Flag = refused(False, "DeepSpeed removed that implementation")
    round_robin_gradients: Flag = notice(False, "there are no gradient copies to balance")
    zero_hpz_partition_size: Count = not_yet(
        1, "the secondary shard of ZeRO++ (hpZ) does not exist", bites=_more_than_one
    )
    zero_quantized_weights: Flag = not_yet(False, "weights are gathered in the compute dtype")
    zero_quantized_nontrainable_weights: Flag = not_yet(False, "frozen weights keep their dtype")
    zero_quantized_gradients: Flag = not_yet(
        False, "gradients are reduced in communication_data_type"
    )
    zeropp_loco_param: dict | None = not_yet(None, "it corrects errors of quantised gradients")
    mics_shard_size: Int = works(
        -1, "shards repeat over groups of so many devices (MiCS, hybrid sharding); -1 is off"
    )
    mics_hierarchical_params_gather: Flag = notice(False, "XLA picks the route of a gather")
    memory_efficient_linear: Flag = notice(True, _LIVE)
    pipeline_loading_checkpoint: Flag = notice(
        False, "each process reads its own pieces alone", bites=bool
    )
    override_module_apply: Flag = notice(True, "state is born sharded")
    log_trace_cache_warnings: Flag = notice(False, "there is no trace cache")
    enable_sanity_checks: Flag = notice(
        False, "there are no further checks to switch on", bites=bool
    )
    save_muon_momentum_buffer_in_memory: Flag = notice(False, _NVME)
    leaf_module: LeafModule = section(LeafModule)
    compute_grad_norm: Flag = notice(True, "always computed: it decides whether a step is skipped")
