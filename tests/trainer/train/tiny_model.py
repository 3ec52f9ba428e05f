"""A model and blocks that are small enough for a test."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.pack.manifest import (
    MANIFEST_VERSION,
    PackManifest,
    manifest_file,
    manifest_text,
    shard_row_range,
    starts_file,
    take_samples,
    token_file,
    xor_below,
)

VOCABULARY = 131
SEQ_LEN = 32


def write_model(directory: Path, tied: bool = True) -> Path:
    """A Qwen3 of two layers, its weights drawn from seed 0."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


def write_blocks(directory: Path, counts: list[int], seq_len: int = SEQ_LEN, vocabulary: int = VOCABULARY) -> Path:
    """`counts[rank]` blocks of seeded ids for each rank, as `wattwatch-train pack --document-mask` would leave them.

    Ids follow a pattern with noise, so that there is something to learn; records have 5 to 39 ids.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for rank, count in enumerate(counts):
        dice = np.random.default_rng(rank)
        size = count * seq_len
        ids = (np.arange(size) * 7 + dice.integers(0, 3, size)) % (vocabulary - 1) + 1
        starts = np.concatenate(([0], np.cumsum(dice.integers(5, 40, size // 5))))
        data, path = ids.astype("<i4").tobytes(), str(directory)
        Path(token_file(path, rank)).write_bytes(data)
        Path(starts_file(path, rank)).write_bytes(starts[starts < size].astype("<i8").tobytes())
        manifest = _manifest(rank, len(counts), data, ids, int((starts < size).sum()))
        manifest = replace(manifest, seq_len=seq_len, blocks=count, vocab_size=vocabulary)
        Path(manifest_file(path, rank)).write_text(manifest_text(manifest))
    return directory


def _manifest(rank: int, world: int, data: bytes, ids: NDArray[np.int64], starts: int) -> PackManifest:
    corpus_rows = 10 * world
    rows, first, last = shard_row_range(corpus_rows, world, rank, True)
    assert first is not None
    assert last is not None
    return PackManifest(
        v=MANIFEST_VERSION,
        world=world,
        rank=rank,
        contiguous=True,
        corpus_sha256="c" * 64,
        corpus_rows=corpus_rows,
        rows=rows,
        first_row=first,
        last_row=last,
        row_xor=xor_below(last + 1) ^ xor_below(first),
        empty_rows=0,
        column="text",
        kind="text",
        seq_len=SEQ_LEN,
        blocks=len(ids) // SEQ_LEN,
        tokens=len(ids),
        dropped_tokens=0,
        min_token_id=int(ids.min()),
        max_token_id=int(ids.max()),
        vocab_size=VOCABULARY,
        tokenizer_sha256="t" * 64,
        tokenizer_file_sha256="",
        tokenizer_meaning_sha256="m" * 64,
        template_sha256="e" * 64,
        eos_id=0,
        datasets_version="5.2.0",
        tokenizers_version="0.23.3",
        size_bytes=len(data),
        sha256=hashlib.sha256(data).hexdigest(),
        samples=take_samples(lambda offset, length: data[offset : offset + length], len(data)),
        document_starts=starts,
    )
