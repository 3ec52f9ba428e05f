"""One rank's shard as fixed blocks: token ids of all records one after the other, with an EOS after each record.

What does not fill the last block is dropped. Attention crosses records inside a block unless training uses the document
mask. The same records, tokenizer and versions always give the same bytes.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.atomic_files import atomic_write, atomic_write_text
from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.pack.blocks import START_DTYPE, TOKEN_DTYPE
from wattwatch.trainer.pack.corpus import Corpus, CorpusShard
from wattwatch.trainer.pack.manifest import (
    MANIFEST_VERSION,
    TOKEN_BYTES,
    PackManifest,
    manifest_file,
    manifest_text,
    starts_file,
    take_samples,
    token_file,
)
from wattwatch.trainer.pack.tokens import TokenBatch, TokenizerIdentity, TokenizerPool

NO_IDS: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class PackSettings:
    """How ids become blocks; recorded in the manifest."""

    seq_len: int
    document_mask: bool


class BlockPacker:
    """Cuts a stream of ids into whole blocks, and counts what went through it."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.rest = NO_IDS
        self.blocks = self.tokens = self.empty_rows = 0
        self.min_id, self.max_id = np.iinfo(np.int32).max, -1

    def push(self, batch: TokenBatch) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        """(ids of the blocks that are now complete, positions in the stream at which the batch's records begin)."""
        starts = self.tokens + np.cumsum(batch.lengths) - batch.lengths
        self.empty_rows += int(np.count_nonzero(batch.lengths == 0))
        self.tokens += batch.ids.size
        # Records continue across batches and blocks: what did not fill a block is put in front of the next ids.
        ids = np.concatenate((self.rest, batch.ids))
        full = ids.size // self.seq_len
        ids, self.rest = ids[: full * self.seq_len], ids[full * self.seq_len :]
        self.blocks += full
        if ids.size:
            self.min_id, self.max_id = min(self.min_id, int(ids.min())), max(self.max_id, int(ids.max()))
        return ids, starts[batch.lengths > 0]


def pack_shard(
    corpus: Corpus,
    shard: CorpusShard,
    settings: PackSettings,
    tokenizer: TokenizerIdentity,
    pool: TokenizerPool,
    directory: Path,
    on_rows: Callable[[int], None],
) -> PackManifest:
    """Writes the rank's token file, then its manifest. `on_rows` is called with the number of rows done.

    Raises UserError: a record that is not text, fewer tokens than one block, no space left, not writable. An existing
    file is then unchanged, up to the rename of the new one.
    """
    tokens_path = token_file(str(directory), shard.rank)
    manifest_path = manifest_file(str(directory), shard.rank)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        packer, digest, starts = BlockPacker(settings.seq_len), hashlib.sha256(), 0
        starts_path = starts_file(str(directory), shard.rank)
        with (
            atomic_write(starts_path) if settings.document_mask else nullcontext() as starts_out,
            atomic_write(tokens_path) as out,
        ):
            for batch in pool.tokenized(_batches_with_labels(corpus, shard)):
                ids, begins = packer.push(batch)
                # Hashed while it is written, so that the file need not be read again.
                data = ids.astype(TOKEN_DTYPE, copy=False).tobytes()
                out.write(data)
                digest.update(data)
                if starts_out is not None:
                    starts_out.write(begins.astype(START_DTYPE, copy=False).tobytes())
                starts += begins.size
                on_rows(batch.lengths.size)
            if packer.blocks == 0:
                raise UserError(
                    f"{corpus.source}: rank {shard.rank} of {shard.world} got only "
                    f"{format_count(packer.tokens, 'token')} from "
                    f"{format_count(shard.row_ids.size, 'row')}, but one block needs {settings.seq_len:,}; pack more "
                    "records, or reduce --seq-len"
                )
            # Before the new token file gets its name: if we are killed in between, there is a file without a manifest,
            # which the gate refuses, and not a new file with the old manifest.
            Path(manifest_path).unlink(missing_ok=True)
        # Left over from packing with --document-mask: it would not belong to these blocks.
        if starts_out is None:
            Path(starts_path).unlink(missing_ok=True)
        manifest = _build_manifest(corpus, shard, settings, tokenizer, packer, tokens_path, digest.hexdigest(), starts)
        atomic_write_text(manifest_path, manifest_text(manifest))
    except OSError as error:
        # A disk quota that is exceeded says "Disk quota exceeded", which few users expect to be the same problem.
        what = "no space left" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise UserError(
            f"{error.filename or tokens_path}: {what}; nothing was written for rank {shard.rank}"
        ) from error
    return manifest


def _batches_with_labels(corpus: Corpus, shard: CorpusShard) -> Iterator[tuple[list[Any], list[str]]]:
    """(records, a label for each that names its row for error messages)."""
    for begin, records in shard.batches(corpus.column):
        ids = shard.row_ids[begin : begin + len(records)].tolist()
        yield records, [f"{corpus.source}: row {row}, column {corpus.column!r}" for row in ids]


def _build_manifest(
    corpus: Corpus,
    shard: CorpusShard,
    settings: PackSettings,
    tokenizer: TokenizerIdentity,
    packer: BlockPacker,
    path: str,
    sha256: str,
    starts: int,
) -> PackManifest:
    size = packer.blocks * settings.seq_len * TOKEN_BYTES
    with open(path, "rb") as file:
        samples = take_samples(lambda offset, length: os.pread(file.fileno(), length, offset), size)
    return PackManifest(
        v=MANIFEST_VERSION,
        world=shard.world,
        rank=shard.rank,
        contiguous=shard.contiguous,
        corpus_sha256=corpus.sha256,
        corpus_rows=len(corpus),
        rows=shard.row_ids.size,
        first_row=int(shard.row_ids[0]),
        last_row=int(shard.row_ids[-1]),
        row_xor=reduce(lambda a, b: a ^ b, shard.row_ids.tolist(), 0),
        empty_rows=packer.empty_rows,
        column=corpus.column,
        kind=corpus.kind,
        seq_len=settings.seq_len,
        blocks=packer.blocks,
        tokens=packer.tokens,
        dropped_tokens=packer.rest.size,
        min_token_id=packer.min_id,
        max_token_id=packer.max_id,
        vocab_size=tokenizer.vocab_size,
        tokenizer_sha256=tokenizer.sha256,
        tokenizer_file_sha256=tokenizer.file_sha256,
        tokenizer_meaning_sha256=tokenizer.meaning_sha256,
        template_sha256=tokenizer.template_sha256,
        eos_id=tokenizer.eos_id,
        datasets_version=datasets.__version__,
        tokenizers_version=tokenizer.version,
        size_bytes=size,
        sha256=sha256,
        samples=samples,
        document_starts=starts if settings.document_mask else None,
    )
