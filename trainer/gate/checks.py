"""From all reports to the verdict. Pure: every process of the gate judges the same reports, and says the same.

The six are ours: the paper tells that there were six, that block spread is a warning and that the minimum is recorded
(section 7), not which they were.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

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
    TOKEN_BYTES,
    PackManifest,
    blocks_sha256,
    sample_ranges,
    shard_row_range,
    xor_below,
)
from wattwatch.trainer.ranks import format_rank_list
from wattwatch.trainer.run_directory import exclude_dead


def run_checks(reports: Sequence[NodeReport], note: str = "") -> GateVerdict:
    """All six. The first report is rank 0's, or the only one; `note` says why ranks are missing, if they are."""
    settings = reports[0].settings
    shards = {shard.rank: shard for report in reports for shard in report.shards}
    evenness = count_blocks(settings, shards)
    checks = (
        check_world(reports, note),
        check_block_files(settings, shards),
        check_shards(reports, shards),
        check_evenness(reports, shards, evenness),
        check_checkpoint(reports, evenness),
        check_devices(reports),
    )
    return GateVerdict(checks, evenness)


# World and devices: are all ranks there, alike, with sound boards of their own?

MAX_SKEW_SECONDS: Final = 1.0
MAX_USED_MEMORY_FRACTION: Final = 0.05
MAX_IDLE_CELSIUS: Final = 60.0  # idle boards are at 25 to 45; one that has just lost a job cools within seconds
MAX_IDLE_POWER_FRACTION: Final = 0.3  # of the limit; idle ones draw 0.1 to 0.2
PER_NODE_VARIABLES: Final = (
    "_IFNAME",
    "_HCA",
    "NCCL_HOSTID",
    "NCCL_TOPO_FILE",
)  # names of a node's own wires may differ


def check_world(reports: Sequence[NodeReport], note: str) -> GateCheck:
    """Every rank once, and nodes that agree on settings, code, versions and environment."""
    settings = reports[0].settings
    seen = Counter(rank for report in reports for rank in report.ranks)
    problems = []
    if missing := [rank for rank in range(settings.world) if rank not in seen]:
        problems.append(fail(f"{format_rank_list(missing)} never came{': ' + note if note else ''}"))
    for rank in sorted(rank for rank, times in seen.items() if times > 1):
        nodes = [report.node for report in reports if rank in report.ranks]
        problems.append(fail(f"rank {rank} came {len(nodes)} times, from {list_names(nodes)}"))
    if outside := sorted(rank for rank in seen if rank >= settings.world):
        problems.append(fail(f"{format_rank_list(outside)} came, and the world is {settings.world}"))
    for report in reports:
        problems += [fail(f"{report.node}: {trouble}") for trouble in report.troubles]
    for setting in type(settings).__dataclass_fields__:
        problems += differences(f"setting {setting}", [(r.node, getattr(r.settings, setting)) for r in reports])
    problems += differences("the trainer's code", [(r.node, r.code_sha256) for r in reports if r.code_sha256])
    configs = [(r.node, (r.model and r.model.config_sha256) or "none named") for r in reports]
    problems += differences("the configuration file", configs)
    for library in sorted({name for report in reports for name in report.versions}):
        found = [(r.node, r.versions.get(library, "not said")) for r in reports if r.versions]
        problems += differences(library, found)
    for name in sorted({name for report in reports for name in report.environment}):
        level = CheckLevel.WARN if name.endswith(PER_NODE_VARIABLES) else CheckLevel.FAIL
        problems += differences(name, [(r.node, r.environment.get(name, "not set")) for r in reports], level)
    for report in reports:
        if report.skew_seconds is not None and abs(report.skew_seconds) > MAX_SKEW_SECONDS:
            problems.append(warn(f"{report.node}: its clock is {report.skew_seconds:+.1f} s off rank 0's node"))
    summary = f"ranks={len(seen)}/{settings.world} nodes={len({report.node for report in reports})}"
    return GateCheck("world", tuple(problems), summary)


def check_devices(reports: Sequence[NodeReport]) -> GateCheck:
    """The same boards on every node, enough of them, and nobody else on them."""
    problems = []
    looks = [(report, report.devices) for report in reports if report.devices is not None]
    problems += [fail(f"{report.node}: the GPUs were not looked at") for report in reports if report.devices is None]
    for report, look in looks:
        if look.trouble:
            problems.append(fail(f"{report.node}: {look.trouble}"))
        problems += [fail(f"{report.node}: somebody computes there: {process}") for process in look.processes]
        busy = {process.rpartition(" ")[2] for process in look.processes}
        problems += [
            warn(f"{report.node}: GPU {gpu.index} has {gpu.memory_used_mib:,.0f} MiB in use by nobody that is seen")
            for gpu in look.gpus
            if gpu.memory_used_mib > MAX_USED_MEMORY_FRACTION * gpu.memory_total_mib and str(gpu.index) not in busy
        ]
        problems += [
            warn(f"{report.node}: GPU {gpu.index} {text}")
            for gpu in look.gpus
            for text in _gpu_health_problems(gpu, str(gpu.index) in busy)
        ]
    skipped = [report.node for report, look in looks if look.skipped]
    seen = [(report, look) for report, look in looks if not look.skipped and not look.trouble]
    if skipped and seen:
        problems.append(
            fail(f"no nvidia-smi on {list_names(skipped)}, and GPUs on {list_names([r.node for r, _ in seen])}")
        )
    by_node = Counter(rank_node for report in reports for rank_node in [report.node] * len(report.ranks))
    for report, look in seen:
        if len(look.gpus) < by_node[report.node] and not _one_gpu_per_process(report, look.gpus):
            problems.append(fail(f"{report.node}: {len(look.gpus)} GPUs for {by_node[report.node]} ranks"))
    problems += differences("number of GPUs", [(r.node, len(look.gpus)) for r, look in seen])
    for name, words in (("name", "GPU model"), ("driver", "driver"), ("memory_total_mib", "GPU memory in MiB")):
        values = [(r.node, getattr(gpu, name)) for r, look in seen for gpu in look.gpus]
        problems += differences(words, dict.fromkeys(values))
    if seen:
        problems += _flight_recorder_problems(reports)
    if looks and len(skipped) == len(looks):
        return GateCheck("devices", tuple(problems), f"skipped: {looks[0][1].skipped}")
    models = list_names({gpu.name for _, look in seen for gpu in look.gpus}) or "none"
    return GateCheck("devices", tuple(problems), f"gpus={sum(len(look.gpus) for _, look in seen)} model={models}")


def _gpu_health_problems(gpu: GpuReport, busy: bool) -> Iterator[str]:
    if gpu.uncorrected_errors:
        yield f"has had {gpu.uncorrected_errors:,} uncorrected ECC errors since its driver came up; reset or drain it"
    if gpu.rows_pending or gpu.pages_pending:
        yield f"has memory {'rows to remap' if gpu.rows_pending else 'pages to retire'} at its next reset; reset it"
    if busy:
        return
    if gpu.temperature_celsius is not None and gpu.temperature_celsius > MAX_IDLE_CELSIUS:
        yield f"has {gpu.temperature_celsius:.0f} C with nobody on it, over {MAX_IDLE_CELSIUS:.0f}: see to its cooling"
    if gpu.power_watts and gpu.power_limit_watts and gpu.power_watts > MAX_IDLE_POWER_FRACTION * gpu.power_limit_watts:
        yield f"draws {gpu.power_watts:.0f} W of {gpu.power_limit_watts:.0f} W with nobody on it that is seen"


def _one_gpu_per_process(report: NodeReport, gpus: Sequence[object]) -> bool:
    """A gate process of one rank that sees one GPU: CUDA_VISIBLE_DEVICES is the rank's, not the node's."""
    return len(report.ranks) == 1 and len(gpus) == 1


def _flight_recorder_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    environment = reports[0].environment
    size = environment.get("TORCH_FR_BUFFER_SIZE") or environment.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    if size == "0":
        return [warn("the flight recorder is off: set TORCH_FR_BUFFER_SIZE=2000, or a hang leaves no record")]
    return []


# Blocks, shards, evenness: is the data whole, each row of the corpus once, and enough on every rank?

MAX_EMPTY_ROW_FRACTION: Final = 0.001
MAX_LOST_BLOCK_FRACTION: Final = 0.01
NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs"}
    | {"9p", "virtiofs", "wekafs", "afs", "fuse.sshfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"}
)
SPREAD_CONSEQUENCES: Final = {
    "min": "all ranks must stop at the minimum",
    "pad": "the shorter ones repeat their first blocks",
    "off": 'train.evenness is "off": the job will hang where the shortest one ends',
}
REPACK_ALL: Final = "; pack all ranks again, from the same, with the same"
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


def check_block_files(settings: GateSettings, shards: dict[int, ShardReport]) -> GateCheck:
    """Each rank's file is there, whole, and the one that its manifest describes."""
    problems = []
    for rank, look in sorted(shards.items()):
        problems += [fail(f"rank {rank}: {look.path}: {text}") for text in block_file_problems(settings, look)]
    remote = [rank for rank, look in shards.items() if look.filesystem in NETWORK_FILESYSTEMS]
    if remote:
        kinds = list_names({shards[rank].filesystem for rank in remote})
        problems.append(warn(f"{format_rank_list(remote)}: blocks lie on {kinds}, not on the node's own disk"))
    size = sum(look.size_bytes or 0 for look in shards.values())
    return GateCheck("blocks", tuple(problems), f"files={len(shards)} bytes={size:,}")


def block_file_problems(settings: GateSettings, look: ShardReport) -> list[str]:
    if look.trouble or look.manifest is None or look.size_bytes is None:
        return [look.trouble or "no manifest"]
    said, out = look.manifest, []
    seq_len = settings.seq_len or said.seq_len
    if said.seq_len != seq_len or said.seq_len < 1:
        out.append(f"packed in blocks of {said.seq_len}, the job wants {seq_len}: pack again with it")
    if said.rank != look.rank:
        out.append(f"its manifest is that of rank {said.rank}: pack again")
    if seq_len >= 1 and look.size_bytes % (TOKEN_BYTES * seq_len):
        out.append(
            f"{look.size_bytes:,} bytes are not a whole number of blocks of {seq_len} int32 ids: torn; pack again"
        )
    if look.size_bytes != said.size_bytes or said.size_bytes != said.blocks * said.seq_len * TOKEN_BYTES:
        out.append(
            f"{look.size_bytes:,} bytes, its manifest says {said.size_bytes:,} in {said.blocks:,} blocks: pack again"
        )
    elif look.differing_offsets:
        out.append(f"the bytes at {look.differing_offsets[0]:,} are not those that were packed: pack again")
    elif said.blocks and tuple((sample.offset, sample.bytes) for sample in said.samples) != sample_ranges(
        said.size_bytes
    ):
        out.append("its manifest has no hashes to compare with: pack again")
    if settings.document_mask and said.document_starts is None:
        out.append("packed without --document-mask, which train.document_mask needs: pack again with it")
    if said.document_starts is not None and look.starts_bytes != said.document_starts * 8:
        out.append("the file of document starts is missing or torn; pack again with --document-mask")
    return out


def check_shards(reports: Sequence[NodeReport], shards: dict[int, ShardReport]) -> GateCheck:
    """The ranks' rows are the corpus, each row once, made into ids in one way."""
    world = reports[0].settings.world
    said = {rank: look.manifest for rank, look in sorted(shards.items()) if look.manifest is not None}
    problems = []
    for rank, manifest in said.items():
        problems += [fail(f"rank {rank}: {text}") for text in _row_problems(world, manifest)]
    for name, words in SAME_IN_ALL_MANIFESTS:
        problems += differences(
            words, [(f"rank {rank}", getattr(m, name)) for rank, m in said.items()], then=REPACK_ALL
        )
    masks = [(f"rank {rank}", manifest.document_starts is not None) for rank, manifest in said.items()]
    problems += differences("document mask", masks, then=REPACK_ALL)
    versions = [(f"rank {rank}", manifest.tokenizers_version) for rank, manifest in said.items()]
    problems += differences("tokenizers version", versions, CheckLevel.WARN)
    rows, corpus_rows = sum(m.rows for m in said.values()), max((m.corpus_rows for m in said.values()), default=0)
    if said and len(said) == world and not problems:
        xor = 0
        for manifest in said.values():
            xor ^= manifest.row_xor
        if rows != corpus_rows or xor != xor_below(corpus_rows):
            problems.append(
                fail(f"the ranks hold {rows:,} rows of {corpus_rows:,}, or not each of them once{REPACK_ALL}")
            )
    empty = sum(m.empty_rows for m in said.values())
    if rows and empty / rows > MAX_EMPTY_ROW_FRACTION:
        problems.append(warn(f"{empty:,} of {rows:,} rows gave no token"))
    for report in reports:
        problems += _tokenizer_problems(report, said)
    return GateCheck("shards", tuple(problems), f"rows={rows:,}/{corpus_rows:,} empty={empty:,}")


def _row_problems(world: int, said: PackManifest) -> list[str]:
    if said.rows == 0:
        return ["an empty shard, no row: pack more records, or fewer ranks"]
    if said.world != world:
        return [f"packed for a world of {said.world}, the job has {world}: pack again"]
    if not 0 <= said.rank < world:
        return []  # judge_blocks has said that it is another rank's
    count, first, last = shard_row_range(said.corpus_rows, world, said.rank, said.contiguous)
    if (said.rows, said.first_row, said.last_row) != (count, first, last):
        return [
            f"holds {said.rows:,} rows from {said.first_row} to {said.last_row}, its shard is {count:,} from {first} "
            f"to {last}"
        ]
    return []


def _tokenizer_problems(report: NodeReport, said: dict[int, PackManifest]) -> list[GateProblem]:
    model = report.model
    if model is None or model.tokenizer_file_sha256 is None:
        return []
    other = [
        rank
        for rank in report.ranks
        if (manifest := said.get(rank)) is not None
        and manifest.tokenizer_file_sha256 not in ("", model.tokenizer_file_sha256)
        and manifest.tokenizer_meaning_sha256 != model.tokenizer_meaning_sha256
    ]
    if not other:
        return []
    return [
        fail(
            f"{report.node}: {format_rank_list(other)} packed with another tokenizer than the model's: "
            "pack with the model's"
        )
    ]


def count_blocks(settings: GateSettings, shards: dict[int, ShardReport]) -> BlockCounts | None:
    """Whole blocks by rank, floor(bytes / 4 / seq_len); None while a rank of the world is not known."""
    counts = {}
    for rank in range(settings.world):
        look = shards.get(rank)
        seq_len = settings.seq_len or (look.manifest.seq_len if look and look.manifest else None)
        if look is None or look.size_bytes is None or not seq_len or seq_len < 1:
            return None
        counts[rank] = look.size_bytes // TOKEN_BYTES // seq_len
    shortest, longest = min(counts, key=lambda r: (counts[r], r)), max(counts, key=lambda r: (counts[r], -r))
    steps = counts[longest if settings.evenness == "pad" else shortest] // settings.blocks_per_step
    taken, total = steps * settings.blocks_per_step, sum(counts.values())
    lost = 1 - sum(min(taken, count) for count in counts.values()) / total if total else 0.0
    by_rank = {str(rank): count for rank, count in counts.items()}
    return BlockCounts(counts[shortest], counts[longest], shortest, longest, steps, lost, by_rank)


def check_evenness(
    reports: Sequence[NodeReport], shards: dict[int, ShardReport], even: BlockCounts | None
) -> GateCheck:
    """At least one step for everybody, and ids that the model has. Unequal counts are a warning: the minimum rules."""
    settings, problems = reports[0].settings, []
    if even is None:
        unknown = [r for r in range(settings.world) if r not in shards or shards[r].size_bytes is None]
        problems.append(fail(f"block counts are not known of {format_rank_list(unknown) if unknown else 'all ranks'}"))
    elif even.steps == 0:
        problems.append(
            fail(
                f"rank {even.shortest_rank} has {even.global_min_blocks:,} blocks, a step takes "
                f"{settings.blocks_per_step:,}: no step at all; pack more data, or set a smaller accumulation"
            )
        )
    elif even.spread:
        problems.append(
            warn(
                f"spread {even.spread:,}: rank {even.shortest_rank} has {even.global_min_blocks:,} blocks, rank "
                f"{even.longest_rank} has {even.max_blocks:,}; {SPREAD_CONSEQUENCES.get(settings.evenness, SPREAD_CONSEQUENCES['min'])}"
            )
        )
    if even and even.steps and even.lost_share > MAX_LOST_BLOCK_FRACTION:
        problems.append(warn(f"{even.lost_share:.2%} of all blocks are in no step"))
    model_sizes = [r.model.vocab_size for r in reports if r.model and r.model.vocab_size]
    for rank, look in sorted(shards.items()):
        problems += [
            fail(f"rank {rank}: {look.path}: {text}") for text in _token_id_problems(settings, look, model_sizes)
        ]
    summary = "" if even is None else (
        f"spread={even.spread:,} min={even.global_min_blocks:,} steps={even.steps:,} lost={even.lost_share:.3%}"
    )  # fmt: skip
    return GateCheck("evenness", tuple(problems), summary)


def _token_id_problems(settings: GateSettings, look: ShardReport, model_sizes: list[int]) -> list[str]:
    said, out = look.manifest, []
    vocabulary = settings.vocab_size or min(model_sizes, default=0) or (said.vocab_size if said else 0)
    low = min(
        (i for i in (look.min_id, said.min_token_id if said and said.blocks else None) if i is not None), default=0
    )
    high = max((i for i in (look.max_id, said.max_token_id if said else None) if i is not None), default=0)
    if low < 0:
        out.append(f"token id {low} is negative")
    if vocabulary and high >= vocabulary:
        out.append(f"token id {high:,} is outside the vocabulary of {vocabulary:,}: pack with the model's tokenizer")
    if look.min_id is not None and look.min_id == look.max_id:
        out.append(f"every id looked at is {look.min_id}")
    return out


# Checkpoint: one directory for all ranks, theirs alone, with room and speed for a save; and one to resume from.

WEIGHT_BYTES_PER_PARAMETER: Final = 2  # of a parameter, bf16
OPTIMIZER_BYTES_PER_PARAMETER: Final = 12  # master and two moments, float32
MAX_SAVE_TIME_FRACTION: Final = 0.5  # of the timeout: other jobs write to the same disks


def check_checkpoint(reports: Sequence[NodeReport], even: BlockCounts | None) -> GateCheck:
    settings, one = reports[0].settings, _checkpoint_bytes(reports)
    problems = [
        *_directory_problems(reports),
        *_live_rank_problems(reports),
        *_model_problems(reports),
        *_resume_problems(reports, even),
    ]
    looks = [report.checkpoint for report in reports if report.checkpoint]
    free = min((look.free_bytes for look in looks if look.free_bytes is not None), default=None)
    if one and free is not None and free < (settings.keep + 1) * one:
        short = free < settings.keep * one
        what = f"{settings.keep} checkpoints of {format_bytes_short(one)}{'' if short else ' and one being written'}"
        problem = (
            f"{looks[0].directory}: {format_bytes_short(free)} free, too little for {what}: free "
            f"{format_bytes_short((settings.keep + 1) * one - free)} more, or keep fewer"
        )
        problems.append(fail(problem) if short else warn(problem))
    seconds = _estimate_save_seconds(reports, one)
    timeout = settings.save_timeout_seconds
    if seconds is not None and timeout is not None and seconds > MAX_SAVE_TIME_FRACTION * timeout:
        rates = [look.write_bytes_per_second for look in looks if look.write_bytes_per_second]
        problems.append(
            warn(
                f"{looks[0].directory}: a save of {format_bytes_short(one)} would take about {seconds:,.0f} s of the "
                f"{timeout:,.0f} s it may: a small file was written at {format_bytes_short(min(rates))}/s; set a longer "
                "checkpoint.timeout_seconds, or save to a faster disk"
            )
        )
    words = f"free={format_bytes_short(free)} keep={settings.keep} size={format_bytes_short(one) if one else 'unknown'}"
    return GateCheck("checkpoint", tuple(problems), words + ("" if seconds is None else f" save={seconds:,.1f}s"))


def _directory_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    problems = []
    for report in reports:
        look = report.checkpoint
        if look is None:
            problems.append(fail(f"{report.node}: the checkpoint directory was not looked at"))
        elif look.trouble:
            problems.append(
                fail(
                    f"{report.node}: {look.directory}: cannot be written: {look.trouble}; "
                    "name a run directory that the job's user can write to"
                )
            )
        elif look.sees_rank_0 is False:
            problems.append(
                fail(
                    f"{report.node}: {look.directory}: not the directory that {reports[0].node} writes to: not shared; "
                    "name a directory of a shared file system as run directory"
                )
            )
    return problems


def _live_rank_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    """Heartbeats with somebody behind them. A rank whose own node says that it is gone is no longer there."""
    beats = [(report, beat) for report in reports if report.checkpoint for beat in report.checkpoint.beats]
    still = set(exclude_dead([beat for _, beat in beats]))
    found = {}
    for report, beat in beats:
        if beat in still and (beat.rank not in found or beat.alive):
            found[beat.rank] = report, beat
    return [
        fail(
            f"{report.node}: rank {beat.rank} of run {beat.run!r} still lives in this run directory: pid {beat.pid} on "
            f"{beat.host}, heartbeat {beat.age_seconds:.0f} s old; end it, or take another run directory"
        )
        for _, (report, beat) in sorted(found.items())
    ]


def _model_problems(reports: Sequence[NodeReport]) -> list[GateProblem]:
    troubles = [(r.node, r.model.trouble) for r in reports if r.model and r.model.trouble]
    problems = [fail(f"{nodes}: {trouble}") for nodes, trouble in _group_by_text(troubles)]
    without = [
        report.node
        for report in reports
        if report.settings.random_weights is False and report.model and not report.model.trouble
        if report.model.parameters is None
    ]
    if without:
        problems.append(
            fail(
                f"{list_names(without)}: the model has no weights; set train.random_weights to start from its config.json"
            )
        )
    return problems


def _resume_problems(reports: Sequence[NodeReport], even: BlockCounts | None) -> list[GateProblem]:
    """The checkpoint is whole, of this job's data, shapes and, where the optimizer's state is wanted, world."""
    said = []
    for report in reports:
        if report.model and report.model.resume:
            look = report.model.resume
            troubles = [look.trouble] if look.trouble else _resume_mismatches(reports, look, even)
            said += [(report.node, f"{look.directory}: {text}" if not look.trouble else text) for text in troubles]
    problems = [fail(f"{nodes}: cannot resume: {text}") for nodes, text in _group_by_text(said)]
    looks = [report.model.resume for report in reports if report.model and report.model.resume]
    if even and looks and looks[0].step is not None and not problems:
        total = even.steps * reports[0].settings.epochs
        if looks[0].step == total:
            problems.append(warn(f"{looks[0].directory}: all {total:,} steps are done: the job will end at once"))
        if reports[0].settings.optimizer and looks[0].optimizer is False:
            problems.append(
                warn(f"{looks[0].directory}: holds no optimizer state: only the weights are resumed, warmed up anew")
            )
    return problems


def _resume_mismatches(reports: Sequence[NodeReport], look: ResumeReport, even: BlockCounts | None) -> Iterable[str]:
    settings = reports[0].settings
    if look.other_shape:
        yield f"{look.other_shape}: it is of another model"
    if settings.optimizer and look.optimizer and look.world != settings.world:
        yield (
            f"its optimizer state is of {look.world} ranks, the job has {settings.world}; use as many, or set "
            "checkpoint.optimizer to false to resume the weights only"
        )
    said = {shard.rank: shard.manifest for report in reports for shard in report.shards if shard.manifest}
    by_rank = {rank: manifest.sha256 for rank, manifest in said.items()}
    step_tokens = settings.blocks_per_step * settings.world * max((one.seq_len for one in said.values()), default=0)
    if look.blocks_sha256 and len(by_rank) == settings.world and look.blocks_sha256 != blocks_sha256(by_rank):
        yield "it was trained on other blocks than these, its step means nothing in them; start from it as model"
    elif said and look.step and look.tokens is not None and look.tokens != look.step * step_tokens:
        yield (
            f"it took {look.tokens:,} tokens in {look.step:,} steps, this job takes {step_tokens:,} a step: blocks "
            "would be missed or seen twice; use the same micro_batch x accumulation"
        )
    if even and look.step is not None and look.step > even.steps * settings.epochs:
        yield f"it has done {look.step:,} steps, the job has {even.steps * settings.epochs:,}; set more train.epochs"


def _group_by_text(said: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """(nodes, text), each text once."""
    nodes = defaultdict(list)
    for node, text in said:
        nodes[text].append(node)
    return [(list_names(names), text) for text, names in nodes.items()]


def _checkpoint_bytes(reports: Sequence[NodeReport]) -> int | None:
    """Bytes of a checkpoint: as told, else by the model's parameters, else as large as the model's weights."""
    settings, models = reports[0].settings, [report.model for report in reports if report.model]
    if settings.checkpoint_bytes:
        return settings.checkpoint_bytes
    each = WEIGHT_BYTES_PER_PARAMETER + (OPTIMIZER_BYTES_PER_PARAMETER if settings.optimizer else 0)
    counted = next((model.parameters for model in models if model.parameters), None)
    return counted * each if counted else next((model.weights_bytes for model in models if model.weights_bytes), None)


def _estimate_save_seconds(reports: Sequence[NodeReport], one: int | None) -> float | None:
    """As if every process that writes were as quick as the slowest was, all writing at once."""
    rates = [r.checkpoint.write_bytes_per_second for r in reports if r.checkpoint]
    known = [rate for rate in rates if rate]
    if not one or not known or len(known) < len(rates):
        return None
    return one / _parallel_writers(reports[0].settings, one, len(known)) / min(known)


def _parallel_writers(settings: GateSettings, one: int, measured: int) -> int:
    """Ranks write whole files: fewer files than ranks leave some idle. No more than were measured side by side."""
    if settings.optimizer or not settings.file_bytes:  # every rank has optimizer state of its own to write
        return measured
    return min(measured, max(1, math.ceil(one / settings.file_bytes)))


# How the judges speak: problems, who differs from whom, sizes.


def fail(text: str) -> GateProblem:
    return GateProblem(CheckLevel.FAIL, text)


def warn(text: str) -> GateProblem:
    return GateProblem(CheckLevel.WARN, text)


def differences(
    what: str, values: Iterable[tuple[str, object]], level: CheckLevel = CheckLevel.FAIL, then: str = ""
) -> list[GateProblem]:
    """A problem where `values`, pairs of (who, what it says), are not all the same: the odd ones are named.

    `then` says what to do.
    """
    by_value: dict[str, list[str]] = defaultdict(list)
    for who, value in values:
        by_value[abbreviate(value)].append(who)
    if len(by_value) < 2:
        return []
    groups = sorted(by_value.items(), key=lambda item: -len(item[1]))
    said = "; ".join(f"{value} on {list_names(who)}" for value, who in groups[:4])
    return [GateProblem(level, f"{what} differs: {said}{then}")]


def abbreviate(value: object) -> str:
    text = f"{value:,}" if type(value) is int else str(value)
    return text[:12] if len(text) == 64 else text  # a hash


def list_names(names: Iterable[str]) -> str:
    listed = sorted(dict.fromkeys(names))
    return ", ".join(listed[:4]) + (f" and {len(listed) - 4} more" if len(listed) > 4 else "")


def format_bytes_short(count: float | None) -> str:
    if count is None:
        return "unknown"
    return f"{count / 1e9:,.1f} GB" if count >= 1e8 else f"{count / 1e6:,.1f} MB"
