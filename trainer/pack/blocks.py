"""A rank's packed blocks, memory-mapped: any block can be read directly, so a resume reads nothing before its step."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.dataclass_json import InvalidDataError
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
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
REPACK: Final = "pack the dataset again"


def block_count(size_bytes: int, seq_len: int) -> int:
    """Number of blocks in a token file of this size. Raises ValueError if it is not a whole number: the file was
    truncated, or packed with another seq_len."""
    blocks, rest = divmod(size_bytes, TOKEN_BYTES * seq_len)
    if rest:
        raise ValueError(
            f"{format_count(size_bytes, 'byte')} {'is' if size_bytes == 1 else 'are'} not a whole number of blocks "
            f"of {seq_len} int32 ids "
            f"({format_count(rest, 'byte')} left over)"
        )
    return blocks


class PackedBlocks:
    """The blocks of one rank, read-only, counted from 0. Pages are read on first access and shared by forks."""

    def __init__(self, directory: Path, rank: int) -> None:
        """Raises UserError for missing or damaged files."""
        self.path = Path(token_file(str(directory), rank))
        self.manifest = _read_manifest_file(Path(manifest_file(str(directory), rank)))
        seq_len = self.manifest.seq_len
        try:
            self.count = block_count(self.path.stat().st_size, seq_len)
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}: {_error_text(error)}; {REPACK}") from None
        if self.count != self.manifest.blocks:
            raise UserError(
                f"{self.path} has {format_count(self.count, 'block')}, but its manifest says "
                f"{self.manifest.blocks:,}; {REPACK}"
            )
        if self.count == 0:
            raise UserError(f"{self.path}: contains no blocks; {REPACK}")
        self._ids = np.memmap(self.path, dtype=TOKEN_DTYPE, mode="r", shape=(self.count, seq_len))
        self._starts: NDArray[np.int64] | None = None
        # An empty file cannot be mapped; without a record start there is nothing to map anyway.
        if self.manifest.document_starts:
            path = Path(starts_file(str(directory), rank))
            self._starts = _read_starts(path, self.count * seq_len)

    def ids(self, index: int) -> NDArray[np.int32]:
        """seq_len token ids, a view of the file. Raises IndexError if there is no such block."""
        block: NDArray[np.int32] = self._ids[self._checked(index)]
        return block

    def document_starts(self, index: int) -> NDArray[np.int64]:
        """Positions in the block at which a record begins.

        The first is always 0: a record that is continued from the previous block counts as a new one. Raises ValueError
        if the file was packed without `--document-mask`.
        """
        if self._starts is None:
            raise ValueError(f"{self.path} was packed without --document-mask")
        begin = self._checked(index) * self.manifest.seq_len
        # Binary search in the mapped file: a block needs no index in memory, and no block before it.
        low, high = np.searchsorted(self._starts, (begin, begin + self.manifest.seq_len))
        inside = np.asarray(self._starts[low:high]) - begin
        return inside if inside.size and inside[0] == 0 else np.concatenate((np.zeros(1, np.int64), inside))

    def positions(self, index: int) -> NDArray[np.int64]:
        """Positions that start at 0 at each record, which attention kernels take as a document mask."""
        starts = self.document_starts(index)
        lengths = np.diff(np.append(starts, self.manifest.seq_len))
        return np.arange(self.manifest.seq_len) - np.repeat(starts, lengths)

    def _checked(self, index: int) -> int:
        # numpy would take a negative index as one from the end.
        if not 0 <= index < self.count:
            raise IndexError(f"{self.path}: block {index} of {self.count}")
        return index


def _read_starts(path: Path, ids: int) -> NDArray[np.int64]:
    """Positions at which records begin, increasing, below `ids`.

    Raises UserError for anything else: wrong masks would go unnoticed.
    """
    try:
        starts = np.memmap(path, dtype=START_DTYPE, mode="r")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {_error_text(error)}; {REPACK}") from None
    if starts[0] < 0 or starts[-1] >= ids or bool((np.diff(starts) <= 0).any()):
        raise UserError(f"{path} is truncated, or it was written for a different token file; {REPACK}")
    return starts


def _read_manifest_file(path: Path) -> PackManifest:
    try:
        return read_manifest(path.read_text())
    except (OSError, InvalidDataError) as error:
        raise UserError(f"{path}: {_error_text(error)}; {REPACK}") from None


def _error_text(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
