"""`wattwatch-train pack SOURCE`: records to token blocks on this node, before any GPU is held for it."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainer.pack.manifest import Manifest
from trainer.ranks import WORLD_VARIABLES, Ranks, chosen_ranks


@click.command()
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory, local to the node.")
@click.option("--tokenizer", required=True, help="Directory of save_pretrained, or a name on the hub.")
@click.option("--world", type=click.IntRange(1), envvar=WORLD_VARIABLES, required=True, help="Ranks of the job.")
@click.option("--ranks", type=Ranks(), help="Those of this node, as 0-7; else the launcher's RANK, else all.")
@click.option("--seq-len", type=click.IntRange(2), default=2048, show_default=True, help="Token ids in a block.")
@click.option("--split", default="train", show_default=True)
@click.option("--column", help="Column of the records: text, or lists of messages; else text or messages.")
@click.option("--contiguous/--strided", default=True, show_default=True, help="How rows are dealt to ranks.")
@click.option("--document-mask", is_flag=True, help="Also write where records begin.")
@click.option("--workers", type=click.IntRange(1), help="Tokenising processes. [default: one per CPU core]")
@click.option("--json", "as_json", is_flag=True, help="The manifests, as a list.")
def pack_command(
    source: str,
    output: Path,
    tokenizer: str,
    world: int,
    ranks: tuple[int, ...] | None,
    seq_len: int,
    split: str,
    column: str | None,
    contiguous: bool,
    document_mask: bool,
    workers: int | None,
    as_json: bool,
) -> None:
    """Tokenise each record of SOURCE once and pack the ids into fixed blocks: one .i32 file and manifest per rank.

    SOURCE is JSONL (a path or a glob), a directory of datasets' save_to_disk, or the name of a dataset. Same input,
    bit-same output. Exit code 2: refused, and the rank it names was not published.
    """
    ranks = chosen_ranks(world, ranks)
    from trainer.pack.corpus import deal, read_corpus
    from trainer.pack.packing import PackSettings, pack
    from trainer.pack.tokens import TokenizerPool, read_tokenizer

    corpus = read_corpus(source, split, column)
    recipe, facts = read_tokenizer(tokenizer, corpus.kind)
    settings = PackSettings(seq_len, document_mask)
    pool = TokenizerPool(recipe, workers or len(os.sched_getaffinity(0)))
    shards = [deal(corpus, world, rank, contiguous) for rank in ranks]
    manifests: list[Manifest] = []
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with pool, Progress(*bar, console=Console(stderr=True)) as progress:
        for shard in shards:
            task = progress.add_task(f"rank {shard.rank}", total=shard.row_ids.size)
            manifest = pack(corpus, shard, settings, facts, pool, output, partial(progress.advance, task))
            manifests.append(manifest)
            if not as_json:
                click.echo(in_words(manifest))
    if as_json:
        click.echo(json.dumps([asdict(manifest) for manifest in manifests], indent=1))


def in_words(manifest: Manifest) -> str:
    return (
        f"rank {manifest.rank} of {manifest.world}: {manifest.rows:,} rows ({manifest.empty_rows:,} empty), "
        f"{manifest.tokens:,} tokens, {manifest.blocks:,} blocks of {manifest.seq_len:,}, "
        f"{manifest.dropped_tokens:,} tokens dropped"
    )
