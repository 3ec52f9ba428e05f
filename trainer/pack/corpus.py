"""The records to pack: a Hugging Face dataset or JSONL files, and the part that belongs to one rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import datasets
import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.formatting import format_count
from wattwatch.trainer.pack.manifest import shard_row_range

ROW_ID: Final = "__row_id__"  # added column, so that rows can still be identified after sharding
JSONL_SUFFIXES: Final = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst")
COLUMNS: Final = ("text", "messages")  # tried if --column is not given
SAMPLED_ROWS: Final = 64  # for the corpus hash. Chosen: hashing all rows would take as long as tokenizing them
READ_ROWS: Final = 256  # per batch. Chosen: Arrow reads many rows as fast as one


@dataclass(frozen=True, slots=True)
class Corpus:
    """All records, in the order of their source."""

    source: str
    rows: Any  # datasets.Dataset with two columns: the records and ROW_ID
    column: str
    kind: str  # "text": strings; "chat": lists of messages
    sha256: str  # over the number of rows and a sample of them

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class CorpusShard:
    """The rows of one rank, as `datasets.shard` distributes them."""

    world: int
    rank: int
    contiguous: bool
    rows: Any
    row_ids: NDArray[np.int64]

    def batches(self, column: str) -> Iterator[tuple[int, list[Any]]]:
        """(position of the first record in the shard, records), READ_ROWS at a time."""
        for begin in range(0, len(self.row_ids), READ_ROWS):
            yield begin, list(self.rows[begin : begin + READ_ROWS][column])


def read_corpus(source: str, split: str, column: str | None) -> Corpus:
    """Opens JSONL files (a path or a glob), a directory written by `save_to_disk`, or a dataset by its name.

    Raises UserError: not found, no such split, no such column, or records that are neither text nor chats.
    """
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(logging.CRITICAL)  # its errors are reported below, in one line
    dataset = _load_dataset(source, split)
    if len(dataset) == 0:
        raise UserError(f"{source}: no records")
    names = [column] if column else [name for name in COLUMNS if name in dataset.column_names]
    if not names or names[0] not in dataset.column_names:
        wanted = repr(column) if column else "'text' or 'messages'"
        raise UserError(
            f"{source} has no column {wanted}; its columns are {', '.join(dataset.column_names)}; choose one with "
            "--column"
        )
    # Guessing one of two columns would train on the wrong one without a sign of it.
    if len(names) > 1:
        raise UserError(f"{source} has both a column 'text' and a column 'messages'; choose one with --column")
    rows = dataset.select_columns(names[0])
    kind = _record_kind(rows[0][names[0]], f"{source}: column {names[0]!r}, row 0")
    sha256 = _sampled_sha256(rows, names[0])
    return Corpus(source, rows.add_column(ROW_ID, np.arange(len(rows), dtype=np.int64)), names[0], kind, sha256)


def shard_corpus(corpus: Corpus, world: int, rank: int, contiguous: bool) -> CorpusShard:
    """One rank's shard. Raises UserError for an empty one.

    `contiguous` is always passed on, since its default differs between versions of datasets (datasets#5507), and an
    empty shard is checked for here, because `datasets.shard` does not (datasets#7443).
    """
    if shard_row_range(len(corpus), world, rank, contiguous)[0] == 0:
        raise UserError(
            f"{corpus.source}: rank {rank} of {world} gets none of the {format_count(len(corpus), 'row')}; use fewer "
            "ranks"
        )
    # The row ids travel through the same shard call as the rows, so they are right whatever that call does.
    rows = corpus.rows.shard(num_shards=world, index=rank, contiguous=contiguous)
    return CorpusShard(world, rank, contiguous, rows, np.asarray(rows[:][ROW_ID], dtype=np.int64))


def _load_dataset(source: str, split: str) -> Any:
    path = Path(source)
    try:
        if source.endswith(JSONL_SUFFIXES):
            return datasets.load_dataset("json", data_files={split: source}, split=split)
        if path.is_dir() and any((path / name).exists() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(source)
            if not isinstance(found, datasets.DatasetDict):
                return found
            if split not in found:
                raise UserError(f"{source} has no split {split!r}; its splits are {', '.join(found)}")
            return found[split]
        return datasets.load_dataset(source, split=split)
    except UserError:
        raise
    except Exception as error:
        # datasets wraps errors several times; the innermost names the cause.
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        lines = str(root).strip().splitlines() or [type(root).__name__]
        raise UserError(f"{source} cannot be read as a dataset: {lines[0]}") from error


def _record_kind(record: object, where: str) -> str:
    if isinstance(record, str):
        return "text"
    if isinstance(record, list) and record and all(isinstance(m, dict) and "role" in m for m in record):
        return "chat"
    raise UserError(
        f"{where}: expected text, or a list of messages that each have a role; found {type(record).__name__}"
    )


def _sampled_sha256(rows: Any, column: str) -> str:
    positions = sorted({int(position) for position in np.linspace(0, len(rows) - 1, min(SAMPLED_ROWS, len(rows)))})
    # Evenly spread, first and last row included: a corpus that was extended or reordered then has another hash.
    digest = hashlib.sha256(f"{len(rows)}\0{column}\0".encode())
    for record in rows.select(positions)[column]:
        digest.update(json.dumps(record, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "replace"))
    return digest.hexdigest()
