"""How much faster packing in parallel is than tokenizing in one process: rows per second, same corpus, one run.

    python -m tests.benchmarks.pack [--rows 40000] [--repeat 3]

`one process` is the simplest loop over the same records: the tokenizers library in batches, without its own threads,
ids and an EOS into a list; nothing is written. Calling transformers' tokenizer on the same records takes longer. `pack`
is the whole command, with files, hashes and the start of its processes. CPU seconds are user and system time of all
processes. The target is 1.5 times on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

# Worker processes import this module again, as they do `wattwatch-train`: the import must be fast.
if TYPE_CHECKING:
    from wattwatch.trainer.pack.corpus import Corpus
    from wattwatch.trainer.pack.tokens import TokenizerIdentity, TokenizerRecipe

TARGET_RATIO: Final = 1.5
WORDS: Final = 300  # a record


@dataclass(slots=True)
class Cost:
    """Time of one run, filled in when it has ended."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0


@contextmanager
def measured() -> Iterator[Cost]:
    cost, begun, before = Cost(), time.perf_counter(), os.times()
    yield cost
    after = os.times()
    cost.wall_seconds, cost.cpu_seconds = time.perf_counter() - begun, sum(after[:4]) - sum(before[:4])


def one_process(corpus: Corpus, recipe: TokenizerRecipe) -> Cost:
    from tokenizers import Tokenizer

    from wattwatch.trainer.pack.corpus import shard_corpus

    with measured() as cost:
        tokenizer, tokens = Tokenizer.from_str(recipe.backend), 0
        for _, records in shard_corpus(corpus, 1, 0, True).batches(corpus.column):
            for encoding in tokenizer.encode_batch_fast(records, add_special_tokens=False):
                ids = encoding.ids
                ids.append(recipe.eos_id)
                tokens += len(ids)
    return cost


def packed(corpus: Corpus, recipe: TokenizerRecipe, facts: TokenizerIdentity, directory: Path, workers: int) -> Cost:
    from wattwatch.trainer.pack.corpus import shard_corpus
    from wattwatch.trainer.pack.packing import PackSettings, pack_shard
    from wattwatch.trainer.pack.tokens import TokenizerPool

    with measured() as cost, TokenizerPool(recipe, workers) as pool:
        pack_shard(
            corpus,
            shard_corpus(corpus, 1, 0, True),
            PackSettings(2048, False),
            facts,
            pool,
            directory,
            lambda rows: None,
        )
    return cost


def say(words: str) -> None:
    sys.stdout.write(words + "\n")


def said(name: str, rows: int, costs: list[Cost]) -> float:
    """The median wall-clock seconds."""
    wall = statistics.median(cost.wall_seconds for cost in costs)
    cpu = statistics.median(cost.cpu_seconds for cost in costs)
    say(f"{name:<18} {wall:7.2f} s  {rows / wall:9,.0f} rows/s  CPU {cpu:7.2f} s")
    return wall


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from tests.trainer.conftest import make_tokenizer, words, write_jsonl
    from wattwatch.trainer.pack.corpus import read_corpus
    from wattwatch.trainer.pack.tokens import read_tokenizer

    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="pack-bench-") as name:
        directory = Path(name)
        texts = [words(row, WORDS) for row in range(min(options.rows, 500))]
        source = write_jsonl(directory / "c.jsonl", [{"text": texts[row % len(texts)]} for row in range(options.rows)])
        corpus = read_corpus(str(source), "train", None)
        recipe, facts = read_tokenizer(str(make_tokenizer(directory / "tokenizer")), "text")
        ones, packs = [], []
        for _ in range(options.repeat):  # in turns, so that other load on the machine affects both
            ones.append(one_process(corpus, recipe))
            packs.append(packed(corpus, recipe, facts, directory / "blocks", workers))
    say(
        f"{workers} cores, load {os.getloadavg()[0]:.1f}, {options.rows:,} rows of {WORDS} words, {options.repeat} runs"
    )
    one, whole = said("one process", options.rows, ones), said(f"pack, {workers} processes", options.rows, packs)
    verdict = "met" if one / whole >= TARGET_RATIO else "MISSED"
    say(f"ratio {one / whole:.2f}, target {TARGET_RATIO}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
