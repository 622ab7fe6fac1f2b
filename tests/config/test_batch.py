"""The batch identity: DeepSpeed's table, with nothing rounded."""

import pytest

from jzero.config import Batch, load
from jzero.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
AXES = {"replica": 2, "data": 4}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({TRAIN: 64, MICRO: 4, STEPS: 2}, Batch(64, 4, 2)),
        ({TRAIN: 64, MICRO: 4}, Batch(64, 4, 2)),
        ({TRAIN: 64, STEPS: 2}, Batch(64, 4, 2)),
        ({MICRO: 4, STEPS: 2}, Batch(64, 4, 2)),
        ({TRAIN: 64}, Batch(64, 8, 1)),
        ({MICRO: 4}, Batch(32, 4, 1)),
        ({TRAIN: 64, MICRO: None, STEPS: "auto"}, Batch(64, 8, 1)),
    ],
)
def test_table(given, expected):
    assert load(given).resolve_batch(8, AXES) == expected
    names = {TRAIN: "train_batch_size", MICRO: "micro_batch_size", STEPS: "accumulation"}
    keywords = {names[key]: value for key, value in given.items() if value != "auto"}
    assert load(**keywords).resolve_batch(8, AXES) == expected


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({TRAIN: 256, MICRO: 4, STEPS: 8}, "256 is not 4 x 8 x 2 = 64"),
        ({TRAIN: 30, MICRO: 4}, "30 is not a multiple of 4 x 2 = 8"),
        ({TRAIN: 30, STEPS: 4}, "30 is not a multiple of 4 x 2 = 8"),
        ({TRAIN: 1}, "1 is not a multiple of 1 x 2 = 2"),
        ({STEPS: 4}, "cannot be inferred"),
        ({}, "cannot be inferred"),
    ],
)
def test_message_names_the_numbers_the_axes_the_keys_and_a_fix(given, problem):
    with pytest.raises(ConfigError) as error:
        load(given).resolve_batch(2, {"data": 2})
    text = str(error.value)
    assert text.startswith(f"train_batch_size: {problem}: ")
    for key in (TRAIN, MICRO, STEPS):
        assert f"{key}={given.get(key, '(unset)')}" in text
    assert "data-parallel size=2 (mesh axes: data=2)" in text
    assert f"given: {', '.join(given) or 'none of them'}; " in text
    assert "set train_batch_size to" in text or "give train_batch_size or" in text
    assert "\n" not in text


def test_suggested_batch_sizes_work():
    with pytest.raises(ConfigError, match=r"such as 24 or 32"):
        load({TRAIN: 30, MICRO: 4}).resolve_batch(2, {"data": 2})
    assert load({TRAIN: 24, MICRO: 4}).resolve_batch(2, {"data": 2}) == Batch(24, 4, 3)
    with pytest.raises(ConfigError, match=r"such as 8 or 16"):
        load({TRAIN: 3, MICRO: 4}).resolve_batch(2, {"data": 2})


def test_keywords_alone_need_no_batch_keys():
    assert load(stage=1).resolve_batch(8, AXES) == Batch(None, None, 1)
    assert load(accumulation=4).resolve_batch(8, AXES) == Batch(None, None, 4)


def test_one_device():
    assert load({MICRO: 3}).resolve_batch(1, {}) == Batch(3, 3, 1)
    with pytest.raises(ConfigError, match="mesh axes: one device"):
        load({}).resolve_batch(1, {})
