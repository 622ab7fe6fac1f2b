"""Defaults, keywords, "auto", and the resolved configuration."""

import json
import os
import subprocess
import sys

import pytest

from jzero.config import Config, LossScale, load
from jzero.errors import ConfigError, JzeroError

ZERO = "zero_optimization"
FULL = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    ZERO: {
        "stage": 3,
        "overlap_comm": True,
        "stage3_max_live_parameters": 1e9,
        "mics_shard_size": 4,
        "cpu_offload": False,
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "adamw", "params": {"lr": 3e-4, "betas": [0.9, 0.95]}},
    "scheduler": {"type": "warmuplr", "params": {"warmup_num_steps": 10}},
    "gradient_allreduce_op": "sum",
    "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "lm"},
    "amp": {"enabled": False, "opt_level": "O1"},
    "dataloader_drop_last": True,
    "steps_per_print": 10,
}


def test_defaults_of_a_file():
    config = load({})
    assert config.stage == 0
    assert (config.compute_dtype, config.communication_dtype) == ("float32", "float32")
    assert config.accumulation_dtype == "float32"
    assert config.gradient_clipping == 1.0
    assert config.gradient_op == "mean"
    assert config.persistence_threshold == 100_000
    assert config.model_persistence_threshold == sys.maxsize
    assert config.shard_size is None and config.keep_gathered is False
    assert config.loss_scale is None
    assert config.optimizer is None and config.scheduler is None
    assert (config.dump_state, config.drop_last) == (False, False)


def test_defaults_of_keywords():
    config = load(stage=2)
    assert config.stage == 2
    assert config.gradient_clipping == 0.0
    assert config.persistence_threshold == 0
    batch = config.resolve_batch(8, {"data": 8})
    assert (batch.train, batch.micro, batch.accumulation) == (None, None, 1)


def test_everything_as_given():
    config = load(FULL)
    assert config.stage == 3 and config.shard_size == 4
    assert config.compute_dtype == config.communication_dtype == "bfloat16"
    assert config.gradient_op == "sum" and config.drop_last and config.steps_per_print == 10
    assert config.tensorboard.enabled and config.tensorboard.output_path == "runs"
    assert config.optimizer is not None and config.optimizer.type == "AdamW"
    assert config.scheduler is not None and config.scheduler.type == "WarmupLR"


def test_all_keywords():
    config = load(
        stage=1,
        precision="fp16",
        train_batch_size=32,
        micro_batch_size=2,
        accumulation=4,
        gradient_clipping=0.5,
        communication_dtype="fp32",
        accumulation_dtype="fp16",
        persistence_threshold=10,
        shard_size=2,
        keep_gathered=True,
        loss_scale=128,
    )
    assert config.stage == 1 and config.compute_dtype == "float16"
    assert (config.train_batch_size, config.micro_batch_size, config.accumulation) == (32, 2, 4)
    assert config.gradient_clipping == 0.5 and config.persistence_threshold == 10
    assert (config.communication_dtype, config.accumulation_dtype) == ("float32", "float16")
    assert config.shard_size == 2 and config.keep_gathered
    assert config.loss_scale == LossScale(128.0, False, 1000, 2, False, 1.0)


@pytest.mark.parametrize(
    ("name", "keyword", "value"),
    [
        ("train_micro_batch_size_per_gpu", "micro_batch_size", 2),
        ("gradient_accumulation_steps", "accumulation", 4),
        ("communication_data_type", "communication_dtype", "fp32"),
        ("grad_accum_dtype", "accumulation_dtype", "bf16"),
        ("stage3_param_persistence_threshold", "persistence_threshold", 7),
        ("param_persistence_threshold", "persistence_threshold", 7),
        ("mics_shard_size", "shard_size", 2),
    ],
)
def test_keyword_by_the_name_of_its_key(name, keyword, value):
    plain = {"stage": 3, "precision": "bf16"}
    config = load(**plain, **{name: value})
    assert config == load(**plain, **{keyword: value}) != load(**plain)
    assert load(config, **{name: None, keyword: value}) == config
    assert load(config, **{name: None}) is config


def test_dynamic_loss_scale():
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "min_loss_scale": 0.25}
    assert load({"fp16": fp16}).loss_scale == LossScale(16.0, True, 1000, 1, False, 0.25)


def test_keywords_override_a_file():
    config = load(FULL, stage=1, precision="fp32", learning_rate=1e-2, gradient_clipping=0)
    assert config.stage == 1 and config.compute_dtype == "float32"
    assert config.optimizer is not None and config.optimizer.params.lr == 1e-2
    assert config.gradient_clipping == 0.0
    decay = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_max_lr": 1}}
    config = load({**FULL, "scheduler": decay}, learning_rate=2, total_num_steps=7)
    assert config.scheduler is not None
    assert config.scheduler.params.warmup_max_lr == 2.0
    assert config.scheduler.params.total_num_steps == 7


def test_keyword_without_a_use_is_said():
    assert load(FULL, total_num_steps=5).notices[1].startswith("total_num_steps (keyword): no eff")
    assert "there is no scheduler" in load({}, warmup_num_steps=5).notices[0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"stge": 1}, "stge: unknown keyword; did you mean stage?"),
        ({"qqq": None}, "qqq: unknown keyword; known: stage, "),
        ({"dtype": "bf16"}, 'dtype: unknown keyword; use precision="bf16"'),
        ({"bf16": True}, 'bf16: unknown keyword; use precision="bf16"'),
        ({"fp16": True}, 'fp16: unknown keyword; use precision="fp16" (or "bf16")'),
        ({"lr": 1e-3}, "lr: unknown keyword; use learning_rate"),
        ({"reshard_after_forward": False}, "unknown keyword; use keep_gathered (its opposite)"),
        ({"max_grad_norm": 1}, "max_grad_norm: unknown keyword; use gradient_clipping"),
        ({"clip": 1}, "clip: unknown keyword; use gradient_clipping"),
        ({"grad_accum": 4}, "grad_accum: unknown keyword; use accumulation"),
        ({"dump_state": True}, "unknown keyword; it is a key of the configuration: dump_state"),
        (
            {"accumulation": 2, "gradient_accumulation_steps": 2},
            "gradient_accumulation_steps: given together with accumulation, its other name",
        ),
        (
            {"mics_shard_size": "x"},
            "mics_shard_size (keyword, for zero_optimization.mics_shard_size): found",
        ),
        ({"gradient_clipping": -1}, "gradient_clipping (keyword): found -1; allowed"),
        ({"stage": 9}, "stage (keyword, for zero_optimization.stage): found 9; allowed"),
        ({"stage": True}, "stage (keyword, for zero_optimization.stage): found true"),
        ({"precision": "int8"}, "precision: found 'int8'; allowed: "),
        ({"loss_scale": 4}, "loss_scale: only fp16 has a loss scale"),
        ({"learning_rate": 1}, "learning_rate: given, but the configuration has no optimizer"),
        ({"accumulation": 0}, "accumulation (keyword, for gradient_accumulation_steps): found 0"),
        ({"keep_gathered": "yes"}, 'keep_gathered (keyword, for jzero.keep_gathered): found "yes"'),
    ],
)
def test_bad_keywords(keywords, message):
    with pytest.raises(ConfigError) as error:
        load(**keywords)
    assert message in str(error.value)


AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    ZERO: {
        "stage": 3,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
RESOLVING = {
    "micro_batch_size": 4,
    "gradient_clipping": 0.5,
    "precision": "bf16",
    "learning_rate": 2e-4,
    "betas": (0.9, 0.98),
    "eps": 1e-9,
    "weight_decay": 0.1,
    "warmup_num_steps": 10,
    "total_num_steps": 100,
}


def test_auto_is_resolved_by_keywords():
    config = load(AUTO, **RESOLVING)
    assert config.resolve_batch(2, {"data": 2}).train == 8
    assert config.compute_dtype == "bfloat16" and config.gradient_clipping == 0.5
    assert config.persistence_threshold == 100_000
    assert config.optimizer is not None and config.scheduler is not None
    params = config.optimizer.params
    assert (params.lr, params.betas, params.eps) == (2e-4, [0.9, 0.98], 1e-9)
    assert params.weight_decay == 0.1
    assert config.scheduler.params.warmup_max_lr == 2e-4
    said = [line.split(":")[0] for line in config.notices]
    assert f"{ZERO}.reduce_bucket_size" in said
    assert load(AUTO, **RESOLVING, persistence_threshold=3).persistence_threshold == 3


@pytest.mark.parametrize(
    ("missing", "key"),
    [
        ("gradient_clipping", "gradient_clipping"),
        ("precision", "bf16.enabled"),
        ("learning_rate", "optimizer.params.lr"),
        ("betas", "optimizer.params.betas"),
        ("weight_decay", "optimizer.params.weight_decay"),
        ("warmup_num_steps", "scheduler.params.warmup_num_steps"),
        ("total_num_steps", "scheduler.params.total_num_steps"),
    ],
)
def test_auto_without_its_keyword_is_refused_by_name(missing, key):
    keywords = {name: value for name, value in RESOLVING.items() if name != missing}
    with pytest.raises(ConfigError, match=f'^{key}: found "auto" .* pass {missing}='):
        load(AUTO, **keywords)


def test_auto_elsewhere_is_refused():
    with pytest.raises(ConfigError, match='^zero_optimization.overlap_comm: found "auto", which'):
        load({ZERO: {"overlap_comm": "auto"}})


@pytest.mark.parametrize(
    "config",
    [
        load(FULL),
        load({}),
        load(stage=2, precision="fp16", keep_gathered=True),
        load(AUTO, **RESOLVING),
        load({"optimizer": {"type": "Muon"}, "scheduler": {"type": "LRRangeTest"}}),
    ],
)
def test_resolved_configuration_is_json_and_loads_to_the_same(config):
    data = json.loads(json.dumps(config.resolved()))
    again = load(data)
    assert again == config and hash(again) == hash(config)
    assert again.resolved() == config.resolved()
    size = {"data": 8}
    if config.train_batch_size or config.micro_batch_size or not config.optimizer:
        try:
            expected = config.resolve_batch(8, size)
        except ConfigError:
            with pytest.raises(ConfigError):
                again.resolve_batch(8, size)
        else:
            assert again.resolve_batch(8, size) == expected


def test_saved_configuration_loads_to_the_same(tmp_path):
    path = tmp_path / "run" / "config.json"
    for config in (load(stage=1), load(FULL)):
        config.save(path)
        assert load(path) == config
        assert [file.name for file in path.parent.iterdir()] == ["config.json"]
        assert path.stat().st_mode & 0o600 == 0o600


def test_configuration_that_cannot_be_saved_says_where(tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file" / "config.json"):
        with pytest.raises(JzeroError, match="cannot be written: ") as error:
            load().save(path)
        assert str(error.value).startswith(str(path))
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_resolved_configuration_names_what_holds():
    data = load(FULL).resolved()
    assert data["communication_data_type"] == "bfloat16"
    assert data["data_types"]["grad_accum_dtype"] == "float32"
    assert data["scheduler"]["params"]["warmup_max_lr"] == 3e-4
    assert data["optimizer"]["params"]["weight_decay"] == 0.0
    assert data["gradient_clipping"] == 1.0


def test_a_config_is_taken_as_it_is():
    config = load(FULL)
    assert load(config) is config
    assert load(config, stage=None) is config
    changed = load(config, stage=0, precision="fp32")
    assert changed.stage == 0 and changed.communication_dtype == "float32"
    assert changed.notices == config.notices
    assert changed != config and isinstance(changed, Config)
    with pytest.raises(ConfigError, match="unknown keyword"):
        load(config, stagee=None)


def test_import_touches_no_device():
    env = {**os.environ, "JAX_PLATFORMS": "no_such_platform"}
    code = "import jzero.config as c; c.load({'optimizer': {'type': 'Adam'}})"
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
