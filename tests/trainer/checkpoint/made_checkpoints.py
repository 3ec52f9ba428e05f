"""Small complete checkpoints, written without torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from wattwatch.trainer.checkpoint.complete import Completion, FileRecord, completion_text


def tensors_file(tensors: dict[str, bytes], offset: int = 0) -> bytes:
    """A safetensors file of bytes; with an `offset` its header describes more bytes than there are."""
    header, reached = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [reached, reached + len(data) + offset]}
        reached += len(data) + offset
    raw = json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + b"".join(tensors.values())


def contents(optimizer: bool = True) -> dict[str, bytes]:
    """Every file but the marker."""
    files = {
        "config.json": b'{"model_type": "made"}',
        "model-00001-of-00002.safetensors": tensors_file({"a": b"12345", "b": b""}),
        "model-00002-of-00002.safetensors": tensors_file({"c": b"678"}),
    }
    mapping = {"a": "model-00001-of-00002.safetensors", "b": "model-00001-of-00002.safetensors"}
    mapping["c"] = "model-00002-of-00002.safetensors"
    files["model.safetensors.index.json"] = json.dumps({"metadata": {"total_size": 8}, "weight_map": mapping}).encode()
    if optimizer:
        for rank in range(2):
            files[f"optimizer/rank-{rank:05d}.safetensors"] = tensors_file({"master.a": b"1234"})
    return files


def completion_of(files: dict[str, bytes], step: int = 500, optimizer: bool = True) -> Completion:
    facts = {name: FileRecord(len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    return Completion(1, "made", step, 1000, 0, 64_000, 2, "gate", "blocks", optimizer, 1.5e9, facts)


def write(directory: Path, files: dict[str, bytes], completion: Completion | None) -> Path:
    for name, data in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)
    if completion is not None:
        (directory / "COMPLETE.json").write_text(completion_text(completion))
    return directory


def make_checkpoint(checkpoints: Path, step: int = 500) -> Path:
    files = contents()
    return write(checkpoints / f"step-{step:08d}", files, completion_of(files, step))


def relist(directory: Path, name: str, data: bytes) -> None:
    """Changes a file and its entry in the marker."""
    from wattwatch.trainer.checkpoint.complete import read_completion

    (directory / name).write_bytes(data)
    completion = read_completion(directory)
    facts = completion.files | {name: FileRecord(len(data), hashlib.sha256(data).hexdigest())}
    (directory / "COMPLETE.json").write_text(completion_text(replace(completion, files=facts)))
