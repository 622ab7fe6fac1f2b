"""Checkpoints that DeepSpeed 0.19.8 itself wrote: see scripts/deepspeed_fixtures.py."""

import tarfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def saves(tmp_path_factory) -> Path:
    """The folder of the script's cases, which no test changes."""
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(Path(__file__).with_name("files.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder
