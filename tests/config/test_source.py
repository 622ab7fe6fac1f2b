"""Reading files: what JSON is accepted, and one clear line for each thing that is not."""

import pytest

from jzero.config import load
from jzero.config.source import parse
from jzero.errors import ConfigError


def test_comments_and_trailing_commas():
    text = """
    {
      // a line, # with marks inside
      "tensorboard": {"job_name": "a // b # c /* d */ ,}", "output_path": "x\\"//y",},  # here too
      /* over
         lines */
      "steps_per_print": 10, // last
    }
    """
    data = parse(text)
    assert data["steps_per_print"] == 10
    assert data["tensorboard"] == {"job_name": "a // b # c /* d */ ,}", "output_path": 'x"//y'}


def test_syntax_error_names_line_and_column(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{\n  // first\n  "bf16": {"enabled": tru}\n}\n')
    with pytest.raises(ConfigError, match=r"ds\.json, line 3, column 23: not valid JSON"):
        load(file)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ('{"fp16": {}, "fp16": {}}', "fp16"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', r"zero_optimization\.stage"),
        ('{"a": [{"b": 1}, {"b": 1, "c": 2, "b": 3}]}', r"a\[1\]\.b"),
    ],
)
def test_repeated_key_names_its_path(text, path):
    with pytest.raises(ConfigError, match=rf"^{path}: given more than once"):
        parse(text)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n ", "is empty"),
        (b"[]", "holds a list"),
        (b'"x"', "holds text"),
        (b"3", "holds a number"),
        (b"null", "holds null"),
        (b"true", "holds a boolean"),
        (b"\xff\xfe{", "not UTF-8"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": [,]}', "column 8: not valid JSON"),
        (b'{"a": [1,,]}', "not valid JSON"),
        (b'{"a": 1} // x\n}', "line 2, column 1: not valid JSON"),
        (b'{"a": "no end}', "not valid JSON"),
        (b"{'a': 1}", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply|not valid JSON"),
        (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "train_batch_size|not valid JSON"),
        (b'{"train_batch_size": NaN}', "^train_batch_size: found nan; allowed: a finite number"),
        (b'{"gradient_clipping": Infinity}', "^gradient_clipping: found inf"),
        (b'{"amp": {"x": [-Infinity]}}', r"^amp\.x\[0\]: found -inf"),
    ],
)
def test_bad_file_is_one_clear_line(tmp_path, content, message):
    file = tmp_path / "ds.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as error:
        load(str(file))
    assert "\n" not in str(error.value)


def test_missing_file_directory_and_other_things(tmp_path):
    with pytest.raises(ConfigError, match="no such configuration file"):
        load(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        load("a\0b")
    with pytest.raises(ConfigError, match="found JSON text; allowed: a dict or a path"):
        load('{"bf16": {}}')
    with pytest.raises(ConfigError, match="found int; allowed: a dict"):
        load(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="found the key 3; keys are text"):
        load({"fp16": {3: 4}})


def test_byte_order_mark_is_accepted(tmp_path):
    file = tmp_path / "ds.json"
    file.write_bytes(b'\xef\xbb\xbf{"zero_optimization": {"stage": 1}}')
    assert load(file).stage == 1
