"""Records to token ids, each once, over several processes; the order of the records is kept."""

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

BATCHES_PER_WORKER: Final = 4  # batches in flight per process: enough to keep it busy, and bounded in memory


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One batch of records: their ids one after another, and how many ids each record gave."""

    ids: NDArray[np.int32]
    lengths: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TokenizerIdentity:
    """What tells one tokenizer from another."""

    sha256: str
    file_sha256: str
    meaning_sha256: str
    template_sha256: str
    vocab_size: int
    eos_id: int
    version: str


@dataclass(frozen=True, slots=True)
class TokenizerRecipe:
    """All that a process needs to turn records into ids."""

    name: str
    kind: str  # "text" or "chat"
    backend: str  # tokenizer.json as it is used, padding and truncation off
    eos_id: int


def read_tokenizer(name: str, kind: str) -> tuple[TokenizerRecipe, TokenizerIdentity]:
    """A fast tokenizer by directory or hub name. Raises Refusal: not there, not fast, no EOS, no chat template."""
    import tokenizers

    tokenizer = _load_tokenizer(name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: the tokenizer has no EOS token to end a record with")
    if kind == "chat" and not tokenizer.chat_template:
        raise UserError(f"{name}: the tokenizer has no chat template, and the records are chats")
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.no_truncation()
    backend, file = tokenizer.backend_tokenizer.to_str(), _tokenizer_file(name)
    template = tokenizer.chat_template if kind == "chat" else ""
    facts = TokenizerIdentity(
        sha256=canonical_tokenizer_sha256(backend.encode()),
        file_sha256=hashlib.sha256(file).hexdigest() if file else "",
        meaning_sha256=canonical_tokenizer_sha256(file) if file else "",
        template_sha256=hashlib.sha256(str(template).encode()).hexdigest(),
        vocab_size=len(tokenizer),
        eos_id=int(tokenizer.eos_token_id),
        version=tokenizers.__version__,
    )
    return TokenizerRecipe(name, kind, backend, facts.eos_id), facts


class RecordTokenizer:
    """Records to ids in this process. A record ends by EOS, unless its chat template has written EOS itself."""

    def __init__(self, recipe: TokenizerRecipe) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
        from tokenizers import Tokenizer

        self.recipe = recipe
        self.backend = Tokenizer.from_str(recipe.backend)
        self.chat = _load_tokenizer(recipe.name) if recipe.kind == "chat" else None

    def __call__(self, records: list[Any], where: list[str]) -> TokenBatch:
        """`where` names each record for the error. Raises Refusal for one that is no text or no chat."""
        texts = [self._text(record, place) for record, place in zip(records, where, strict=True)]
        joined, lengths = array("i"), []
        for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False):
            ids = encoding.ids
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
            # Arrow fills the keys that only some messages have with None; a template must not see them.
            messages = [{key: value for key, value in message.items() if value is not None} for message in record]
            return str(self.chat.apply_chat_template(messages, tokenize=False))
        except Exception as error:  # noqa: BLE001 - templates are programs of strangers
            raise UserError(f"{where}: the chat template fails: {type(error).__name__}: {error}") from None


class TokenizerPool:
    """Several processes that tokenise, for one shard after another; with one worker, this process."""

    def __init__(self, recipe: TokenizerRecipe, workers: int) -> None:
        self.workers = workers
        self._here = RecordTokenizer(recipe) if workers == 1 else None
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            spawn = multiprocessing.get_context("spawn")  # a fork would copy Arrow's threads half
            self._pool = ProcessPoolExecutor(workers, mp_context=spawn, initializer=_start_worker, initargs=(recipe,))

    def __enter__(self) -> TokenizerPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def tokenized(self, batches: Iterable[tuple[list[Any], list[str]]]) -> Iterator[TokenBatch]:
        """Every batch, in order. Raises Refusal: of a record, or because a worker was killed."""
        if self._pool is None:
            assert self._here is not None
            yield from (self._here(*batch) for batch in batches)
            return
        waiting: deque[Future[TokenBatch]] = deque()
        try:
            for batch in batches:
                waiting.append(self._pool.submit(_tokenize, *batch))
                if len(waiting) >= self.workers * BATCHES_PER_WORKER:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise UserError("a tokenising process was killed, out of memory perhaps: use fewer --workers") from None


_worker: RecordTokenizer | None = None  # of a process of the pool


def _start_worker(recipe: TokenizerRecipe) -> None:
    global _worker
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _worker = RecordTokenizer(recipe)


def _exit_with_parent() -> None:
    """A pool's process waits for work for ever; where the command was killed, none will come."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize(records: list[Any], where: list[str]) -> TokenBatch:
    assert _worker is not None
    return _worker(records, where)


def _load_tokenizer(name: str) -> Any:
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that torch is missing is as it should be
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").exists():
        raise UserError(f"{name}: no tokenizer_config.json there: name a directory that save_pretrained wrote")
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, use_fast=True)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"{name}: cannot be loaded as a tokenizer: {first}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{name}: has no fast tokenizer (tokenizer.json)")
    return tokenizer


def _tokenizer_file(name: str) -> bytes:
    if Path(name).is_dir():
        path = Path(name) / "tokenizer.json"
        return path.read_bytes() if path.exists() else b""
    from transformers.utils import cached_file

    found = cached_file(name, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
    return Path(found).read_bytes() if found else b""
