"""Records to token ids, each record once, in several processes. The order of the records is kept."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import threading
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from wattwatch.trainer.errors import UserError
from wattwatch.trainer.pack.manifest import canonical_tokenizer_sha256

BATCHES_PER_WORKER: Final = 4  # in flight. Chosen: enough to keep a process busy, and memory stays bounded


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One batch of records: their ids one after the other, and the number of ids of each record."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What distinguishes one tokenizer from another; recorded in the manifest."""

    sha256: str
    file_sha256: str
    meaning_sha256: str
    template_sha256: str
    vocab_size: int
    eos_id: int
    version: str


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """Everything that a worker process needs to tokenize records."""

    name: str
    kind: str  # "text" or "chat"
    backend: str  # tokenizer.json as it is used: without padding and truncation
    eos_id: int


def read_tokenizer(name: str, kind: str) -> tuple[TokenizerRecipe, TokenizerIdentity]:
    """A fast tokenizer by directory or Hub name.

    Raises UserError: not found, not a fast one, no EOS token, or no chat template for chats.
    """
    import tokenizers

    tokenizer = _load_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no EOS token, but each record must end with one")
    if kind == "chat" and not tokenizer.chat_template:
        raise UserError(f"{name}: the records are chats, but the tokenizer has no chat template")
    # Some tokenizer.json files truncate to the model's context length, which would silently drop text here.
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    backend, file = tokenizer.backend_tokenizer.to_str(), _tokenizer_file(name)
    template = tokenizer.chat_template if kind == "chat" else ""
    identity = TokenizerIdentity(
        sha256=canonical_tokenizer_sha256(backend.encode()),
        file_sha256=hashlib.sha256(file).hexdigest() if file else "",
        meaning_sha256=canonical_tokenizer_sha256(file) if file else "",
        template_sha256=hashlib.sha256(str(template).encode()).hexdigest(),
        vocab_size=len(tokenizer),
        eos_id=int(tokenizer.eos_token_id),
        version=tokenizers.__version__,
    )
    return TokenizerRecipe(name, kind, backend, identity.eos_id), identity


class RecordTokenizer:
    """Tokenizes in this process. EOS is appended to each record, unless its chat template writes EOS itself."""

    def __init__(self, recipe: TokenizerRecipe) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the parallelism is in the processes
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.backend = Tokenizer.from_str(recipe.backend)
        self.chat = _load_tokenizer(recipe.name) if recipe.kind == "chat" else None

    def __call__(self, records: list[Any], where: list[str]) -> TokenBatch:
        """`where` names each record for error messages. Raises UserError for one that is neither text nor a chat."""
        texts = [self._text(record, place) for record, place in zip(records, where, strict=True)]
        # Special tokens off: a BOS that the tokenizer adds by itself would be in the middle of a block. An array, not a
        # list: it is pickled and sent to the parent process as bytes.
        joined, lengths = array("i"), []
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
            # A template that writes EOS usually does so after each turn; another one would teach two in a row.
            if ids and not (self.chat and self.recipe.eos_id in ids):
                ids.append(self.recipe.eos_id)
            joined.fromlist(ids)
            lengths.append(len(ids))
        return TokenBatch(np.frombuffer(joined, dtype=np.int32), np.asarray(lengths, dtype=np.int64))

    def _text(self, record: Any, where: str) -> str:
        if not record:
            return ""
        if self.chat is None:
            if not isinstance(record, str):
                raise UserError(f"{where}: expected text, found {type(record).__name__}")
            return record
        try:
            # Arrow gives all messages the same keys, with None where a message had none; templates test for presence.
            messages = [{key: value for key, value in message.items() if value is not None} for message in record]
            return str(self.chat.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # noqa: BLE001 - a template is a program, and may raise anything
            raise UserError(f"{where}: the chat template failed: {type(error).__name__}: {error}") from None


class TokenizerPool:
    """Worker processes that tokenize one shard after the other. With one worker, this process does it itself."""

    def __init__(self, recipe: TokenizerRecipe, workers: int) -> None:
        self.workers = workers
        self._here = RecordTokenizer(recipe) if workers == 1 else None
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            # Not fork: it copies the locks of Arrow's threads, but not the threads that would release them.
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(recipe,))

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def tokenized(self, batches: Iterable[tuple[list[Any], list[str]]]) -> Iterator[TokenBatch]:
        """The batches in order. Raises UserError for a record that cannot be tokenized, or if a worker was killed."""
        if self._pool is None:
            assert self._here is not None
            yield from (self._here(*batch) for batch in batches)
            return
        pending: deque[Future[TokenBatch]] = deque()
        try:
            for batch in batches:
                pending.append(self._pool.submit(_tokenize, *batch))
                # Oldest first, so that the order is kept although workers finish in any order.
                if len(pending) >= self.workers * BATCHES_PER_WORKER:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError("a worker process was killed, perhaps for lack of memory; lower --workers") from None


_worker: RecordTokenizer | None = None  # in a worker process


def _start_worker(recipe: TokenizerRecipe) -> None:
    global _worker
    # Before the tokenizer is loaded, which takes seconds: the command may be killed meanwhile.
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = RecordTokenizer(recipe)


def _exit_with_parent() -> None:
    """A worker of the pool waits for work forever, even if the command was killed and none will come."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize(records: list[Any], where: list[str]) -> TokenBatch:
    assert _worker is not None
    return _worker(records, where)


def _load_tokenizer(name: str) -> Any:
    # It warns if torch is missing, which packing does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").exists():
        raise UserError(f"{name} has no tokenizer_config.json; use a directory written by save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name} cannot be loaded as a tokenizer: {first}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{name} has no fast tokenizer (tokenizer.json), but packing needs one")
    return tokenizer


def _tokenizer_file(name: str) -> bytes:
    if Path(name).is_dir():
        path = Path(name) / "tokenizer.json"
        return path.read_bytes() if path.exists() else b""
    from transformers.utils import cached_file

    found = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    return Path(found).read_bytes() if found else b""
