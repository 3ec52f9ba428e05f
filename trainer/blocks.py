"""A rank's packed blocks, memory-mapped: block = f(step, micro), so resuming at a step reads nothing before it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trainer.manifest import TOKEN_BYTES, Manifest, manifest_file, read_manifest, starts_file, token_file
from trainer.plain import NotPlain
from trainer.refusal import Refusal

TOKEN: Final = np.dtype("<i4")
START: Final = np.dtype("<i8")


def block_count(size_bytes: int, seq_len: int) -> int:
    """Whole blocks in a token file. Raises ValueError for a ragged one: it was torn, or packed with another seq_len."""
    blocks, rest = divmod(size_bytes, TOKEN_BYTES * seq_len)
    if rest:
        raise ValueError(
            f"{size_bytes:,} bytes are not a whole number of blocks of {seq_len} int32 ids ({rest:,} over)"
        )
    return blocks


class Blocks:
    """Read-only blocks of one rank. Pages come in as they are touched; forked readers share them.

    `blocks_per_step` is micro-batch x accumulation: what this rank consumes between two optimizer steps.
    """

    def __init__(self, directory: Path, rank: int, blocks_per_step: int = 1) -> None:
        if blocks_per_step < 1:
            raise ValueError("blocks_per_step must be at least 1")
        self.path = Path(token_file(str(directory), rank))
        self.manifest = _read(Path(manifest_file(str(directory), rank)))
        self.blocks_per_step = blocks_per_step
        seq_len = self.manifest.seq_len
        try:
            self.count = block_count(self.path.stat().st_size, seq_len)
        except (OSError, ValueError) as error:
            raise Refusal(f"{self.path}: {_why(error)}; pack again") from None
        if self.count != self.manifest.blocks:
            raise Refusal(f"{self.path}: {self.count:,} blocks, its manifest says {self.manifest.blocks:,}; pack again")
        if self.count == 0:
            raise Refusal(f"{self.path}: no block")
        self._ids = np.memmap(self.path, dtype=TOKEN, mode="r", shape=(self.count, seq_len))
        self._starts: NDArray[np.int64] | None = None
        if self.manifest.document_starts:
            self._starts = np.memmap(starts_file(str(directory), rank), dtype=START, mode="r")

    @property
    def steps(self) -> int:
        """Whole steps in this rank alone; the job's is the minimum over ranks."""
        return self.count // self.blocks_per_step

    def index(self, step: int, micro: int) -> int:
        """Which block. Steps and micro-steps count from 0. Raises IndexError outside this rank's whole steps."""
        if not (0 <= step < self.steps and 0 <= micro < self.blocks_per_step):
            raise IndexError(f"step {step} micro {micro} of {self.steps} steps of {self.blocks_per_step} blocks")
        return step * self.blocks_per_step + micro

    def block(self, step: int, micro: int) -> NDArray[np.int32]:
        """seq_len token ids, a view of the file."""
        block: NDArray[np.int32] = self._ids[self.index(step, micro)]
        return block

    def document_starts(self, step: int, micro: int) -> NDArray[np.int64]:
        """Places in the block where a record begins; always 0 first, as a block that continues a record starts anew.

        Raises ValueError where the file was packed without `--document-mask`.
        """
        if self._starts is None:
            raise ValueError(f"{self.path}: packed without --document-mask")
        begin = self.index(step, micro) * self.manifest.seq_len
        low, high = np.searchsorted(self._starts, (begin, begin + self.manifest.seq_len))
        inside = np.asarray(self._starts[low:high]) - begin
        return inside if inside.size and inside[0] == 0 else np.concatenate((np.zeros(1, np.int64), inside))

    def position_ids(self, step: int, micro: int) -> NDArray[np.int64]:
        """Positions that begin again at each record: what attention kernels read as a document mask."""
        starts = self.document_starts(step, micro)
        lengths = np.diff(np.append(starts, self.manifest.seq_len))
        return np.arange(self.manifest.seq_len) - np.repeat(starts, lengths)


def _read(path: Path) -> Manifest:
    try:
        return read_manifest(path.read_text())
    except (OSError, NotPlain) as error:
        raise Refusal(f"{path}: {_why(error)}; pack again") from None


def _why(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
