"""A model's directory with a tokenizer, and without weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


def write_model(directory: Path, tokenizer: Path, tied: bool) -> Path:
    from tests.trainer.checkpoint.scenarios import config

    shutil.copytree(tokenizer, directory)
    config(tied).save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": 0}\n')
    (directory / "pytorch_model.bin").write_bytes(b"weights that must not be copied")
    return directory


@pytest.fixture(scope="session")
def model(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "untied", tokenizer, tied=False)


@pytest.fixture(scope="session")
def tied_model(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tied", tokenizer, tied=True)
