"""A rank's packed blocks, memory-mapped: any block at once, so resuming at a step reads nothing before it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.dataclass_json import InvalidDataError
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.pack.manifest import (
    TOKEN_BYTES,
    PackManifest,
    manifest_file,
    read_manifest,
    starts_file,
    token_file,
)

TOKEN_DTYPE: Final = np.dtype("<i4")
START_DTYPE: Final = np.dtype("<i8")


def block_count(size_bytes: int, seq_len: int) -> int:
    """Whole blocks in a token file. Raises ValueError for a ragged one: it was torn, or packed with another seq_len."""
    blocks, rest = divmod(size_bytes, TOKEN_BYTES * seq_len)
    if rest:
        raise ValueError(
            f"{size_bytes:,} bytes are not a whole number of blocks of {seq_len} int32 ids ({rest:,} over)"
        )
    return blocks


class PackedBlocks:
    """Read-only blocks of one rank, counted from 0. Pages come in as they are touched; forked readers share them."""

    def __init__(self, directory: Path, rank: int) -> None:
        self.path = Path(token_file(str(directory), rank))
        self.manifest = _read_manifest_file(Path(manifest_file(str(directory), rank)))
        seq_len = self.manifest.seq_len
        try:
            self.count = block_count(self.path.stat().st_size, seq_len)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: {_error_text(error)}; pack again") from None
        if self.count != self.manifest.blocks:
            raise UserError(
                f"{self.path}: {self.count:,} blocks, its manifest says {self.manifest.blocks:,}; pack again"
            )
        if self.count == 0:
            raise UserError(f"{self.path}: no block")
        self._ids = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r", shape=(self.count, seq_len))
        self._starts: NDArray[np.int64] | None = None
        if self.manifest.document_starts:
            path = Path(starts_file(str(directory), rank))
            self._starts = _read_starts(path, self.count * seq_len)

    def ids(self, index: int) -> NDArray[np.int32]:
        """seq_len token ids, a view of the file. Raises IndexError for a block that is not there."""
        block: NDArray[np.int32] = self._ids[self._checked(index)]
        return block

    def document_starts(self, index: int) -> NDArray[np.int64]:
        """Places in the block where a record begins; always 0 first, as a block that continues a record starts anew.

        Raises ValueError where the file was packed without `--document-mask`.
        """
        if self._starts is None:
            raise ValueError(f"{self.path}: packed without --document-mask")
        begin = self._checked(index) * self.manifest.seq_len
        low, high = np.searchsorted(self._starts, (begin, begin + self.manifest.seq_len))
        inside = np.asarray(self._starts[low:high]) - begin
        return inside if inside.size and inside[0] == 0 else np.concatenate((np.zeros(1, np.int64), inside))

    def positions(self, index: int) -> NDArray[np.int64]:
        """Positions that begin again at each record: what attention kernels read as a document mask."""
        starts = self.document_starts(index)
        lengths = np.diff(np.append(starts, self.manifest.seq_len))
        return np.arange(self.manifest.seq_len) - np.repeat(starts, lengths)

    def _checked(self, index: int) -> int:
        if not 0 <= index < self.count:
            raise IndexError(f"{self.path}: block {index} of {self.count}")
        return index


def _read_starts(path: Path, ids: int) -> NDArray[np.int64]:
    """Where records begin, rising from 0. Raises Refusal for anything else: masks would follow it in silence."""
    try:
        starts = np.memmap(path, dtype=START_DTYPE, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {_error_text(error)}; pack again") from None
    if starts[0] < 0 or starts[-1] >= ids or bool((np.diff(starts) <= 0).any()):
        raise UserError(f"{path}: not the places where records begin: torn, or another file's; pack again")
    return starts


def _read_manifest_file(path: Path) -> PackManifest:
    try:
        return read_manifest(path.read_text())
    except (OSError, InvalidDataError) as error:
        raise UserError(f"{path}: {_error_text(error)}; pack again") from None


def _error_text(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
