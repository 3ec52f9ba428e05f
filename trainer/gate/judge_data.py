"""Blocks, shards, evenness: is the data whole, each row of the corpus once, and enough on every rank?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from trainer.gate.report import GateSettings, NodeReport, ShardLook
from trainer.gate.saying import differing, fail, some, warn
from trainer.gate.verdict import Check, Evenness, Level, Problem
from trainer.pack.manifest import TOKEN_BYTES, Manifest, dealt, sample_places, xor_below
from trainer.ranks import ranks_in_words

MAX_EMPTY_SHARE: Final = 0.001
MAX_LOST_SHARE: Final = 0.01
NETWORK_FILESYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "fuse.ceph", "glusterfs", "fuse.glusterfs"}
    | {"9p", "virtiofs", "wekafs", "afs", "fuse.sshfs", "fuse.juicefs", "fuse.s3fs", "fuse.gcsfuse"}
)
SPREAD: Final = {
    "min": "all ranks must stop at the minimum",
    "pad": "the shorter ones repeat their first blocks",
    "off": 'train.evenness is "off": the job will hang where the shortest one ends',
}
ALIKE: Final = "; pack all ranks again, from the same, with the same"
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


def judge_blocks(settings: GateSettings, shards: dict[int, ShardLook]) -> Check:
    """Each rank's file is there, whole, and the one that its manifest describes."""
    problems = []
    for rank, look in sorted(shards.items()):
        problems += [fail(f"rank {rank}: {look.path}: {text}") for text in block_troubles(settings, look)]
    remote = [rank for rank, look in shards.items() if look.filesystem in NETWORK_FILESYSTEMS]
    if remote:
        kinds = some({shards[rank].filesystem for rank in remote})
        problems.append(warn(f"{ranks_in_words(remote)}: blocks lie on {kinds}, not on the node's own disk"))
    size = sum(look.size_bytes or 0 for look in shards.values())
    return Check("blocks", tuple(problems), f"files={len(shards)} bytes={size:,}")


def block_troubles(settings: GateSettings, look: ShardLook) -> list[str]:
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
    elif said.blocks and tuple((sample.offset, sample.bytes) for sample in said.samples) != sample_places(
        said.size_bytes
    ):
        out.append("its manifest has no hashes to compare with: pack again")
    if settings.document_mask and said.document_starts is None:
        out.append("packed without --document-mask, which train.document_mask needs: pack again with it")
    if said.document_starts is not None and look.starts_bytes != said.document_starts * 8:
        out.append("the file of document starts is missing or torn; pack again with --document-mask")
    return out


def judge_shards(reports: Sequence[NodeReport], shards: dict[int, ShardLook]) -> Check:
    """The ranks' rows are the corpus, each row once, made into ids in one way."""
    world = reports[0].settings.world
    said = {rank: look.manifest for rank, look in sorted(shards.items()) if look.manifest is not None}
    problems = []
    for rank, manifest in said.items():
        problems += [fail(f"rank {rank}: {text}") for text in _row_troubles(world, manifest)]
    for name, words in SAME_IN_ALL_MANIFESTS:
        problems += differing(words, [(f"rank {rank}", getattr(m, name)) for rank, m in said.items()], then=ALIKE)
    masks = [(f"rank {rank}", manifest.document_starts is not None) for rank, manifest in said.items()]
    problems += differing("document mask", masks, then=ALIKE)
    versions = [(f"rank {rank}", manifest.tokenizers_version) for rank, manifest in said.items()]
    problems += differing("tokenizers version", versions, Level.WARN)
    rows, corpus_rows = sum(m.rows for m in said.values()), max((m.corpus_rows for m in said.values()), default=0)
    if said and len(said) == world and not problems:
        xor = 0
        for manifest in said.values():
            xor ^= manifest.row_xor
        if rows != corpus_rows or xor != xor_below(corpus_rows):
            problems.append(fail(f"the ranks hold {rows:,} rows of {corpus_rows:,}, or not each of them once{ALIKE}"))
    empty = sum(m.empty_rows for m in said.values())
    if rows and empty / rows > MAX_EMPTY_SHARE:
        problems.append(warn(f"{empty:,} of {rows:,} rows gave no token"))
    for report in reports:
        problems += _other_tokenizer(report, said)
    return Check("shards", tuple(problems), f"rows={rows:,}/{corpus_rows:,} empty={empty:,}")


def _row_troubles(world: int, said: Manifest) -> list[str]:
    if said.rows == 0:
        return ["an empty shard, no row: pack more records, or fewer ranks"]
    if said.world != world:
        return [f"packed for a world of {said.world}, the job has {world}: pack again"]
    if not 0 <= said.rank < world:
        return []  # judge_blocks has said that it is another rank's
    count, first, last = dealt(said.corpus_rows, world, said.rank, said.contiguous)
    if (said.rows, said.first_row, said.last_row) != (count, first, last):
        return [
            f"holds {said.rows:,} rows from {said.first_row} to {said.last_row}, its shard is {count:,} from {first} "
            f"to {last}"
        ]
    return []


def _other_tokenizer(report: NodeReport, said: dict[int, Manifest]) -> list[Problem]:
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
            f"{report.node}: {ranks_in_words(other)} packed with another tokenizer than the model's: "
            "pack with the model's"
        )
    ]


def count_blocks(settings: GateSettings, shards: dict[int, ShardLook]) -> Evenness | None:
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
    return Evenness(counts[shortest], counts[longest], shortest, longest, steps, lost, by_rank)


def judge_evenness(reports: Sequence[NodeReport], shards: dict[int, ShardLook], even: Evenness | None) -> Check:
    """At least one step for everybody, and ids that the model has. Unequal counts are a warning: the minimum rules."""
    settings, problems = reports[0].settings, []
    if even is None:
        unknown = [r for r in range(settings.world) if r not in shards or shards[r].size_bytes is None]
        problems.append(fail(f"block counts are not known of {ranks_in_words(unknown) if unknown else 'all ranks'}"))
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
                f"{even.longest_rank} has {even.max_blocks:,}; {SPREAD.get(settings.evenness, SPREAD['min'])}"
            )
        )
    if even and even.steps and even.lost_share > MAX_LOST_SHARE:
        problems.append(warn(f"{even.lost_share:.2%} of all blocks are in no step"))
    model_sizes = [r.model.vocab_size for r in reports if r.model and r.model.vocab_size]
    for rank, look in sorted(shards.items()):
        problems += [fail(f"rank {rank}: {look.path}: {text}") for text in _id_troubles(settings, look, model_sizes)]
    summary = "" if even is None else (
        f"spread={even.spread:,} min={even.global_min_blocks:,} steps={even.steps:,} lost={even.lost_share:.3%}"
    )  # fmt: skip
    return Check("evenness", tuple(problems), summary)


def _id_troubles(settings: GateSettings, look: ShardLook, model_sizes: list[int]) -> list[str]:
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
