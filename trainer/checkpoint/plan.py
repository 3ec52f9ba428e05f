"""Which tensor goes into which file, and which rank writes it: the same on every rank, without asking."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.checkpoint.complete import INDEX, ONE_FILE
from trainer.checkpoint.tensors_file import Layout, TensorFact, layout


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """One file and its writer."""

    name: str
    owner: int  # rank
    layout: Layout


def weights_files(
    tensors: Sequence[TensorFact], file_bytes: int, world: int, ranks_per_node: int
) -> tuple[WeightsFile, ...]:
    """Files of at most `file_bytes` of tensors each, or of one tensor that is larger; named as the hub names them.

    Consecutive files go to other nodes first, then to other ranks of a node, so that all links to the storage are used
    (one rank that writes everything leaves 255 others waiting: Automodel#2279).
    """
    writers = sorted(range(world), key=lambda rank: (rank % ranks_per_node, rank // ranks_per_node))
    shares: list[list[TensorFact]] = [[]]
    room = file_bytes
    for tensor in tensors:
        if tensor.bytes > room and shares[-1]:
            shares.append([])
            room = file_bytes
        shares[-1].append(tensor)
        room -= tensor.bytes
    names = [f"model-{number:05d}-of-{len(shares):05d}.safetensors" for number in range(1, len(shares) + 1)]
    if len(shares) == 1:
        names = [ONE_FILE]
    return tuple(
        WeightsFile(name, writers[number % world], layout(share, {"format": "pt"}))
        for number, (name, share) in enumerate(zip(names, shares, strict=True))
    )


def index_file(files: Sequence[WeightsFile]) -> dict[str, bytes]:
    """The index by its name; nothing where one file holds everything."""
    if len(files) == 1:
        return {}
    mapping = {tensor.name: file.name for file in files for tensor in file.layout.tensors}
    total = sum(file.layout.tensor_bytes for file in files)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(mapping.items()))}, indent=2)
    return {INDEX: text.encode()}
