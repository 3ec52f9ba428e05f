"""A safetensors file laid out before its tensors are at hand, then written in one pass that also hashes it.

The library's writer wants all tensors at once, and again the file to hash it; here memory holds what is being written,
once. Format: see trainer.checkpoint.header.
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

from trainer.checkpoint.complete import FileFact

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
class TensorFact:
    """A tensor as it will be saved."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where every tensor of a file lies."""

    header: bytes  # with the 8 bytes of its length
    tensors: tuple[TensorFact, ...]  # in the order of the file: wide elements first, so that each is aligned
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


def layout(tensors: Sequence[TensorFact], metadata: Mapping[str, str]) -> Layout:
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
    return Layout(len(raw).to_bytes(8, "little") + raw, ordered, reached)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, copied to the host where it lies elsewhere."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_synced(path: Path, pieces: Iterable[bytes | memoryview]) -> FileFact:
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
    return FileFact(total, digest.hexdigest())
