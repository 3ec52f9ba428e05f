"""What packing in parallel gains over tokenising in one process: rows a second of the same corpus, in one run.

    python -m tests.benchmarks.pack [--rows 40000] [--repeat 3]

`one process` is a loop of the same tokenizer over the same records with its own threads off: what a data loader does
that tokenises on the way. `pack` is the whole command's work, files, hashes and start of its processes included.
The target is 1.5 times on two cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.trainer.conftest import make_tokenizer, words, write_jsonl
from trainer.corpus import Corpus, deal, read_corpus
from trainer.pack import PackSettings, pack
from trainer.tokens import Recipe, RecordTokenizer, TokenizerFacts, TokenizerPool, read_tokenizer

TARGET_RATIO: Final = 1.5
WORDS: Final = 300  # a record


def one_process(corpus: Corpus, recipe: Recipe) -> float:
    begun = time.perf_counter()
    tokenize = RecordTokenizer(recipe)
    for _, records in deal(corpus, 1, 0, True).batches(corpus.column):
        tokenize(records, [""] * len(records))
    return time.perf_counter() - begun


def packed(corpus: Corpus, recipe: Recipe, facts: TokenizerFacts, directory: Path, workers: int) -> float:
    begun = time.perf_counter()
    with TokenizerPool(recipe, workers) as pool:
        pack(corpus, deal(corpus, 1, 0, True), PackSettings(2048, False), facts, pool, directory, lambda rows: None)
    return time.perf_counter() - begun


def say(words: str) -> None:
    sys.stdout.write(words + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args(arguments)
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="pack-bench-") as name:
        directory = Path(name)
        texts = [words(row, WORDS) for row in range(min(options.rows, 500))]
        source = write_jsonl(directory / "c.jsonl", [{"text": texts[row % len(texts)]} for row in range(options.rows)])
        corpus = read_corpus(str(source), "train", None)
        recipe, facts = read_tokenizer(str(make_tokenizer(directory / "tokenizer")), "text")
        ones, packs = [], []
        for _ in range(options.repeat):  # turn about, so that a busy spell hits both
            ones.append(one_process(corpus, recipe))
            packs.append(packed(corpus, recipe, facts, directory / "blocks", workers))
    one, whole = statistics.median(ones), statistics.median(packs)
    say(
        f"{workers} cores, load {os.getloadavg()[0]:.1f}, {options.rows:,} rows of {WORDS} words, {options.repeat} runs"
    )
    say(f"one process  {one:7.2f} s  {options.rows / one:9,.0f} rows/s")
    say(f"pack         {whole:7.2f} s  {options.rows / whole:9,.0f} rows/s  ({workers} processes)")
    verdict = "met" if one / whole >= TARGET_RATIO else "MISSED"
    say(f"ratio {one / whole:.2f}, target {TARGET_RATIO}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
