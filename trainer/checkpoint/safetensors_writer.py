"""Safetensors files whose layout is known before their tensors are gathered, written and hashed in one pass.

The safetensors library's writer needs all tensors at once, and the file would have to be read again to hash it; here a
rank holds one file in memory. Format: https://huggingface.co/docs/safetensors
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from wattwatch.trainer.checkpoint.complete import INDEX_FILE, SINGLE_FILE, FileRecord

ALIGNMENT: Final = 8  # of the first tensor, as in the library
WRITE_BYTES: Final = 16 << 20  # per write. Chosen: still in the CPU's cache when it is hashed
DTYPE_NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor as it will be saved."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class SafetensorsLayout:
    """The position of every tensor in a file."""

    header: bytes  # including the 8 bytes with its length
    tensors: tuple[TensorSpec, ...]  # in the order of the file: wide elements first, so that each is aligned
    tensor_bytes: int

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor, flat, as a view of `memory` (uint8, tensor_bytes long)."""
        found, reached = {}, 0
        for tensor in self.tensors:
            found[tensor.name] = memory[reached : reached + tensor.bytes].view(tensor.dtype)
            reached += tensor.bytes
        return found


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One file and the rank that writes it."""

    name: str
    owner: int
    layout: SafetensorsLayout


def safetensors_layout(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> SafetensorsLayout:
    # By width, as the library does: then every tensor starts at a multiple of its element size.
    ordered = tuple(sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    reached = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [reached, reached + tensor.bytes],
        }
        reached += tensor.bytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % ALIGNMENT)
    return SafetensorsLayout(len(raw).to_bytes(8, "little") + raw, ordered, reached)


def plan_weights_files(
    tensors: Sequence[TensorSpec], file_bytes: int, world: int, ranks_per_node: int
) -> tuple[WeightsFile, ...]:
    """Which tensor goes into which file, and which rank writes it: every rank computes the same, without asking.

    Files contain at most `file_bytes` of tensors, or one tensor that is larger; named as on the Hub.
    Consecutive files go to different nodes first, then to other ranks of the same node, so that all links to the
    storage are used: one rank that writes everything leaves 255 others waiting (Automodel#2279).
    """
    writers = sorted(range(world), key=lambda rank: (rank % ranks_per_node, rank // ranks_per_node))
    contents: list[list[TensorSpec]] = [[]]
    bytes_left = file_bytes
    for tensor in tensors:
        if tensor.bytes > bytes_left and contents[-1]:
            contents.append([])
            bytes_left = file_bytes
        contents[-1].append(tensor)
        bytes_left -= tensor.bytes
    names = [f"model-{number:05d}-of-{len(contents):05d}.safetensors" for number in range(1, len(contents) + 1)]
    if len(contents) == 1:
        names = [SINGLE_FILE]
    return tuple(
        WeightsFile(name, writers[number % world], safetensors_layout(content, {"format": "pt"}))
        for number, (name, content) in enumerate(zip(names, contents, strict=True))
    )


def build_index_file(files: Sequence[WeightsFile]) -> dict[str, bytes]:
    """The index by its name; {} if there is only one file, which needs none."""
    if len(files) == 1:
        return {}
    mapping = {tensor.name: file.name for file in files for tensor in file.layout.tensors}
    total = sum(file.layout.tensor_bytes for file in files)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}, indent=2)
    return {INDEX_FILE: text.encode()}


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, copied to the host if they are on a device."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_and_sync(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """Writes a new file, which is on disk when this returns.

    Raises OSError that names `path`: a full disk may show at open, write or fsync. Fails if `path` exists: nothing else
    writes into a staged directory.
    """
    digest, total = hashlib.sha256(), 0
    try:
        with open(path, "xb", buffering=0) as file:
            for piece in pieces:
                for begin in range(0, len(piece), WRITE_BYTES):
                    part = memoryview(piece)[begin : begin + WRITE_BYTES]
                    digest.update(part)
                    while part:  # an unbuffered write may be partial
                        part = part[file.write(part) :]
                total += len(piece)
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # errors of write and fsync do not name the file
        raise
    return FileRecord(total, digest.hexdigest())
