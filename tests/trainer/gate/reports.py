"""Reports of a healthy job, in which a test changes one thing: the 16 ranks on two nodes of arXiv 2608.05944."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from typing import Any, Final

from wattwatch.trainer.gate.model import (
    CheckLevel,
    CheckpointReport,
    DevicesReport,
    GateSettings,
    GateVerdict,
    GpuReport,
    NodeReport,
    ShardReport,
)
from wattwatch.trainer.pack.manifest import ByteSample, PackManifest, sample_ranges, shard_row_range

SEQ_LEN: Final = 2048
CORPUS_ROWS: Final = 160_003
# The counts that arXiv 2608.05944, section 5, gives for ranks 0, 3 and 11; the others are between them.
PAPER_BLOCKS: Final = (30_849, 30_850, 30_860, 30_835, 30_866, 30_870, 30_851, 30_842,
                       30_858, 30_861, 30_844, 30_888, 30_853, 30_847, 30_869, 30_856)  # fmt: skip


def manifest(rank: int, world: int, blocks: int, **changes: Any) -> PackManifest:
    rows, first, last = shard_row_range(CORPUS_ROWS, world, rank, True)
    size = blocks * SEQ_LEN * 4
    packed = PackManifest(
        v=1, world=world, rank=rank, contiguous=True, corpus_sha256="c" * 64, corpus_rows=CORPUS_ROWS, rows=rows,
        first_row=first, last_row=last, row_xor=reduce(lambda a, b: a ^ b, range(first or 0, (last or 0) + 1), 0),
        empty_rows=0, column="text", kind="text", seq_len=SEQ_LEN, blocks=blocks, tokens=blocks * SEQ_LEN + 9,
        dropped_tokens=9, min_token_id=0, max_token_id=151_642, vocab_size=151_669, tokenizer_sha256="a" * 64,
        tokenizer_file_sha256="f" * 64, tokenizer_meaning_sha256="e" * 64, template_sha256="b" * 64, eos_id=151_645,
        datasets_version="5.2.0", tokenizers_version="0.23.3", size_bytes=size, sha256=f"{rank:064x}",
        samples=tuple(ByteSample(offset, length, "0" * 64) for offset, length in sample_ranges(size)),
        document_starts=None,
    )  # fmt: skip
    return replace(packed, **changes)


def shard(rank: int, packed: PackManifest, **changes: Any) -> ShardReport:
    report = ShardReport(
        rank, f"/local/rank-{rank:05d}.i32", manifest=packed, size_bytes=packed.size_bytes, min_id=3, max_id=151_000,
        filesystem="xfs",
    )  # fmt: skip
    return replace(report, **changes)


def node(name: str, ranks: range, blocks: Mapping[int, int], world: int = 16, **changes: Any) -> NodeReport:
    report = NodeReport(
        node=name,
        ranks=tuple(ranks),
        settings=GateSettings(world=world, micro_batch=1, accumulation=8, keep=2, checkpoint_bytes=62 * 10**9),
        versions={"python": "3.12.3", "torch": "2.13.0", "datasets": "5.2.0"},
        environment={"TORCH_FR_BUFFER_SIZE": "2000", "NCCL_DEBUG": "WARN"},
        code_sha256="d" * 64,
        shards=tuple(shard(rank, manifest(rank, world, blocks[rank])) for rank in ranks),
        checkpoint=CheckpointReport("/nfs/run/checkpoints", free_bytes=10**12, filesystem="nfs4"),
        devices=DevicesReport(gpus=tuple(gpu(index) for index in range(len(ranks)))),
        skew_seconds=0.01,
    )
    return replace(report, **changes)


def gpu(index: int, **changes: Any) -> GpuReport:
    return replace(GpuReport(index, f"GPU-{index}", "NVIDIA B300 SXM6 AC", "580.82.07", 275_040.0, 4.0), **changes)


def job(blocks: tuple[int, ...] = PAPER_BLOCKS) -> list[NodeReport]:
    counts = dict(enumerate(blocks))
    half = len(blocks) // 2
    a, b = (range(half), range(half, len(blocks)))
    first, second = node("node-a", a, counts, len(blocks)), node("node-b", b, counts, len(blocks))
    assert second.checkpoint is not None
    return [first, replace(second, checkpoint=replace(second.checkpoint, sees_rank_0=True))]


def with_shard(reports: list[NodeReport], rank: int, **changes: Any) -> list[NodeReport]:
    """The same job with one rank's report changed; `manifest_...` changes its manifest."""
    changed_manifest = {
        key.removeprefix("manifest_"): value for key, value in changes.items() if key.startswith("manifest_")
    }
    own = {key: value for key, value in changes.items() if not key.startswith("manifest_")}

    def changed(report: ShardReport) -> ShardReport:
        if report.rank != rank:
            return report
        assert report.manifest is not None
        new = replace(report, manifest=replace(report.manifest, **changed_manifest)) if changed_manifest else report
        return replace(new, **own)

    return [replace(report, shards=tuple(changed(report) for report in report.shards)) for report in reports]


def with_node(reports: list[NodeReport], index: int, **changes: Any) -> list[NodeReport]:
    return [replace(report, **changes) if place == index else report for place, report in enumerate(reports)]


def level_and_problems(verdict: GateVerdict, check: str) -> tuple[CheckLevel, str]:
    """(level, all problems) of one check."""
    (found,) = [one for one in verdict.checks if one.name == check]
    return found.level, "\n".join(problem.text for problem in found.problems)
