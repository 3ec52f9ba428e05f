"""What a safetensors file says of its own length: 8 bytes of header size, the header, the tensors without gaps.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian, JSON, data_offsets counted after the header).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

LARGEST_HEADER_BYTES: Final = 100_000_000  # the library's own limit


class BadHeader(ValueError):
    """What a header says and the file is not."""


def tensor_names(path: Path, size_bytes: int) -> frozenset[str]:
    """The tensors of a file of `size_bytes`. Raises BadHeader where its header tells of another size, and OSError."""
    with open(path, "rb") as file:
        if size_bytes < 8:
            raise BadHeader(f"{size_bytes} bytes are no safetensors file")
        header_bytes = int.from_bytes(file.read(8), "little")
        if size_bytes < 8 + header_bytes or header_bytes > LARGEST_HEADER_BYTES:
            raise BadHeader(f"its header would be {header_bytes:,} bytes, the file is {size_bytes:,}")
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        spans = sorted((int(begin), int(end)) for begin, end in (item["data_offsets"] for item in header.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise BadHeader("its header is not that of a safetensors file") from None
    reached = 0
    for begin, end in spans:
        if begin != reached or end < begin:
            raise BadHeader(f"its header leaves a gap or an overlap at byte {reached:,} of the tensors")
        reached = end
    if (stated := 8 + header_bytes + reached) != size_bytes:
        raise BadHeader(f"its header tells of {stated:,} bytes, the file is {size_bytes:,}")
    return frozenset(header)
