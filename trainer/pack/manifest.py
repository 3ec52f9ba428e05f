"""What a rank's packed file says of itself: which rows, which tokenizer, how many blocks, which bytes.

Standard library only: the gate reads it. Token files are little-endian int32 without a header, so that the block
count is floor(bytes / 4 / seq_len) for everybody, the paper's own rule (section 2).
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
EDGE_BYTES: Final = 64 * 1024  # hashed at the head and at the tail
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
    """One piece of the token file, to find another file or torn bytes without reading it whole."""

    offset: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PackManifest:
    """One rank's packed shard. Row ids count the corpus from 0, in the order of the source."""

    v: int
    world: int
    rank: int
    contiguous: bool  # how datasets.shard dealt the rows; its default has changed once (datasets#5507)
    corpus_sha256: str  # of rows sampled over the corpus, so that two nodes can compare
    corpus_rows: int
    rows: int
    first_row: int | None
    last_row: int | None
    row_xor: int
    empty_rows: int  # rows that gave no token
    column: str
    kind: str  # "text" or "chat"
    seq_len: int
    blocks: int
    tokens: int  # of all rows, ends of records included
    dropped_tokens: int  # after the last whole block
    min_token_id: int
    max_token_id: int
    vocab_size: int  # of the tokenizer, added tokens included
    tokenizer_sha256: str  # of the tokenizer as it was used
    tokenizer_file_sha256: str  # of the bytes of its tokenizer.json; "" where it came without one
    tokenizer_meaning_sha256: str  # of what that file means, spacing and padding aside
    template_sha256: str  # of the chat template; of nothing for text
    eos_id: int
    datasets_version: str
    tokenizers_version: str
    size_bytes: int
    sha256: str
    samples: tuple[ByteSample, ...]  # the head, the tail, and pieces between
    document_starts: int | None  # how many; None where no document mask was asked for


def read_manifest(text: str) -> PackManifest:
    """The manifest in `text`. Raises NotPlain, which names the field."""
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
    """(offset, bytes) of the pieces to hash: head, tail, and SAMPLES between, the same for every file of that size."""
    head = (0, min(EDGE_BYTES, size_bytes))
    tail_offset = max(0, size_bytes - EDGE_BYTES)
    places = {head, (tail_offset, size_bytes - tail_offset)}
    if size_bytes > 2 * EDGE_BYTES + SAMPLE_BYTES:
        dice = random.Random(size_bytes)
        last = (size_bytes - EDGE_BYTES - SAMPLE_BYTES) // TOKEN_BYTES
        for _ in range(SAMPLES):
            places.add((dice.randint(EDGE_BYTES // TOKEN_BYTES, last) * TOKEN_BYTES, SAMPLE_BYTES))
    return tuple(sorted(places))


def take_samples(read: Callable[[int, int], bytes], size_bytes: int) -> tuple[ByteSample, ...]:
    """Hashes of a file that `read(offset, bytes)` reads."""
    return tuple(
        ByteSample(offset, length, hashlib.sha256(read(offset, length)).hexdigest())
        for offset, length in sample_ranges(size_bytes)
    )


def canonical_tokenizer_sha256(tokenizer_json: bytes) -> str:
    """Of what a tokenizer.json means: its settings for padding and truncation, spacing and order of keys do not count.

    Raises ValueError where it is not JSON.
    """
    data = json.loads(tokenizer_json)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    meaning = {key: value for key, value in data.items() if key not in ("padding", "truncation")}
    return hashlib.sha256(json.dumps(meaning, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def xor_below(count: int) -> int:
    """0 ^ 1 ^ ... ^ (count - 1)."""
    return reduce(lambda a, b: a ^ b, range(count & ~3, count), 0)


def shard_row_range(corpus_rows: int, world: int, rank: int, contiguous: bool) -> tuple[int, int | None, int | None]:
    """(rows, first, last) that `datasets.shard` gives a rank: what a manifest must say, whoever wrote it."""
    if contiguous:
        size, more = divmod(corpus_rows, world)
        first = size * rank + min(rank, more)
        rows = size + (rank < more)
        return (rows, first, first + rows - 1) if rows else (0, None, None)
    rows = max(0, -((rank - corpus_rows) // world))
    return (rows, rank, rank + (rows - 1) * world) if rows else (0, None, None)


def blocks_sha256(by_rank: Mapping[int, str]) -> str:
    """Of the data that a job's steps count through: each rank's token file, by its sha256."""
    return hashlib.sha256("".join(f"{rank} {by_rank[rank]}\n" for rank in sorted(by_rank)).encode()).hexdigest()
