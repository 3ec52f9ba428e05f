"""A corpus and a tokenizer generated for the tests: nothing is downloaded, and no home directory is written to."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CACHE = tempfile.TemporaryDirectory(prefix="wattwatch-tests-")
os.environ["HF_HOME"] = CACHE.name  # read when datasets is imported
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def _cache() -> Iterator[None]:
    yield
    CACHE.cleanup()


def words(seed: int, count: int) -> str:
    dice = random.Random(seed)
    return " ".join(f"w{dice.randint(0, 99)}" for _ in range(count))


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_tokenizer(directory: Path, vocab_size: int = 400, template: str | None = None) -> Path:
    """A byte-level BPE of a few hundred tokens; its EOS is id 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([words(seed, 50) for seed in range(50)], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=template)
    fast.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(
        tmp_path_factory.mktemp("tokenizer"),
        template="{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% if m.name is defined %}!{% endif %}"
        "{% endfor %}",
    )


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 records of 0 to 60 words."""
    dice = random.Random(7)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    return write_jsonl(path, [{"text": words(row, dice.randint(0, 60))} for row in range(200)])
