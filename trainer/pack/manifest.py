"""The manifest of a rank's packed file: its rows, its tokenizer, its number of blocks, and hashes of its bytes.

Standard library only: the gate reads it. Token files are little-endian int32 without a header, so that everybody
computes the block count as floor(bytes / 4 / seq_len), as in arXiv 2608.05944, section 2.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass

MANIFEST_VERSION: Final = 1
TOKEN_BYTES: Final = 4
START_BYTES: Final = 8  # of a record start, int64
# How much of a token file the gate hashes: 192 KiB, read in milliseconds. Chosen: truncation and a file of another
# packing show at head and tail, and in any of the pieces.
EDGE_BYTES: Final = 64 * 1024  # at the head, and at the tail
SAMPLE_BYTES: Final = 4096
SAMPLES: Final = 16


def token_file(directory: str, rank: int) -> str:
    return f"{directory}/rank-{rank:05d}.i32"


def starts_file(directory: str, rank: int) -> str:
    return f"{directory}/rank-{rank:05d}.starts.i64"


def manifest_file(directory: str, rank: int) -> str:
    return f"{directory}/rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True)
class ByteSample:
    """The hash of one piece of the token file."""

    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackManifest:
    """One rank's packed shard. Row ids count the rows of the corpus from 0, in the order of the source."""

    v: int
    world: int
    rank: int
    contiguous: bool  # how datasets.shard distributed the rows; its default has changed once (datasets#5507)
    corpus_sha256: str  # over rows sampled from the corpus, so that nodes can compare theirs
    corpus_rows: int
    rows: int
    first_row: int | None
    last_row: int | None
    row_xor: int  # exclusive or of all row ids
    empty_rows: int  # rows that gave no token
    column: str
    kind: str  # "text" or "chat"
    seq_len: int
    blocks: int
    tokens: int  # of all rows, with the EOS that ends each
    dropped_tokens: int  # after the last whole block
    min_token_id: int
    max_token_id: int
    vocab_size: int  # of the tokenizer, including added tokens
    tokenizer_sha256: str  # of the tokenizer as it was used
    tokenizer_file_sha256: str  # of the bytes of its tokenizer.json; "" if it has none
    tokenizer_meaning_sha256: str  # of the content of that file, without formatting and padding settings
    template_sha256: str  # of the chat template; of the empty string for text
    eos_id: int
    datasets_version: str
    tokenizers_version: str
    size_bytes: int
    sha256: str
    samples: tuple[ByteSample, ...]  # the head, the tail, and pieces in between
    document_starts: int | None  # number of record starts; None if packed without --document-mask


def read_manifest(text: str) -> PackManifest:
    """The manifest in `text`. Raises InvalidDataError that names the field."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidDataError(f"not JSON: {error}") from None
    if isinstance(data, dict) and data.get("v") != MANIFEST_VERSION:
        raise InvalidDataError(f"v: expected {MANIFEST_VERSION}, found {data.get('v')!r}")
    return parse_dataclass(PackManifest, data)


def manifest_text(manifest: PackManifest) -> str:
    return json.dumps(asdict(manifest), indent=1) + "\n"


def sample_ranges(size_bytes: int) -> tuple[tuple[int, int], ...]:
    """(offset, bytes) of the pieces to hash: head, tail, and SAMPLES in between.

    Always the same for files of the same size, so that a manifest cannot leave pieces out unnoticed.
    """
    head = (0, min(EDGE_BYTES, size_bytes))
    tail_offset = max(0, size_bytes - EDGE_BYTES)
    ranges = {head, (tail_offset, size_bytes - tail_offset)}
    if size_bytes > 2 * EDGE_BYTES + SAMPLE_BYTES:
        generator = random.Random(size_bytes)
        last = (size_bytes - EDGE_BYTES - SAMPLE_BYTES) // TOKEN_BYTES
        for _ in range(SAMPLES):
            ranges.add((generator.randint(EDGE_BYTES // TOKEN_BYTES, last) * TOKEN_BYTES, SAMPLE_BYTES))
    return tuple(sorted(ranges))


def take_samples(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[ByteSample, ...]:
    """Hashes of the pieces of a file. `read(offset, bytes)` reads from it."""
    return tuple(
        ByteSample(offset, length, hashlib.sha256(read(offset, length)).hexdigest())
        for offset, length in sample_ranges(size_bytes)
    )


def canonical_tokenizer_sha256(tokenizer_json: bytes) -> str:
    """Hash of a tokenizer.json without its padding and truncation settings, its formatting and its order of keys.

    Loading and saving a tokenizer changes these, although it still gives the same ids. Raises ValueError if it is not
    JSON.
    """
    data = json.loads(tokenizer_json)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    content = {key: value for key, value in data.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def xor_below(count: int) -> int:
    """0 ^ 1 ^ ... ^ (count - 1). Four numbers from a multiple of four cancel, so at most three remain."""
    return reduce(lambda a, b: a ^ b, range(count & ~3, count), 0)


def shard_row_range(corpus_rows: int, world: int, rank: int, contiguous: bool) -> tuple[int, int | None, int | None]:
    """(rows, first, last) that `datasets.shard` gives to a rank, computed without datasets to check a manifest."""
    if contiguous:
        size, more = divmod(corpus_rows, world)
        first = size * rank + min(rank, more)
        rows = size + (rank < more)
        return (rows, first, first + rows - 1) if rows else (0, None, None)
    rows = max(0, -((rank - corpus_rows) // world))
    return (rows, rank, rank + (rows - 1) * world) if rows else (0, None, None)


def blocks_sha256(by_rank: Mapping[int, str]) -> str:
    """One hash for the data whose blocks a job's steps count, from the SHA-256 of each rank's token file."""
    return hashlib.sha256("".join(f"{rank} {by_rank[rank]}\n" for rank in sorted(by_rank)).encode()).hexdigest()
