"""Shapes in a directory of safetensors, from the files' headers: no tensor is read.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian, then JSON). Standard library only.
"""

from __future__ import annotations

import json
import os
from math import prod
from typing import Any, Final

MAX_HEADER_BYTES: Final = 100_000_000  # the library's own limit
WIDE: Final = ("hidden_size", "vocab_size")
HEADS: Final = ("lm_head.weight", "model.embed_tokens.weight", "model.language_model.embed_tokens.weight")
Shapes = dict[str, tuple[int, ...]]


def shapes_in(directory: str) -> Shapes:
    """Of every tensor; {} where there are no weights. Raises OSError, and ValueError for a header that is none."""
    found: Shapes = {}
    for name in sorted(os.listdir(directory)):
        if name.endswith(".safetensors"):
            found |= _shapes(f"{directory}/{name}")
    return found


def _shapes(path: str) -> Shapes:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"{path}: not a safetensors file")
        data = file.read(length)
    try:
        header = json.loads(data)
        return {name: tuple(map(int, item["shape"])) for name, item in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ValueError(f"{path}: cut or changed, it has no safetensors header") from None


def parameters(shapes: Shapes) -> int | None:
    return sum(map(prod, shapes.values())) or None


def first_difference(saved: Shapes, model: Shapes, config: dict[str, Any]) -> str | None:
    """The first tensor of a checkpoint that is not as the model's; where that has no weights, as its config says.

    A head that is tied to the embedding may stand in one of the two only.
    """
    for name in sorted(saved.keys() | model.keys()) if model else ():
        mine, other = saved.get(name), model.get(name)
        if mine == other or (name == HEADS[0] and config.get("tie_word_embeddings") and None in (mine, other)):
            continue
        return f"{name} is {_shown(mine)} there and {_shown(other)} in the model"
    wanted = tuple(config.get(key) for key in reversed(WIDE))
    for name in HEADS:
        if not model and name in saved and None not in wanted and saved[name] != wanted:
            return f"{name} is {_shown(saved[name])} there, the model's config.json says {list(wanted)}"
    return None


def _shown(shape: tuple[int, ...] | None) -> str:
    return "not" if shape is None else str(list(shape))
