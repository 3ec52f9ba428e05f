"""The six checks: from all nodes' reports to the verdict. Pure functions, so every gate process gets the same result.

arXiv 2608.05944, section 7, says that there were six checks, that unequal block counts are a warning, and that the
minimum is recorded. It does not say which six they were; these are ours.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from wattwatch.trainer.checkpoint.complete import START_FROM_WEIGHTS
from wattwatch.trainer.formatting import format_all, format_bytes_short, format_count, format_rank_list
from wattwatch.trainer.gate.model import (
    BlockCounts,
    CheckLevel,
    GateCheck,
    GateProblem,
    GateSettings,
    GateVerdict,
    GpuReport,
    NodeReport,
    ResumeReport,
    ShardReport,
)
from wattwatch.trainer.pack.manifest import (
    START_BYTES,
    TOKEN_BYTES,
    PackManifest,
    blocks_sha256,
    sample_ranges,
    shard_row_range,
    xor_below,
)
from wattwatch.trainer.run_directory import exclude_dead

# World. Chosen: NTP keeps nodes within milliseconds, and logs of two nodes are hard to compare beyond a second.
MAX_SKEW_SECONDS: Final = 1.0
# Network interfaces may have other names on other nodes, so a difference is only a warning.
PER_NODE_VARIABLES: Final = ("_IFNAME", "_HCA", "NCCL_HOSTID", "NCCL_TOPO_FILE")

# Data. Both fractions are chosen: enough for a few empty records and for the blocks after the last whole step.
MAX_EMPTY_ROW_FRACTION: Final = 0.001
MAX_LOST_BLOCK_FRACTION: Final = 0.01
NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs"}
    | {"9p", "virtiofs", "wekafs", "afs", "fuse.sshfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"}
)
SPREAD_CONSEQUENCES: Final = {
    "min": "all ranks will stop after the smallest number of blocks",
    "pad": "ranks with fewer blocks will repeat their first blocks",
    "off": 'train.evenness is "off", so the job will hang when the rank with the fewest blocks runs out of blocks',
}
REPACK: Final = "pack the dataset again"
REPACK_ALL: Final = "; pack the dataset again for all ranks, with the same input, options and versions"
SAME_IN_ALL_MANIFESTS: Final = (
    ("corpus_sha256", "corpus"),
    ("corpus_rows", "number of rows in the corpus"),
    ("contiguous", "contiguous sharding"),
    ("datasets_version", "datasets version"),
    ("column", "column"),
    ("kind", "kind of record"),
    ("tokenizer_sha256", "tokenizer"),
    ("template_sha256", "chat template"),
    ("eos_id", "EOS id"),
    ("vocab_size", "vocabulary size"),
    ("seq_len", "seq_len"),
)

# Checkpoint
WEIGHT_BYTES_PER_PARAMETER: Final = 2  # bfloat16
OPTIMIZER_BYTES_PER_PARAMETER: Final = 12  # parameter and AdamW's two moments, float32
MAX_SAVE_TIME_FRACTION: Final = 0.5  # of the timeout. Chosen: other jobs write to the same disks

# Devices. A driver keeps some memory of an idle GPU for itself, below 1 %; 5 % is chosen to be far above that.
MAX_USED_MEMORY_FRACTION: Final = 0.05
MAX_IDLE_CELSIUS: Final = 60.0  # idle GPUs are at 25 to 45; one whose job has just ended cools within seconds
MAX_IDLE_POWER_FRACTION: Final = 0.3  # of the limit; idle GPUs draw 0.1 to 0.2


def run_checks(reports: Sequence[NodeReport], note: str = "") -> GateVerdict:
    """All six checks. The first report is rank 0's, or the only one; `note` says why ranks are missing, if any are."""
    settings = reports[0].settings
    shards = {shard.rank: shard for report in reports for shard in report.shards}
    counts = count_blocks(settings, shards)
    checks = (
        check_world(reports, note),
        check_block_files(settings, shards),
        check_shards(reports, shards),
        check_evenness(reports, shards, counts),
        check_checkpoint(reports, counts),
        check_devices(reports),
    )
    return GateVerdict(checks, counts)


# World: is every rank here exactly once, and do the nodes agree?


def check_world(reports: Sequence[NodeReport], note: str) -> GateCheck:
    """Checks that every rank appears once and that all nodes agree on settings, code, versions and environment."""
    settings = reports[0].settings
    seen = Counter(rank for report in reports for rank in report.ranks)
    problems = []
    if missing := [rank for rank in range(settings.world) if rank not in seen]:
        problems.append(fail(f"{format_rank_list(missing)} did not report{': ' + note if note else ''}"))
    for rank in sorted(rank for rank, times in seen.items() if times > 1):
        nodes = [report.node for report in reports if rank in report.ranks]
        problems.append(fail(f"rank {rank} was reported {len(nodes)} times instead of once, by {list_names(nodes)}"))
    if outside := sorted(rank for rank in seen if rank >= settings.world):
        highest = settings.world - 1
        problems.append(fail(f"{format_rank_list(outside)} reported, but the highest rank of this job is {highest}"))
    # An exception of the gate on one node: its report may be incomplete, so the job must not start.
    for report in reports:
        problems += [fail(f"{report.node}: {trouble}") for trouble in report.troubles]
    for setting in type(settings).__dataclass_fields__:
        problems += differences(f"setting {setting}", [(r.node, getattr(r.settings, setting)) for r in reports])
    problems += differences("the trainer's code", [(r.node, r.code_sha256) for r in reports if r.code_sha256])
    configs = [(r.node, (r.model and r.model.config_sha256) or "none given") for r in reports]
    problems += differences("the configuration file", configs)
    for library in sorted({name for report in reports for name in report.versions}):
        found = [(r.node, r.versions.get(library, "not reported")) for r in reports if r.versions]
        problems += differences(library, found)
    for name in sorted({name for report in reports for name in report.environment}):
        level = CheckLevel.WARN if name.endswith(PER_NODE_VARIABLES) else CheckLevel.FAIL
        problems += differences(name, [(r.node, r.environment.get(name, "not set")) for r in reports], level)
    for report in reports:
        if report.skew_seconds is not None and abs(report.skew_seconds) > MAX_SKEW_SECONDS:
            direction = "behind" if report.skew_seconds > 0 else "ahead of"
            seconds = abs(report.skew_seconds)
            problems.append(warn(f"{report.node}: its clock is {seconds:.1f} s {direction} the clock of rank 0's node"))
    summary = f"ranks={len(seen)}/{settings.world} nodes={len({report.node for report in reports})}"
    return GateCheck("world", tuple(problems), summary)


# Blocks, shards, evenness: is the data whole, is each row of the corpus in it once, and has every rank enough?


def check_block_files(settings: GateSettings, shards: dict[int, ShardReport]) -> GateCheck:
    """Checks that each rank's token file exists, is complete, and is the one that its manifest describes."""
    problems = []
    for rank, shard in sorted(shards.items()):
        problems += [fail(f"rank {rank}: {shard.path}: {text}") for text in block_file_problems(settings, shard)]
    remote = [rank for rank, shard in shards.items() if shard.filesystem in NETWORK_FILESYSTEMS]
    if remote:
        kinds = list_names({shards[rank].filesystem for rank in remote})
        problems.append(
            warn(
                f"{format_rank_list(remote)}: blocks are on a network file system ({kinds}), not on the node's local "
                "disk"
            )
        )
    size = sum(shard.size_bytes or 0 for shard in shards.values())
    return GateCheck("blocks", tuple(problems), f"files={len(shards)} bytes={size:,}")


def block_file_problems(settings: GateSettings, shard: ShardReport) -> list[str]:
    if shard.trouble or shard.manifest is None or shard.size_bytes is None:
        return [shard.trouble or "no manifest"]
    manifest, problems = shard.manifest, []
    seq_len = settings.seq_len or manifest.seq_len
    if manifest.seq_len != seq_len or manifest.seq_len < 1:
        problems.append(
            f"the file was packed with --seq-len {manifest.seq_len}, but the job needs {seq_len}; {REPACK} with "
            f"--seq-len {seq_len}"
        )
    if manifest.rank != shard.rank:
        problems.append(f"its manifest belongs to rank {manifest.rank}; {REPACK}")
    if seq_len >= 1 and shard.size_bytes % (TOKEN_BYTES * seq_len):
        problems.append(
            f"the file is truncated: it has {format_count(shard.size_bytes, 'byte')}, not a whole number of blocks "
            f"of {seq_len} "
            f"int32 ids; {REPACK}"
        )
    if (
        shard.size_bytes != manifest.size_bytes
        or manifest.size_bytes != manifest.blocks * manifest.seq_len * TOKEN_BYTES
    ):
        problems.append(
            f"the file has {format_count(shard.size_bytes, 'byte')}, but its manifest says "
            f"{format_count(manifest.size_bytes, 'byte')} in "
            f"{format_count(manifest.blocks, 'block')}; {REPACK}"
        )
    elif shard.differing_offsets:
        problems.append(
            f"the bytes at offset {shard.differing_offsets[0]:,} differ from those that were packed; {REPACK}"
        )
    # A manifest without hashes would let any file of the right size pass.
    elif manifest.blocks and tuple((sample.offset, sample.bytes) for sample in manifest.samples) != sample_ranges(
        manifest.size_bytes
    ):
        problems.append(f"its manifest lacks the hashes that are needed to verify the file; {REPACK}")
    if settings.document_mask and manifest.document_starts is None:
        problems.append(
            f"the file was packed without --document-mask, but train.document_mask needs that option; {REPACK} with "
            "--document-mask"
        )
    if manifest.document_starts is not None and shard.starts_bytes != manifest.document_starts * START_BYTES:
        problems.append(
            f"the file with the positions where records begin is missing or has the wrong size; {REPACK} with "
            "--document-mask"
        )
    return problems


def check_shards(reports: Sequence[NodeReport], shards: dict[int, ShardReport]) -> GateCheck:
    """Checks that the ranks together have each row of the corpus once, all tokenized in the same way."""
    world = reports[0].settings.world
    manifests = {rank: shard.manifest for rank, shard in sorted(shards.items()) if shard.manifest is not None}
    problems = []
    for rank, manifest in manifests.items():
        problems += [fail(f"rank {rank}: {text}") for text in _row_problems(world, manifest)]
    for name, label in SAME_IN_ALL_MANIFESTS:
        values = [(f"rank {rank}", getattr(manifest, name)) for rank, manifest in manifests.items()]
        problems += differences(label, values, advice=REPACK_ALL)
    masks = [(f"rank {rank}", manifest.document_starts is not None) for rank, manifest in manifests.items()]
    problems += differences("document mask", masks, advice=REPACK_ALL)
    versions = [(f"rank {rank}", manifest.tokenizers_version) for rank, manifest in manifests.items()]
    problems += differences("tokenizers version", versions, CheckLevel.WARN)
    rows = sum(manifest.rows for manifest in manifests.values())
    corpus_rows = max((manifest.corpus_rows for manifest in manifests.values()), default=0)
    if manifests and len(manifests) == world and not problems:
        # The exclusive or of all row ids finds a row that is missing or twice without sending the rows themselves.
        xor = 0
        for manifest in manifests.values():
            xor ^= manifest.row_xor
        if rows != corpus_rows or xor != xor_below(corpus_rows):
            problems.append(
                fail(
                    "some rows are missing or packed twice (rows of all ranks: "
                    f"{rows:,}, rows of the corpus: {corpus_rows:,}){REPACK_ALL}"
                )
            )
    empty = sum(manifest.empty_rows for manifest in manifests.values())
    if rows and empty / rows > MAX_EMPTY_ROW_FRACTION:
        problems.append(warn(f"{empty:,} of {format_count(rows, 'row')} produced no tokens"))
    for report in reports:
        problems += _tokenizer_problems(report, manifests)
    return GateCheck("shards", tuple(problems), f"rows={rows:,}/{corpus_rows:,} empty={empty:,}")


def _row_problems(world: int, manifest: PackManifest) -> list[str]:
    if manifest.rows == 0:
        return ["its shard has no rows; pack more records, or use fewer ranks"]
    if manifest.world != world:
        return [f"its blocks were packed for {format_count(manifest.world, 'rank')}, but the job has {world}; {REPACK}"]
    if not 0 <= manifest.rank < world:
        return []  # check_block_files reports that it is another rank's
    count, first, last = shard_row_range(manifest.corpus_rows, world, manifest.rank, manifest.contiguous)
    if (manifest.rows, manifest.first_row, manifest.last_row) != (count, first, last):
        return [
            f"its shard has {format_count(manifest.rows, 'row')} (first row {manifest.first_row}, last row "
            f"{manifest.last_row}), but should have {count:,} (first row {first}, last row {last}); {REPACK}"
        ]
    return []


def _tokenizer_problems(report: NodeReport, manifests: dict[int, PackManifest]) -> list[GateProblem]:
    model = report.model
    if model is None or model.tokenizer_file_sha256 is None:
        return []
    other = [
        rank
        for rank in report.ranks
        if (manifest := manifests.get(rank)) is not None
        and manifest.tokenizer_file_sha256 not in ("", model.tokenizer_file_sha256)
        # Saving a tokenizer again may change spacing and padding settings, and with them the file's hash.
        and manifest.tokenizer_meaning_sha256 != model.tokenizer_meaning_sha256
    ]
    if not other:
        return []
    return [
        fail(
            f"{report.node}: the blocks of {format_rank_list(other)} were packed with a tokenizer that is not the "
            f"model's; {REPACK} with the model's tokenizer"
        )
    ]


def count_blocks(settings: GateSettings, shards: dict[int, ShardReport]) -> BlockCounts | None:
    """Whole blocks by rank, floor(bytes / 4 / seq_len); None while the count of some rank is not known."""
    counts = {}
    for rank in range(settings.world):
        shard = shards.get(rank)
        seq_len = settings.seq_len or (shard.manifest.seq_len if shard and shard.manifest else None)
        if shard is None or shard.size_bytes is None or not seq_len or seq_len < 1:
            return None
        counts[rank] = shard.size_bytes // TOKEN_BYTES // seq_len
    # On a tie the lowest rank is named, so that all nodes print the same.
    shortest, longest = min(counts, key=lambda r: (counts[r], r)), max(counts, key=lambda r: (counts[r], -r))
    steps = counts[longest if settings.evenness == "pad" else shortest] // settings.blocks_per_step
    taken, total = steps * settings.blocks_per_step, sum(counts.values())
    lost = 1 - sum(min(taken, count) for count in counts.values()) / total if total else 0.0
    by_rank = {str(rank): count for rank, count in counts.items()}
    return BlockCounts(counts[shortest], counts[longest], shortest, longest, steps, lost, by_rank)


def check_evenness(
    reports: Sequence[NodeReport], shards: dict[int, ShardReport], counts: BlockCounts | None
) -> GateCheck:
    """At least one step for every rank, and token ids that the model has.

    Unequal counts are only a warning: the ranks agree on the minimum before they start, see trainer/train/evenfix.py.
    """
    settings, problems = reports[0].settings, []
    if counts is None:
        unknown = [r for r in range(settings.world) if r not in shards or shards[r].size_bytes is None]
        problems.append(fail(f"block counts are unknown for {format_rank_list(unknown) if unknown else 'all ranks'}"))
    elif counts.steps == 0:
        problems.append(
            fail(
                f"rank {counts.shortest_rank} has {format_count(counts.global_min_blocks, 'block')}, but one step "
                f"needs {settings.blocks_per_step:,}; pack more data, or lower train.accumulation"
            )
        )
    elif counts.spread:
        problems.append(
            warn(
                f"block counts differ by {counts.spread:,}: rank {counts.shortest_rank} has "
                f"{format_count(counts.global_min_blocks, 'block')}, and rank {counts.longest_rank} has "
                f"{counts.max_blocks:,}; {SPREAD_CONSEQUENCES.get(settings.evenness, SPREAD_CONSEQUENCES['min'])}"
            )
        )
    if counts and counts.steps and counts.lost_share > MAX_LOST_BLOCK_FRACTION:
        problems.append(warn(f"{counts.lost_share:.2%} of all blocks will not be used in any step"))
    model_sizes = [r.model.vocab_size for r in reports if r.model and r.model.vocab_size]
    for rank, shard in sorted(shards.items()):
        texts = _token_id_problems(settings, shard, model_sizes)
        problems += [fail(f"rank {rank}: {shard.path}: {text}") for text in texts]
    summary = "" if counts is None else (
        f"spread={counts.spread:,} min={counts.global_min_blocks:,} steps={counts.steps:,} "
        f"lost={counts.lost_share:.3%}"
    )  # fmt: skip
    return GateCheck("evenness", tuple(problems), summary)


def _token_id_problems(settings: GateSettings, shard: ShardReport, model_sizes: list[int]) -> list[str]:
    """An id outside the vocabulary would read beyond the embedding, on a GPU without an error message."""
    manifest, problems = shard.manifest, []
    vocabulary = settings.vocab_size or min(model_sizes, default=0) or (manifest.vocab_size if manifest else 0)
    known_min = manifest.min_token_id if manifest and manifest.blocks else None
    low = min((i for i in (shard.min_id, known_min) if i is not None), default=0)
    high = max((i for i in (shard.max_id, manifest.max_token_id if manifest else None) if i is not None), default=0)
    if low < 0:
        problems.append(f"token id {low} is negative")
    if vocabulary and high >= vocabulary:
        problems.append(
            f"token id {high:,} is outside the vocabulary of {vocabulary:,} ids; {REPACK} with the model's tokenizer"
        )
    if shard.min_id is not None and shard.min_id == shard.max_id:
        problems.append(f"every token id that was read is {shard.min_id}")
    return problems


# Checkpoint: one directory, shared by all ranks and used by no other job, with room and speed for a save; and a
# checkpoint to resume from.


def check_checkpoint(reports: Sequence[NodeReport], counts: BlockCounts | None) -> GateCheck:
    settings, checkpoint_bytes = reports[0].settings, _checkpoint_bytes(reports)
    problems = [
        *_directory_problems(reports),
        *_live_rank_problems(reports),
        *_model_problems(reports),
        *_resume_problems(reports, counts),
    ]
    directories = [report.checkpoint for report in reports if report.checkpoint]
    free = min((each.free_bytes for each in directories if each.free_bytes is not None), default=None)
    # One more than are kept: the oldest is removed only after the new one is complete.
    if checkpoint_bytes and free is not None and free < (settings.keep + 1) * checkpoint_bytes:
        too_small = free < settings.keep * checkpoint_bytes
        needed = f"{format_count(settings.keep, 'checkpoint')} of {format_bytes_short(checkpoint_bytes)}"
        needed += "" if too_small else " plus the one being written"
        text = (
            f"{directories[0].directory} has {format_bytes_short(free)} of free space, which is too little for "
            f"{needed}; free another {format_bytes_short((settings.keep + 1) * checkpoint_bytes - free)}, or lower "
            "checkpoint.keep"
        )
        problems.append(fail(text) if too_small else warn(text))
    seconds = _estimate_save_seconds(reports, checkpoint_bytes)
    timeout = settings.save_timeout_seconds
    if seconds is not None and timeout is not None and seconds > MAX_SAVE_TIME_FRACTION * timeout:
        rates = [each.write_bytes_per_second for each in directories if each.write_bytes_per_second]
        problems.append(
            warn(
                f"{directories[0].directory}: a save of {format_bytes_short(checkpoint_bytes)} would take about "
                f"{seconds:,.0f} s, which is more than {MAX_SAVE_TIME_FRACTION:.0%} of the timeout of {timeout:,.0f} s "
                f"(a test file was written at {format_bytes_short(min(rates))}/s); increase "
                "checkpoint.timeout_seconds, or save to a faster disk"
            )
        )
    size = format_bytes_short(checkpoint_bytes) if checkpoint_bytes else "unknown"
    summary = f"free={format_bytes_short(free)} keep={settings.keep} size={size}"
    summary += "" if seconds is None else f" save={seconds:,.1f}s"
    return GateCheck("checkpoint", tuple(problems), summary)


def _directory_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    problems = []
    for report in reports:
        found = report.checkpoint
        if found is None:
            problems.append(fail(f"{report.node}: the checkpoint directory was not inspected"))
        elif found.trouble:
            problems.append(
                fail(
                    f"{report.node}: {found.directory} cannot be written ({found.trouble}); "
                    "use a run directory that the job's user can write to"
                )
            )
        elif found.sees_rank_0 is False:
            problems.append(
                fail(
                    f"{report.node}: {found.directory} is not the same directory as on {reports[0].node}; use a run "
                    "directory on a shared file system"
                )
            )
    return problems


def _live_rank_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    """Ranks of another job, or of an earlier attempt, that still run in this run directory."""
    found = [(report, beat) for report in reports if report.checkpoint for beat in report.checkpoint.beats]
    live = set(exclude_dead(beat for _, beat in found))
    by_rank = {}
    for report, beat in found:
        if beat in live and (beat.rank not in by_rank or beat.alive):  # its own node's report is the better one
            by_rank[beat.rank] = report, beat
    return [
        fail(
            f"{report.node}: rank {beat.rank} of run {beat.run!r} is still running in this run directory (pid "
            f"{beat.pid} on {beat.host}, last heartbeat {beat.age_seconds:.0f} s ago); end that process, or use "
            "another run directory"
        )
        for _, (report, beat) in sorted(by_rank.items())
    ]


def _model_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    troubles = [(r.node, r.model.trouble) for r in reports if r.model and r.model.trouble]
    problems = [fail(f"{nodes}: {trouble}") for nodes, trouble in _group_by_text(troubles)]
    without_weights = [
        report.node
        for report in reports
        if report.settings.random_weights is False and report.model and not report.model.trouble
        if report.model.parameters is None
    ]
    if without_weights:
        problems.append(
            fail(
                f"{list_names(without_weights)}: the model has no weights; set train.random_weights to start with "
                "random weights"
            )
        )
    return problems


def _resume_problems(reports: Sequence[NodeReport], counts: BlockCounts | None) -> list[GateProblem]:
    """The checkpoint is complete, and fits the job's data, shapes and, if optimizer state is needed, its world."""
    found = []
    for report in reports:
        if report.model and report.model.resume:
            resume = report.model.resume
            if resume.trouble:
                found.append((report.node, resume.trouble))
            else:
                mismatches = _resume_mismatches(reports, resume, counts)
                found += [(report.node, f"{resume.directory}: {text}") for text in mismatches]
    problems = [fail(f"{nodes}: cannot resume: {text}") for nodes, text in _group_by_text(found)]
    resumes = [report.model.resume for report in reports if report.model and report.model.resume]
    if counts and resumes and resumes[0].step is not None and not problems:
        total = counts.steps * reports[0].settings.epochs
        if resumes[0].step == total:
            problems.append(
                warn(f"{resumes[0].directory}: {format_all(total, 'step')} already done, so the job will end at once")
            )
        if reports[0].settings.optimizer and resumes[0].optimizer is False:
            problems.append(
                warn(
                    f"{resumes[0].directory} has no optimizer state, so the job will load only the weights and repeat "
                    "the warm-up"
                )
            )
    return problems


def _resume_mismatches(
    reports: Sequence[NodeReport], resume: ResumeReport, counts: BlockCounts | None
) -> Iterable[str]:
    settings = reports[0].settings
    if resume.other_shape:
        yield f"the checkpoint belongs to a different model: {resume.other_shape}"
    manifests = {shard.rank: shard.manifest for report in reports for shard in report.shards if shard.manifest}
    by_rank = {rank: manifest.sha256 for rank, manifest in manifests.items()}
    seq_len = max((manifest.seq_len for manifest in manifests.values()), default=0)
    step_tokens = settings.blocks_per_step * settings.world * seq_len
    if resume.world is not None and resume.world != settings.world:
        # Steps are counted over the blocks of all ranks, so another number of ranks also means other blocks.
        yield (
            f"the checkpoint was saved by {format_count(resume.world, 'rank')}, but the job has {settings.world}, "
            f"and a resume needs the same number; use {format_count(resume.world, 'rank')}, or, {START_FROM_WEIGHTS}"
        )
    elif resume.blocks_sha256 and len(by_rank) == settings.world and resume.blocks_sha256 != blocks_sha256(by_rank):
        yield (
            "the run that saved the checkpoint used other data blocks than this job, so training cannot continue at "
            f"the checkpoint's step; {START_FROM_WEIGHTS}"
        )
    elif manifests and resume.step and resume.tokens is not None and resume.tokens != resume.step * step_tokens:
        yield (
            f"the run that saved the checkpoint used {resume.tokens:,} tokens in {format_count(resume.step, 'step')}, "
            f"but this job would have used {resume.step * step_tokens:,}, so blocks would be skipped or repeated; use "
            "the same micro_batch x accumulation as that run"
        )
    if counts and resume.step is not None and resume.step > counts.steps * settings.epochs:
        total = counts.steps * settings.epochs
        yield (
            f"the checkpoint was saved after {format_count(resume.step, 'step')}, but the job has only {total:,}; "
            "increase train.epochs"
        )


def _checkpoint_bytes(reports: Sequence[NodeReport]) -> int | None:
    """Size of a checkpoint: as given, else from the number of parameters, else that of the model's weights files."""
    settings, models = reports[0].settings, [report.model for report in reports if report.model]
    if settings.checkpoint_bytes:
        return settings.checkpoint_bytes
    per_parameter = WEIGHT_BYTES_PER_PARAMETER + (OPTIMIZER_BYTES_PER_PARAMETER if settings.optimizer else 0)
    parameters = next((model.parameters for model in models if model.parameters), None)
    if parameters:
        return parameters * per_parameter
    return next((model.weights_bytes for model in models if model.weights_bytes), None)


def _estimate_save_seconds(reports: Sequence[NodeReport], checkpoint_bytes: int | None) -> float | None:
    """Assumes that all writers are as slow as the slowest, and write at the same time, as they did when measured."""
    rates = [report.checkpoint.write_bytes_per_second for report in reports if report.checkpoint]
    known = [rate for rate in rates if rate]
    if not checkpoint_bytes or not known or len(known) < len(rates):
        return None
    return checkpoint_bytes / _parallel_writers(reports[0].settings, checkpoint_bytes, len(known)) / min(known)


def _parallel_writers(settings: GateSettings, checkpoint_bytes: int, measured: int) -> int:
    """Processes that write at the same time; not more than were measured side by side."""
    if settings.optimizer or not settings.file_bytes:  # every rank writes its own optimizer state
        return measured
    # Ranks write whole files: with fewer files than ranks, some ranks write nothing.
    return min(measured, max(1, math.ceil(checkpoint_bytes / settings.file_bytes)))


# Devices: the same healthy GPUs on every node, enough of them, and not used by another process.


def check_devices(reports: Sequence[NodeReport]) -> GateCheck:
    problems = []
    found = [(report, report.devices) for report in reports if report.devices is not None]
    problems += [fail(f"{report.node}: the GPUs were not inspected") for report in reports if report.devices is None]
    for report, devices in found:
        if devices.trouble:
            problems.append(fail(f"{report.node}: {devices.trouble}"))
        problems += [fail(f"{report.node}: another process is using a GPU: {process}") for process in devices.processes]
        busy = {process.rpartition(" ")[2] for process in devices.processes}
        problems += [
            warn(
                f"{report.node}: GPU {gpu.index} has {gpu.memory_used_mib:,.0f} MiB of memory in use, but nvidia-smi "
                "lists no process"
            )
            for gpu in devices.gpus
            if gpu.memory_used_mib > MAX_USED_MEMORY_FRACTION * gpu.memory_total_mib and str(gpu.index) not in busy
        ]
        problems += [
            warn(f"{report.node}: GPU {gpu.index} {text}")
            for gpu in devices.gpus
            for text in _gpu_health_problems(gpu, str(gpu.index) in busy)
        ]
    skipped = [report.node for report, devices in found if devices.skipped]
    seen = [(report, devices) for report, devices in found if not devices.skipped and not devices.trouble]
    # Ranks on a node without a driver choose gloo while the others choose NCCL, and none of them ever connects.
    if skipped and seen:
        with_gpus = list_names([report.node for report, _ in seen])
        problems.append(fail(f"nvidia-smi was not found on {list_names(skipped)}, but GPUs were found on {with_gpus}"))
    ranks_by_node: Counter[str] = Counter()
    for report in reports:
        ranks_by_node[report.node] += len(report.ranks)
    for report, devices in seen:
        ranks = ranks_by_node[report.node]
        if len(devices.gpus) < ranks and not _one_gpu_per_process(report, devices.gpus):
            problems.append(
                fail(f"{report.node}: only {format_count(len(devices.gpus), 'GPU')} for {format_count(ranks, 'rank')}")
            )
    problems += differences("number of GPUs", [(report.node, len(devices.gpus)) for report, devices in seen])
    for name, label in (("name", "GPU model"), ("driver", "driver"), ("memory_total_mib", "GPU memory in MiB")):
        # By node, not by GPU: one line for a node whose eight GPUs differ from the others'.
        values = [(report.node, getattr(gpu, name)) for report, devices in seen for gpu in devices.gpus]
        problems += differences(label, dict.fromkeys(values))
    if seen:
        problems += _flight_recorder_problems(reports)
    if found and len(skipped) == len(found):
        return GateCheck("devices", tuple(problems), f"skipped: {found[0][1].skipped}")
    models = list_names({gpu.name for _, devices in seen for gpu in devices.gpus}) or "none"
    count = sum(len(devices.gpus) for _, devices in seen)
    return GateCheck("devices", tuple(problems), f"gpus={count} model={models}")


def _gpu_health_problems(gpu: GpuReport, busy: bool) -> Iterator[str]:
    if gpu.uncorrected_errors:
        count = format_count(gpu.uncorrected_errors, "uncorrected ECC error")
        yield f"has had {count} since the driver was loaded; reset the GPU or drain the node"
    if gpu.rows_pending or gpu.pages_pending:
        yield f"needs a reset to {'remap memory rows' if gpu.rows_pending else 'retire memory pages'}"
    # Temperature and power of a GPU in use say nothing about its health.
    if busy:
        return
    if gpu.temperature_celsius is not None and gpu.temperature_celsius > MAX_IDLE_CELSIUS:
        yield f"is at {gpu.temperature_celsius:.0f} C while idle (limit {MAX_IDLE_CELSIUS:.0f} C); check its cooling"
    if gpu.power_watts and gpu.power_limit_watts and gpu.power_watts > MAX_IDLE_POWER_FRACTION * gpu.power_limit_watts:
        limit = f"{gpu.power_limit_watts:.0f} W"
        yield f"draws {gpu.power_watts:.0f} W (its limit is {limit}), but nvidia-smi lists no process"


def _one_gpu_per_process(report: NodeReport, gpus: Sequence[object]) -> bool:
    """A gate process for one rank that sees one GPU: the launcher sets CUDA_VISIBLE_DEVICES for each rank."""
    return len(report.ranks) == 1 and len(gpus) == 1


def _flight_recorder_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    environment = reports[0].environment
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    if size == "0":
        return [warn("the flight recorder is off, so a hang would leave no record; set TORCH_FR_BUFFER_SIZE=2000")]
    return []


# Problems as text


def fail(text: str) -> GateProblem:
    return GateProblem(CheckLevel.FAIL, text)


def warn(text: str) -> GateProblem:
    return GateProblem(CheckLevel.WARN, text)


def differences(
    what: str, values: Iterable[tuple[str, object]], level: CheckLevel = CheckLevel.FAIL, advice: str = ""
) -> list[GateProblem]:
    """One problem if `values`, pairs of (node or rank, value), are not all the same; the largest group comes first."""
    by_value: dict[str, list[str]] = defaultdict(list)
    for name, value in values:
        by_value[abbreviate(value)].append(name)
    if len(by_value) < 2:
        return []
    groups = sorted(by_value.items(), key=lambda item: -len(item[1]))
    found = "; ".join(f"{value} on {list_names(names)}" for value, names in groups[:4])
    return [GateProblem(level, f"{what} differs: {found}{advice}")]


def abbreviate(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    return text[:12] if len(text) == 64 else text  # a SHA-256 in hexadecimal


def list_names(names: Iterable[str]) -> str:
    ordered = sorted(dict.fromkeys(names))
    return ", ".join(ordered[:4]) + (f" and {len(ordered) - 4} more" if len(ordered) > 4 else "")


def _group_by_text(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """From (node, text) to (nodes, text), each text once: all nodes usually find the same."""
    nodes = defaultdict(list)
    for node, text in found:
        nodes[text].append(node)
    return [(list_names(names), text) for text, names in nodes.items()]
