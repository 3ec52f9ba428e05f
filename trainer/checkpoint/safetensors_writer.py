"""A safetensors file laid out before its tensors are at hand, then written in one pass that also hashes it.

The library's writer wants all tensors at once, and again the file to hash it; here memory holds what is being written,
once. Format: see wattwatch.trainer.checkpoint.complete.
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

ALIGNMENT: Final = 8  # of the first tensor, as the library does it
WRITE_BYTES: Final = 16 << 20  # at once: short enough to hash while it is in the cache
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
    """Where every tensor of a file lies."""

    header: bytes  # with the 8 bytes of its length
    tensors: tuple[TensorSpec, ...]  # in the order of the file: wide elements first, so that each is aligned
    tensor_bytes: int

    @property
    def bytes(self) -> int:
        return len(self.header) + self.tensor_bytes

    def views(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every tensor, flat, in `memory` (uint8, of tensor_bytes)."""
        found, reached = {}, 0
        for tensor in self.tensors:
            found[tensor.name] = memory[reached : reached + tensor.bytes].view(tensor.dtype)
            reached += tensor.bytes
        return found


def safetensors_layout(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> SafetensorsLayout:
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


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, copied to the host where it lies elsewhere."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_and_sync(path: Path, pieces: Iterable[bytes | memoryview]) -> FileRecord:
    """A new file, on the disk when this returns. Raises OSError that names `path`: disk full shows at any of the three.

    Must not exist already: nobody else writes into a staged directory.
    """
    digest, total = hashlib.sha256(), 0
    try:
        with open(path, "xb", buffering=0) as file:
            for piece in pieces:
                for begin in range(0, len(piece), WRITE_BYTES):
                    part = memoryview(piece)[begin : begin + WRITE_BYTES]
                    digest.update(part)
                    while part:  # an unbuffered write may take a part only
                        part = part[file.write(part) :]
                total += len(piece)
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    return FileRecord(total, digest.hexdigest())


# Which tensor goes into which file, and which rank writes it: the same on every rank, without asking.


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One file and its writer."""

    name: str
    owner: int  # rank
    layout: SafetensorsLayout


def plan_weights_files(
    tensors: Sequence[TensorSpec], file_bytes: int, world: int, ranks_per_node: int
) -> tuple[WeightsFile, ...]:
    """Files of at most `file_bytes` of tensors each, or of one tensor that is larger; named as the hub names them.

    Consecutive files go to other nodes first, then to other ranks of a node, so that all links to the storage are used
    (one rank that writes everything leaves 255 others waiting: Automodel#2279).
    """
    writers = sorted(range(world), key=lambda rank: (rank % ranks_per_node, rank // ranks_per_node))
    shares: list[list[TensorSpec]] = [[]]
    room = file_bytes
    for tensor in tensors:
        if tensor.bytes > room and shares[-1]:
            shares.append([])
            room = file_bytes
        shares[-1].append(tensor)
        room -= tensor.bytes
    names = [f"model-{number:05d}-of-{len(shares):05d}.safetensors" for number in range(1, len(shares) + 1)]
    if len(shares) == 1:
        names = [SINGLE_FILE]
    return tuple(
        WeightsFile(name, writers[number % world], safetensors_layout(share, {"format": "pt"}))
        for number, (name, share) in enumerate(zip(names, shares, strict=True))
    )


def build_index_file(files: Sequence[WeightsFile]) -> dict[str, bytes]:
    """The index by its name; nothing where one file holds everything."""
    if len(files) == 1:
        return {}
    mapping = {tensor.name: file.name for file in files for tensor in file.layout.tensors}
    total = sum(file.layout.tensor_bytes for file in files)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}, indent=2)
    return {INDEX_FILE: text.encode()}
