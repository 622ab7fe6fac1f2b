"""What values are read, what is refused, and the words of the refusal."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jzero.config import load
from jzero.errors import ConfigError

ZERO = "zero_optimization"


@pytest.mark.parametrize("stage", [2, 2.0, "2", " 2.0 ", np.int32(2), np.float32(2)])
def test_stage_two_in_any_spelling(stage):
    assert load({ZERO: {"stage": stage}}).stage == 2


def test_absent_stage_is_zero():
    assert load({}).stage == load({ZERO: {}}).stage == load({ZERO: None}).stage == 0


@pytest.mark.parametrize("value", [5e8, "5e8", 500_000_000, "500000000"])
def test_whole_numbers_in_floating_notation(value):
    config = load({ZERO: {"stage3_model_persistence_threshold": value}})
    assert config.model_persistence_threshold == 500_000_000
    assert isinstance(config.model_persistence_threshold, int)


@pytest.mark.parametrize(("value", "read"), [("true", True), ("False", False), (np.True_, True)])
def test_flags_as_text(value, read):
    assert load({"dump_state": value}).dump_state is read


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("fp32", "float32"),
        ("bf16", "bfloat16"),
        ("half", "float16"),
        ("torch.bfloat16", "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.float16, "float16"),
    ],
)
def test_dtypes_in_any_spelling(spelling, name):
    assert load({"communication_data_type": spelling}).communication_dtype == name


def test_paths_are_text():
    config = load({"tensorboard": {"output_path": pathlib.Path("a") / "b"}})
    assert config.tensorboard.output_path == str(pathlib.Path("a") / "b")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({ZERO: {"stage": True}}, "zero_optimization.stage: found true; allowed: a whole number"),
        (
            {ZERO: {"stage": 4}},
            "zero_optimization.stage: found 4; allowed: a whole number at least",
        ),
        ({ZERO: {"stage": 1.5}}, "zero_optimization.stage: found 1.5; allowed"),
        ({ZERO: {"stage": "three"}}, 'zero_optimization.stage: found "three"; allowed'),
        ({ZERO: {"stage": None}}, "zero_optimization.stage: found null; allowed"),
        ({ZERO: [3]}, "zero_optimization: found [3]; allowed: an object {...}"),
        ({"bf16": True}, "bf16: found true; allowed: an object {...}"),
        ({"dump_state": "yes"}, 'dump_state: found "yes"; allowed: true or false'),
        ({"dump_state": 1}, "dump_state: found 1; allowed: true or false"),
        ({"train_batch_size": 0}, "train_batch_size: found 0; allowed: a whole number at least 1"),
        ({"train_batch_size": 10**400}, "train_batch_size: found 1000"),
        ({"train_batch_size": 1e300}, "train_batch_size: found 1e+300; allowed"),
        ({"gradient_clipping": -1}, "gradient_clipping: found -1; allowed: a number at least 0"),
        ({"gradient_clipping": 10**400}, "gradient_clipping: found 1000"),
        ({"gradient_clipping": "NaN"}, 'gradient_clipping: found "NaN"; allowed: a number'),
        ({"gradient_clipping": float("inf")}, "gradient_clipping: found inf; allowed"),
        ({"gradient_allreduce_op": "max"}, 'found "max"; allowed: "mean", "sum"'),
        ({"communication_data_type": "int8"}, 'found "int8"; allowed: "fp32", "bf16" or "fp16"'),
        ({"communication_data_type": {}}, "communication_data_type: found {}; allowed"),
        ({"fp16": {"loss_scale": True}}, "fp16.loss_scale: found true; allowed: a number"),
        (
            {"fp16": {"min_loss_scale": 0}},
            "fp16.min_loss_scale: found 0; allowed: a number above 0",
        ),
        ({"fp16": {"loss_scale_window": 0}}, "fp16.loss_scale_window: found 0; allowed"),
        ({"fp16": {"initial_scale_power": 2000}}, "fp16.initial_scale_power: found 2000; allowed"),
        ({"checkpoint": {"tag_validation": "x"}}, 'allowed: "Ignore", "Warn", "Fail"'),
        ({"comms_logger": {"prof_ops": "x"}}, 'prof_ops: found "x"; allowed: a list of text'),
        ({"tensorboard": {"job_name": 3}}, "tensorboard.job_name: found 3; allowed: text"),
        ({"optimizer": {}}, "optimizer.type: must be given"),
        ({"optimizer": {"type": "Adam", "params": 3}}, "optimizer.params: found 3; allowed"),
        (
            {"optimizer": {"type": "Adam", "params": {"betas": [0.9, 1.0]}}},
            "optimizer.params.betas: found [0.9, 1.0]; allowed: a list of two numbers",
        ),
        (
            {"scheduler": {"type": "WarmupDecayLR"}},
            "scheduler.params.total_num_steps: must be given",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
            "found 0; allowed",
        ),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "found true together with bf16"),
        (
            {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp32"}},
            'data_types.param_dtype: found "float32", but fp16 and bf16 make it "bfloat16"',
        ),
        ({ZERO: {"mics_shard_size": -2}}, "zero_optimization.mics_shard_size: found -2; allowed"),
        (
            {"optimizer": {"type": "SGD", "params": {"nesterov": True}}},
            "optimizer.params.nesterov: found true with momentum 0",
        ),
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {"warmup_min_lr": 2, "warmup_max_lr": 1},
                }
            },
            "the lower rate 2 is above the upper rate 1",
        ),
    ],
)
def test_refused_values(config, message):
    with pytest.raises(ConfigError) as error:
        load(config)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_several_errors_report_the_first_and_count_the_rest():
    with pytest.raises(ConfigError, match=r"; .* \(and 1 more\)$"):
        load({"dump_state": 3, "gradient_clipping": -1, "train_batch_size": 4})


def test_source_is_not_changed():
    given = {ZERO: {"cpu_offload": False, "prefetch_bucket_size": 5}, "bfloat16": {"enabled": True}}
    before = repr(given)
    load(given, stage=2, precision="fp32")
    assert repr(given) == before
