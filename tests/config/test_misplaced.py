"""Unknown, misspelt, misplaced and retired keys."""

import pytest

from jzero.config import load
from jzero.errors import ConfigError

ZERO = "zero_optimization"
ADAM = {"type": "Adam"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"zero_optimisation": {}},
            "zero_optimisation: unknown key; did you mean zero_optimization?",
        ),
        ({ZERO: {"stge": 3}}, f"{ZERO}.stge: unknown key; did you mean stage?"),
        ({"stage": 3}, f"stage: unknown here; it belongs in {ZERO}.stage"),
        ({ZERO: {"aio": {}}}, f"{ZERO}.aio: unknown here; it belongs in aio at the top level"),
        ({ZERO: {"bf16": {}}}, f"{ZERO}.bf16: unknown here; it belongs in bf16 at the top level"),
        (
            {"offload_optimizer": {}},
            f"offload_optimizer: unknown here; it belongs in {ZERO}.offload_optimizer",
        ),
        (
            {ZERO: {"offload_optimizer": {"device": "none", "offload_param": {}}}},
            f"{ZERO}.offload_optimizer.offload_param: unknown here; it belongs in "
            f"{ZERO}.offload_param",
        ),
        ({"overlap_comm": True}, f"overlap_comm: unknown here; it belongs in {ZERO}.overlap_comm"),
        (
            {"fp16": {"gradient_clipping": 1}},
            "fp16.gradient_clipping: unknown here; it belongs in gradient_clipping at the top",
        ),
        ({"allgather_size": 5}, f"allgather_size: unknown here; it belongs in {ZERO}.allgather"),
        ({"lr": 1}, "lr: unknown here; it belongs in optimizer.params.lr"),
        ({"optimizer": {**ADAM, "lr": 1}}, "optimizer.lr: unknown here; it belongs in optimizer.p"),
        (
            {"optimizer": {**ADAM, "params": {"learning_rate": 1}}},
            "optimizer.params.learning_rate: unknown here; it belongs in optimizer.params.lr",
        ),
        (
            {"optimizer": {**ADAM, "params": {"weight_dcay": 1}}},
            "optimizer.params.weight_dcay: unknown key; did you mean weight_decay?",
        ),
        (
            {"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}},
            "optimizer.params.eps: unknown key; optimizer.params has lr, betas, weight_decay",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
            "scheduler.params.warmup_steps: unknown key; did you mean warmup_num_steps?",
        ),
        (
            {"warmup_num_steps": 3},
            "warmup_num_steps: unknown here; it belongs in scheduler.params.warmup_num_steps",
        ),
        (
            {"activation_checkpointing": {"partitioned_activations": True}},
            "partitioned_activations: unknown key; did you mean partition_activations?",
        ),
        (
            {"timers": {"throughput": {"enable": True}}},
            "timers.throughput.enable: unknown key; did",
        ),
        ({"zzz": 1}, "zzz: unknown key; known are train_batch_size"),
        (
            {"optimizer": {**ADAM, "params": {"max_grad_norm": 1}}},
            "optimizer.params.max_grad_norm: refused: clipping is not the optimizer's; use the "
            "top-level gradient_clipping",
        ),
        ({"optimizer": {"type": "OneBitAdam"}}, 'optimizer.type: found "OneBitAdam"; refused: it '),
        ({"optimizer": {"type": "musgd"}}, 'optimizer.type: found "musgd"; refused: it needs'),
        ({"optimizer": {"type": "AdamWW"}}, "did you mean AdamW?"),
        ({"optimizer": {"type": "Shampoo"}}, "for another, give an Optax transformation yourself"),
        ({"scheduler": {"type": "WarmupLr2"}}, "did you mean WarmupLR?"),
        (
            {"optimizer": {**ADAM, "params": {"amsgrad": True}}},
            "optimizer.params.amsgrad: found true; refused: ",
        ),
        (
            {"optimizer": {**ADAM, "params": {"bias_correction": False}}},
            "optimizer.params.bias_correction: found false; not supported yet: ",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"dampening": 0.1}}},
            "optimizer.params.dampening: found 0.1; not supported yet: ",
        ),
        (
            {
                "scheduler": {
                    "type": "OneCycle",
                    "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 1},
                }
            },
            "scheduler.params.cycle_momentum: found true; refused: ",
        ),
    ],
)
def test_message(config, message):
    with pytest.raises(ConfigError) as error:
        load(config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {ZERO: {"prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},
            f"{ZERO}.prefetch_bucket_size: given together with {ZERO}.stage3_prefetch_bucket_size",
        ),
        ({"bf16": {}, "bfloat16": {}}, "bfloat16: given together with bf16"),
        (
            {ZERO: {"cpu_offload": False, "offload_optimizer": {}}},
            f"{ZERO}.cpu_offload: given together with {ZERO}.offload_optimizer",
        ),
        (
            {ZERO: {"cpu_offload": True}},
            f'{ZERO}.cpu_offload: found "cpu"; not supported yet',
        ),
        ({ZERO: {"cpu_offload_params": "true"}}, f"{ZERO}.cpu_offload_params: found"),
        ({ZERO: {"cpu_offload": 1}}, f"{ZERO}.cpu_offload: found 1; allowed: true or false"),
        ({ZERO: "yes"}, f"{ZERO}: found 'yes'; allowed: true or false"),
        (
            {ZERO: {"param_persistence_threshold": 0.5}},
            f"{ZERO}.param_persistence_threshold: found 0.5; allowed: a whole number",
        ),
    ],
)
def test_second_spellings_refused(config, message):
    with pytest.raises(ConfigError) as error:
        load(config)
    assert message in str(error.value)


def test_second_spellings_read():
    assert load({"bfloat16": {"enabled": True}}).compute_dtype == "bfloat16"
    config = load({ZERO: {"stage": 3, "param_persistence_threshold": 7}})
    assert config.persistence_threshold == 7
    assert config.notices == ()


def test_bare_boolean_is_stage_one():
    config = load({ZERO: True, "allgather_size": 100})
    assert config.stage == 1
    assert config.resolved()[ZERO]["allgather_bucket_size"] == 100
    assert "deprecated" in config.notices[0]
    assert load({ZERO: "false"}).stage == 0


def test_scheduler_alone_is_said():
    assert load({"scheduler": {"type": "WarmupLR"}}).notices[0].startswith("scheduler: no effect")
    assert load({"optimizer": ADAM, "scheduler": {"type": "WarmupLR"}}).notices == ()


@pytest.mark.parametrize(
    "path",
    [f"{ZERO}.grad_hooks", f"{ZERO}.cpu_offload_use_pin_memory", "aio.thread_count"],
)
def test_retired_keys_are_accepted_with_a_notice(path):
    section, name = path.split(".")
    notices = load({section: {name: True}}).notices
    assert [line.split(":")[0] for line in notices] == [path]


def test_params_without_effect_say_so():
    params = {"torch_adam": True, "adam_w_mode": False}
    notices = load({"optimizer": {"type": "AdamW", "params": params}}).notices
    assert [line.split(":")[0] for line in notices] == [
        "optimizer.params.adam_w_mode",
        "optimizer.params.torch_adam",
    ]
