"""Errors of a single rank, without a process group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.trainer.train.tiny_model import write_blocks, write_model
from wattwatch.trainer.cli import describe_manifest
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_all
from wattwatch.trainer.pack.blocks import PackedBlocks
from wattwatch.trainer.pack.manifest import PackManifest
from wattwatch.trainer.run_directory import RankExit, RankExitCode, read_rank_exit
from wattwatch.trainer.settings import parse_job_settings, read_job_file
from wattwatch.trainer.train.model import build_model, load_weights
from wattwatch.trainer.train.rank import describe_failure, reserve_exit_file, write_exit_file

MINIMUM = {"run": "r", "data": "d", "model": "m"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), tied=False)


def test_a_job_file_that_is_a_fifo_or_a_device_is_an_error(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)  # opening it would wait for a writer that never comes
    for path, words in ((fifo, "a FIFO"), (Path("/dev/zero"), "a device")):
        with pytest.raises(UserError, match=f"{path}: it is {words}"):
            read_job_file(str(path))


def test_counts_of_one_are_singular() -> None:
    ones: dict[str, Any] = dict.fromkeys(PackManifest.__annotations__, 1)
    manifest = PackManifest(**ones)
    text = describe_manifest(manifest)
    assert "1 row (" in text
    assert "1 token, 1 block of 1 token, 1 token dropped" in text
    assert [format_all(n, "step") for n in (1, 1500)] == ["the only step is", "all 1,500 steps are"]


def spoiled(model: Path, directory: Path, name: str, tensor: torch.Tensor | None) -> Path:
    """A copy of the model's files with one tensor replaced or left out."""
    tensors = load_file(model / "model.safetensors")
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    directory.mkdir()
    (directory / "config.json").write_bytes((model / "config.json").read_bytes())
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (None, "no weights for model.norm.weight"),
        (
            torch.ones(32, dtype=torch.int8),
            "model.norm.weight has type I8; convert it first to one of F64, F32, BF16, F16",
        ),
        (torch.ones(31), "model.norm.weight has shape (31,), but the model needs (32,)"),
    ],
)
def test_weights_that_do_not_fit_are_named(
    tensor: torch.Tensor | None, message: str, model: Path, tmp_path: Path
) -> None:
    empty = build_model(model).to_empty(device="cpu")
    with pytest.raises(UserError, match=message.replace("(", r"\(").replace(")", r"\)")):
        load_weights(empty, spoiled(model, tmp_path / "spoiled", "model.norm.weight", tensor))


def test_a_quantized_model_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="the model is quantized"):
        build_model(tmp_path)


def test_record_starts_of_another_file_are_refused(tmp_path: Path) -> None:
    data = write_blocks(tmp_path, [4])
    starts = data / "rank-00000.starts.i64"
    starts.write_bytes(bytes(reversed(starts.read_bytes())))
    with pytest.raises(UserError, match="truncated, or it was written for a different token file"):
        PackedBlocks(data, 0)


def test_the_exit_file_uses_the_disk_space_reserved_for_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-00003.ending.json"
    reserve_exit_file(path)
    reserved = next(tmp_path.iterdir())
    assert read_rank_exit(path) is None
    before = reserved.stat().st_ino
    write_exit_file(path, RankExit(RankExitCode.FAILED, "No space left on device", 21))
    assert read_rank_exit(path) == RankExit(RankExitCode.FAILED, "No space left on device", 21)
    assert path.stat().st_ino == before  # no new file, no new block
    assert list(tmp_path.iterdir()) == [path]


def test_a_lost_peer_is_a_consequence_and_gloos_greeting_is_removed(capsys: pytest.CaptureFixture[str]) -> None:
    rank_exit = describe_failure(
        RuntimeError("[gloo/tcp/pair.cc:554] Connection closed by peer. This may indicate a crash. GLHF!")
    )
    assert (rank_exit.code, rank_exit.follows) == (RankExitCode.FAILED, True)
    assert rank_exit.why.endswith("Connection closed by peer)")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"train": {"beta1": 1.0}}, "train.beta1: expected from 0 to less than 1, found 1.0"),
        ({"train": {"learning_rate": 1e39}}, "train.learning_rate: expected more than 0 and at most 1"),
        ({"train": {"epsilon": 1e-300}}, "train.epsilon: expected from 1e-30 to 1"),
        ({"train": {"step_timeout_seconds": 1e15}}, "at most 30 days"),
        ({"launch": {"environment": {"A=B": "1"}}}, "launch.environment.'A=B': not a valid environment variable"),
        ({"launch": {"environment": {"A": "\0"}}}, "launch.environment.'A': not a valid environment variable"),
        ({"launch": {"environment": {"RANK": "1"}}}, "launch.environment.RANK: the launcher sets this variable itself"),
        ({"train": {"warmup_stps": 1}}, "train.warmup_stps: unknown key, did you mean warmup_steps?"),
    ],
)
def test_invalid_settings_are_named_with_the_valid_range(table: dict[str, object], message: str) -> None:
    with pytest.raises(UserError) as refused:
        parse_job_settings(MINIMUM | table, "job.toml")
    assert message in str(refused.value)
