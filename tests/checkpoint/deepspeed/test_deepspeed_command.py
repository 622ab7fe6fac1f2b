"""The command makes a checkpoint and says what it is made of."""

import argparse
from pathlib import Path

import deepspeed_net
import pytest

from jzero.checkpoint import manifest
from jzero.cli import checkpoint_deepspeed
from jzero.errors import JzeroError


def run(directory: Path, *arguments: object):
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--name-map")
    checkpoint_deepspeed.add_arguments(parser)
    here = deepspeed_net.__file__
    model = ["--model", f"{here}:workload", "--name-map", f"{here}:name_map"]
    checkpoint_deepspeed.run_import(parser.parse_args([*map(str, (directory, *arguments)), *model]))


def test_it_imports_and_says_what(saves, tmp_path, capsys):
    run(tmp_path, saves / "stage2_bf16")
    said = capsys.readouterr().out
    assert "step_00000004: step 4, 11 leaves: parameters, moments and steps" in said
    assert "2 leaves were bfloat16 and are float32" in said  # those that were not trained
    assert "as in a new run: progress/rng" in said
    saved = manifest.read(tmp_path / "step_00000004")
    assert "DeepSpeed 0.19.8" in saved.facts.source
    assert saved.facts.applied_steps == 4


def test_parameters_alone(saves, tmp_path, capsys):
    run(tmp_path, saves / "stage2", "--parameters-only")
    assert "11 leaves: parameters alone" in capsys.readouterr().out


def test_what_it_refuses_is_one_sentence(saves, tmp_path):
    with pytest.raises(JzeroError, match="needs empty, which is not there"):
        run(tmp_path, saves / "stage3")
