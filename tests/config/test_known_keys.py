"""Every key of DeepSpeed has a verdict, and the documentation says what the schema says."""

import pathlib

import pytest
from key_table import renew, verdicts

HERE = pathlib.Path(__file__).parent
LINES = (HERE / "deepspeed_keys.txt").read_text().splitlines()
KEYS = [line for line in LINES if line and not line.startswith("#")]


@pytest.mark.parametrize("path", KEYS)
def test_every_key_has_a_verdict(path):
    word, reason = verdicts()[path]
    assert word == "section" or reason


def test_documentation_is_what_the_schema_says():
    page = HERE.parents[1] / "docs" / "deepspeed.md"
    text = page.read_text(encoding="utf-8")
    assert renew(text) == text, "run: python tests/config/key_table.py docs/deepspeed.md"
