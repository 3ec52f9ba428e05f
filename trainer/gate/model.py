"""The gate's data: what each node reports, and the verdict over all reports.

Reports travel between nodes as JSON and are kept whole in gate.json; so are the names of their fields. None means "not
inspected" or "could not be read", never zero. If something went wrong, `trouble` says what.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.trainer.pack.manifest import PackManifest
from wattwatch.trainer.run_directory import FoundHeartbeat


@dataclass(frozen=True, slots=True)
class GateSettings:
    """The job as the gate was asked to check it. Must be the same on every node."""

    world: int
    micro_batch: int
    accumulation: int
    keep: int  # checkpoints to keep
    seq_len: int | None = None  # None: as in the manifests
    vocab_size: int | None = None  # None: the model's; without a model the tokenizer's
    checkpoint_bytes: int | None = None  # None: computed from the model's parameters, if known
    epochs: int = 1
    evenness: str = "min"  # wattwatch.trainer.settings.Evenness
    document_mask: bool = False  # blocks must have been packed with the positions where records begin
    optimizer: bool = False  # the job saves optimizer state in its checkpoints
    random_weights: bool | None = None  # None: not known whether the model directory must have weights
    file_bytes: int | None = None  # size of a weights file; a rank writes whole files
    save_timeout_seconds: float | None = None  # None: the write speed of the checkpoint directory is not measured

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one rank consumes per optimizer step."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A rank's token file, as its own node sees it. Token ids are those of the pieces that were read."""

    rank: int
    path: str
    trouble: str | None = None
    manifest: PackManifest | None = None
    size_bytes: int | None = None
    differing_offsets: tuple[int, ...] = ()  # pieces whose hash is not the one in the manifest
    min_id: int | None = None
    max_id: int | None = None
    starts_bytes: int | None = None  # size of the file of record starts
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The shared directory: can this node write to it, is it rank 0's, and does another job use it?"""

    directory: str
    trouble: str | None = None
    sees_rank_0: bool | None = None  # None: this is rank 0's node, or rank 0 wrote no mark
    free_bytes: int | None = None
    filesystem: str = ""
    write_bytes_per_second: float | None = None  # one small file, synced, while all nodes write theirs
    beats: tuple[FoundHeartbeat, ...] = ()  # of ranks that may still run in this run directory


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The checkpoint to resume from: why it cannot be used, or what its COMPLETE.json says."""

    directory: str
    trouble: str | None = None
    step: int | None = None  # steps done
    tokens: int | None = None  # consumed in these steps, by all ranks
    world: int | None = None
    optimizer: bool | None = None
    blocks_sha256: str | None = None
    other_shape: str | None = None  # the first tensor whose shape is not the model's


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The files that the job starts from."""

    trouble: str | None = None
    vocab_size: int | None = None
    tokenizer_file_sha256: str | None = None
    tokenizer_meaning_sha256: str | None = None
    weights_bytes: int | None = None
    parameters: int | None = None  # number in those weights; None: no weights, or they cannot be read
    config_sha256: str | None = None  # of the job's configuration file
    resume: ResumeReport | None = None


@dataclass(frozen=True, slots=True)
class GpuReport:
    """One GPU as nvidia-smi describes it."""

    index: int
    uuid: str
    name: str
    driver: str
    memory_total_mib: float
    memory_used_mib: float
    uncorrected_errors: int | None = None  # ECC, since the driver was loaded
    temperature_celsius: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    pages_pending: bool | None = None  # memory pages will be retired at the next reset (GPUs before Ampere)
    rows_pending: bool | None = None  # memory rows will be remapped at the next reset


@dataclass(frozen=True, slots=True)
class DevicesReport:
    """The GPUs of the node that the job may use, and the processes that already compute on them."""

    skipped: str | None = None  # why the GPUs were not inspected
    trouble: str | None = None
    gpus: tuple[GpuReport, ...] = ()
    processes: tuple[str, ...] = ()  # "pid 123 on GPU 4"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything that one gate process found out, for the ranks that it represents."""

    node: str
    ranks: tuple[int, ...]
    settings: GateSettings
    versions: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    code_sha256: str = ""
    shards: tuple[ShardReport, ...] = ()
    checkpoint: CheckpointReport | None = None
    model: ModelReport | None = None
    devices: DevicesReport | None = None
    troubles: tuple[str, ...] = ()  # exceptions of the gate itself on this node
    seconds: dict[str, float] = field(default_factory=dict)  # when each part was finished, since the process began
    wall: float = 0.0  # Unix seconds when the report was sent
    skew_seconds: float | None = None  # rank 0's clock minus this node's, network delay included


class CheckLevel(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


SEVERITY: Final = {CheckLevel.PASS: 0, CheckLevel.WARN: 1, CheckLevel.FAIL: 2}
MAX_PROBLEMS_SHOWN: Final = 16  # per check, on a terminal; chosen: a wrong --world gives one problem per rank


@dataclass(frozen=True, slots=True)
class GateProblem:
    level: CheckLevel
    text: str  # what, where, and what to do


@dataclass(frozen=True, slots=True)
class GateCheck:
    """One of the six checks."""

    name: str
    problems: tuple[GateProblem, ...]
    summary: str  # its numbers, on one line

    @property
    def level(self) -> CheckLevel:
        return max((problem.level for problem in self.problems), key=SEVERITY.__getitem__, default=CheckLevel.PASS)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Block counts over ranks, and the steps that follow from them.

    Every rank stops after `steps`, or the job hangs. The rank with the fewest blocks decides, or, if the others repeat
    blocks (`pad`), the rank with the most.
    """

    global_min_blocks: int
    max_blocks: int
    shortest_rank: int
    longest_rank: int
    steps: int  # whole optimizer steps of an epoch, the same on every rank
    lost_share: float  # fraction of all blocks that no step reaches
    blocks: dict[str, int] = field(default_factory=dict)  # by rank

    @property
    def spread(self) -> int:
        return self.max_blocks - self.global_min_blocks


@dataclass(frozen=True, slots=True)
class GateVerdict:
    checks: tuple[GateCheck, ...]
    evenness: BlockCounts | None  # None if the count of some rank is not known

    @property
    def level(self) -> CheckLevel:
        return max((check.level for check in self.checks), key=SEVERITY.__getitem__)

    def exit_code(self, strict: bool) -> int:
        """0 passed, 1 warnings, 2 refused; with `strict` warnings are refusals."""
        code = SEVERITY[self.level]
        return 2 if strict and code else code

    def lines(self) -> list[str]:
        """For the terminal: one line per check, and one below it for each problem."""
        out = []
        for number, check in enumerate(self.checks, 1):
            out.append(f"gate {number}/{len(self.checks)} {check.name:<10} {check.level}  {check.summary}".rstrip())
            worst_first = sorted(check.problems, key=lambda problem: -SEVERITY[problem.level])
            out += [f"         {problem.level}  {problem.text}" for problem in worst_first[:MAX_PROBLEMS_SHOWN]]
            if (more := len(check.problems) - MAX_PROBLEMS_SHOWN) > 0:
                out.append(f"         and {more} more; gate.json lists all problems")
        return out
