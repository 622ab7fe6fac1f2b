"""Every key that is refused is refused by name, and every key without effect says so once."""

import pytest

from jzero.config import keys, load
from jzero.config.document import Document
from jzero.config.keys import Verdict
from jzero.errors import ConfigError

ZERO = "zero_optimization"

# path -> a value that is refused, for every key that the schema marks "refused" or "not yet".
REFUSED = {
    "managed_gradient_accumulation": False,
    f"{ZERO}.load_from_fp32_weights": False,
    f"{ZERO}.offload_param.device": "cpu",
    f"{ZERO}.offload_optimizer.device": "nvme",
    f"{ZERO}.zenflow": {"topk_ratio": 0.1},
    f"{ZERO}.ignore_unused_parameters": "false",
    f"{ZERO}.legacy_stage1": True,
    f"{ZERO}.zero_hpz_partition_size": 8,
    f"{ZERO}.zero_quantized_weights": True,
    f"{ZERO}.zero_quantized_nontrainable_weights": True,
    f"{ZERO}.zero_quantized_gradients": True,
    f"{ZERO}.zeropp_loco_param": {},
    "fp16.auto_cast": True,
    "fp16.fp16_master_weights_and_grads": True,
    "bf16.bf16_master_weights_and_grads": True,
    "bf16.bf16_optimizer_states": True,
    "data_types.buffer_dtype": "fp32",
    "torch_autocast.enabled": True,
    "amp.enabled": "auto",
    "sparse_gradients": True,
    "activation_checkpointing.partition_activations": True,
    "activation_checkpointing.cpu_checkpointing": True,
    "flops_profiler.enabled": True,
    "wandb.enabled": True,
    "comet.enabled": True,
    "comms_logger.enabled": True,
    "checkpoint.use_node_local_storage": True,
    "tensor_parallel.autotp_size": 2,
    "sequence_parallel_size": 2,
    "data_parallel_size": 4,
    "expert_parallel.enabled": True,
    "use_data_before_expert_parallelism": True,
    "pipeline.stages": 4,
    "pipeline.partition": "uniform",
    "pipeline.seed_layers": True,
    "pipeline.activation_checkpoint_interval": 1,
    "compile.offload_activation": True,
    "compile.offload_opt_states": True,
    "compile.offload_parameters": True,
    "autotuning.enabled": True,
    "elasticity.enabled": True,
    "nebula.enabled": True,
    "datastates_ckpt.host_cache_size": 16,
    "curriculum_learning.enabled": True,
    "data_efficiency.enabled": "true",
    "progressive_layer_drop.enabled": True,
    "compression_training.weight_quantization": {"shared_parameters": {"enabled": True}},
    "quantize_training.enabled": True,
    "eigenvalue.enabled": True,
    "sparse_attention.mode": "fixed",
    "weight_quantization.shared_parameters": {"enabled": True},
    "hybrid_engine.enabled": True,
}
# Offloading is refused as a whole before these can act.
BEHIND_OFFLOAD = {f"{ZERO}.offload_optimizer.ratio", f"{ZERO}.offload_optimizer.super_offload"}
# Sections that cannot be switched on yet, so that their keys have nothing to say.
SILENT = (
    f"{ZERO}.offload_param.",
    f"{ZERO}.offload_optimizer.",
    "flops_profiler.",
    "wandb.",
    "comet.",
    "comms_logger.",
)


def nested(path, value, **beside):
    *parents, last = path.split(".")
    inner = {last: value} | (beside if parents else {})
    for name in reversed(parents):
        inner = {name: inner}
    return inner


def with_verdict(*wanted):
    found = ((path, field, keys.of(field)) for path, field in keys.walk(Document))
    return [(path, field, key) for path, field, key in found if key and key.verdict in wanted]


@pytest.mark.parametrize(("path", "value"), REFUSED.items())
def test_refused_by_name(path, value):
    on = {"enabled": True} if path.startswith(("fp16", "bf16")) else {}
    with pytest.raises(ConfigError) as error:
        load(nested(path, value, **on))
    text = str(error.value)
    key = path.split(".")[0] if path.split(".")[0] in text.split(":")[0].split(".") else path
    assert text.startswith(key)
    assert "allowed: " in text and ("refused: " in text or "not supported yet: " in text)


def test_every_refused_key_is_in_the_list():
    known = set(REFUSED) | {path.split(".")[0] for path in REFUSED} | BEHIND_OFFLOAD
    for path, _, _ in with_verdict(Verdict.REFUSE, Verdict.NOT_YET):
        assert path in known


@pytest.mark.parametrize("path", [path for path, _, _ in with_verdict(Verdict.NOTICE)])
def test_key_without_effect_says_so_once(path):
    field, key = next((f, k) for p, f, k in with_verdict(Verdict.NOTICE) if p == path)
    value = field.get_default(call_default_factory=True)
    if keys.section_of(field):
        value = {}
    elif path == "checkpoint.tag_validation":
        value = "Fail"
    elif key.bites and not key.bites(value):
        value = not value
    on = {"enabled": True} if path.startswith("bf16") else {}
    on = {"type": "Adam"} if path.startswith("optimizer.") else on
    notices = load(nested(path, value, **on)).notices
    if path.startswith(SILENT):
        assert notices == ()
    elif path.startswith("checkpoint.writer."):
        assert [line.split(":")[0] for line in notices] == ["checkpoint.writer"]
    else:
        assert [line.split(":")[0] for line in notices] == [path]
        assert notices[0] == f"{path}: no effect: {key.text}"


def test_nothing_given_says_nothing():
    assert load({}).notices == load(stage=3, precision="fp16").notices == ()


@pytest.mark.parametrize(
    "config",
    [
        {"amp": {"enabled": False, "opt_level": "O1"}},
        {"sparse_attention": None},
        {"sparse_attention": {}},
        {
            "compression_training": {
                "weight_quantization": {"shared_parameters": {"enabled": False}}
            }
        },
        {"curriculum_learning": {"enabled": "false", "schedule_config": {"x": 1}}},
        {ZERO: {"offload_optimizer": {"device": "none", "ratio": 0.5, "pin_memory": True}}},
        {ZERO: {"zero_hpz_partition_size": 0}},
        {"sequence_parallel_size": 1, "data_parallel_size": 1},
        {"tensor_parallel": {"autotp_size": 1}},
        {"wandb": {"enabled": False, "project": "p"}},
        {ZERO: {"stage": 3, "stage3_gather_16bit_weights_on_model_save": False}},
        {ZERO: {"elastic_checkpoint": False, "load_from_fp32_weights": True}},
        {ZERO: {"enable_sanity_checks": False, "pipeline_loading_checkpoint": False}},
        {"checkpoint": {"tag_validation": "Warn", "load_universal": False}},
        {"timers": {"throughput": {"enabled": False, "synchronized": True}}},
        {"bf16": {"enabled": True, "check_grad_overflow": True}},
    ],
)
def test_switched_off_or_harmless_is_accepted_silently(config):
    assert load(config).notices == ()


def test_export_flag_is_said():
    notices = load({ZERO: {"stage3_gather_fp16_weights_on_model_save": True}}).notices
    name = f"{ZERO}.stage3_gather_fp16_weights_on_model_save"
    assert notices == (
        f"{name}: no effect: `jzero checkpoint export` writes whole weights of any stage",
    )


def test_checkpoint_keys():
    notices = load({"checkpoint": {"load_universal": True}}).notices
    assert len(notices) == 1 and "jzero checkpoint import-deepspeed" in notices[0]
    with pytest.raises(ConfigError, match="use_node_local_storage: found true.*file system"):
        load({"checkpoint": {"use_node_local_storage": True}})
    with pytest.raises(ConfigError, match="load_from_fp32_weights: found false"):
        load({ZERO: {"load_from_fp32_weights": False}})


def test_prefetch_by_its_keys_and_keywords():
    assert load({}).prefetch_elements == 50_000_000
    config = load({ZERO: {"prefetch_bucket_size": 0, "stage3_max_live_parameters": 1e6}})
    assert (config.prefetch_elements, config.live_elements) == (0, 1_000_000)
    assert not config.notices
    assert load(prefetch_elements=7, live_elements=8).prefetch_elements == 7
