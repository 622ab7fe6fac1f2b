"""The command makes a checkpoint and says what it is made of."""

from pathlib import Path

import deepspeed_net

from jzero.checkpoint import manifest
from jzero.cli import main


def run(directory: Path, *arguments: object) -> int:
    here = deepspeed_net.__file__
    model = ["--model", f"{here}:workload", "--name-map", f"{here}:name_map"]
    return main(["checkpoint", "import-deepspeed", *model, *map(str, (directory, *arguments))])


def test_it_imports_and_says_what(saves, tmp_path, capsys):
    assert run(tmp_path, saves / "stage2_bf16") == 0
    said = capsys.readouterr().out
    assert "step_00000004: step 4, 11 leaves: parameters, moments and steps" in said
    assert "2 leaves were bfloat16 and are float32" in said  # those that were not trained
    assert "as in a new run: progress/rng" in said
    saved = manifest.read(tmp_path / "step_00000004")
    assert "DeepSpeed 0.19.8" in saved.facts.source
    assert saved.facts.applied_steps == 4


def test_parameters_alone(saves, tmp_path, capsys):
    assert run(tmp_path, saves / "stage2", "--parameters-only") == 0
    assert "11 leaves: parameters alone" in capsys.readouterr().out


def test_first_values_where_they_are_wanted(saves, tmp_path, capsys):
    model = ["--model", f"{deepspeed_net.__file__}:with_average"]
    assert run(tmp_path, saves / "stage2_bf16", *model) == 2
    assert "no counterpart of optimizer/1/ema/" in capsys.readouterr().err
    assert run(tmp_path, saves / "stage2_bf16", *model, "--first-values") == 0
    assert "as in a new run: optimizer/1/" in capsys.readouterr().out


def test_what_it_refuses_is_one_sentence(saves, tmp_path, capsys):
    assert run(tmp_path, saves / "stage3") == 2
    said = capsys.readouterr().err
    assert "needs empty, which is not there" in said and said.count("\n") == 1
