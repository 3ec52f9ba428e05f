"""What the gate looks at, node by node: plain data that travels as JSON and is kept whole in gate.json.

None is "not looked at" or "could not be read", never zero; where something went wrong, `trouble` is the sentence.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.trainer.pack.manifest import PackManifest


@dataclass(frozen=True, slots=True)
class GateSettings:
    """What the job is told to be. The same on every node, or the gate refuses."""

    world: int
    micro_batch: int
    accumulation: int
    keep: int  # checkpoints that stay
    seq_len: int | None = None  # None: what the manifests say
    vocab_size: int | None = None  # None: the model's, else the tokenizer's
    checkpoint_bytes: int | None = None  # None: from the model's parameters, else unknown
    epochs: int = 1
    evenness: str = "min"  # wattwatch.trainer.settings.Evenness: who rules when ranks have unequal block counts
    document_mask: bool = False  # blocks must have been packed with places where records begin
    optimizer: bool = False  # checkpoints hold masters and moments too, and a resume wants them
    random_weights: bool | None = None  # None: nobody said whether the model must have weights
    file_bytes: int | None = None  # of a weights file; a rank writes whole files
    save_timeout_seconds: float | None = None  # None: how fast the directory takes a write is not measured

    @property
    def blocks_per_step(self) -> int:
        """Blocks that one rank consumes between two optimizer steps."""
        return self.micro_batch * self.accumulation


@dataclass(frozen=True, slots=True)
class ShardReport:
    """A rank's token file as its own node sees it. Ids are those of the hashed pieces, not of the whole file."""

    rank: int
    path: str
    trouble: str | None = None
    manifest: PackManifest | None = None
    size_bytes: int | None = None
    differing_offsets: tuple[int, ...] = ()  # pieces that are not what was packed
    min_id: int | None = None
    max_id: int | None = None
    starts_bytes: int | None = None
    filesystem: str = ""


@dataclass(frozen=True, slots=True)
class FoundHeartbeat:
    """A rank's heartbeat that somebody may still stand behind."""

    run: str
    rank: int
    host: str
    pid: int
    age_seconds: float  # by the clock of the node that read it
    alive: bool | None  # None: a process of another host


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """The shared directory: can this node write there, is it rank 0's, and does another job live in it?"""

    directory: str
    trouble: str | None = None
    sees_rank_0: bool | None = None  # None: this is rank 0's node, or rank 0 wrote nothing
    free_bytes: int | None = None
    filesystem: str = ""
    write_bytes_per_second: float | None = None  # one small file, synced, while all nodes write theirs
    beats: tuple[FoundHeartbeat, ...] = ()  # of rank 0's run directory


@dataclass(frozen=True, slots=True)
class ResumeReport:
    """The checkpoint to resume from: why it cannot be, or what COMPLETE.json says of it."""

    directory: str
    trouble: str | None = None
    step: int | None = None  # steps done
    tokens: int | None = None  # taken in them, by all ranks
    world: int | None = None
    optimizer: bool | None = None
    blocks_sha256: str | None = None
    other_shape: str | None = None  # the first tensor that is not as the model's


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The files that the job starts from."""

    trouble: str | None = None
    vocab_size: int | None = None
    tokenizer_file_sha256: str | None = None
    tokenizer_meaning_sha256: str | None = None
    weights_bytes: int | None = None
    parameters: int | None = None  # in those weights; None: there are none, or they cannot be read
    config_sha256: str | None = None  # of the job's configuration file
    resume: ResumeReport | None = None


@dataclass(frozen=True, slots=True)
class GpuReport:
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
    pages_pending: bool | None = None  # memory to be retired at the next reset; before Ampere
    rows_pending: bool | None = None  # memory rows to be remapped at the next reset


@dataclass(frozen=True, slots=True)
class DevicesReport:
    """Boards of the node that the job may use, and who computes on them already."""

    skipped: str | None = None  # why nobody looked
    trouble: str | None = None
    gpus: tuple[GpuReport, ...] = ()
    processes: tuple[str, ...] = ()  # "pid 123 on GPU 4"


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Everything one gate process has seen, for the ranks it speaks for."""

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
    troubles: tuple[str, ...] = ()  # what failed in the gate itself on this node
    seconds: dict[str, float] = field(default_factory=dict)  # of each part, since this process began
    wall: float = 0.0  # seconds since 1970 when it was sent
    skew_seconds: float | None = None  # this node's clock against rank 0's, transport included


# What the gate says: six checks, each with its numbers, and whether the job may start.


class CheckLevel(StrEnum):
    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"


SEVERITY: Final = {CheckLevel.PASS: 0, CheckLevel.WARN: 1, CheckLevel.FAIL: 2}
MAX_PROBLEMS_SHOWN: Final = 16  # of a check's problems, on a terminal


@dataclass(frozen=True, slots=True)
class GateProblem:
    level: CheckLevel
    text: str  # what, where, and what to do


@dataclass(frozen=True, slots=True)
class GateCheck:
    name: str
    problems: tuple[GateProblem, ...]
    summary: str  # the numbers, on one line

    @property
    def level(self) -> CheckLevel:
        return max((problem.level for problem in self.problems), key=SEVERITY.__getitem__, default=CheckLevel.PASS)


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Block counts over ranks. Every rank stops after `steps`: the shortest rank decides (or, where shorter ones are
    padded, the longest), or the job hangs."""

    global_min_blocks: int
    max_blocks: int
    shortest_rank: int
    longest_rank: int
    steps: int  # whole optimizer steps of an epoch, the same on every rank
    lost_share: float  # of all blocks, those that no step reaches
    blocks: dict[str, int] = field(default_factory=dict)  # by rank

    @property
    def spread(self) -> int:
        return self.max_blocks - self.global_min_blocks


@dataclass(frozen=True, slots=True)
class GateVerdict:
    checks: tuple[GateCheck, ...]
    evenness: BlockCounts | None  # None where a rank's count is not known

    @property
    def level(self) -> CheckLevel:
        return max((check.level for check in self.checks), key=SEVERITY.__getitem__)

    def exit_code(self, strict: bool) -> int:
        """0 pass, 1 warnings, 2 refused; strict refuses on warnings too."""
        code = SEVERITY[self.level]
        return 2 if strict and code else code

    def lines(self) -> list[str]:
        """For people: one line a check, and one below it for each problem."""
        out = []
        for number, check in enumerate(self.checks, 1):
            out.append(f"gate {number}/{len(self.checks)} {check.name:<10} {check.level}  {check.summary}".rstrip())
            worst_first = sorted(check.problems, key=lambda problem: -SEVERITY[problem.level])
            out += [f"         {problem.level}  {problem.text}" for problem in worst_first[:MAX_PROBLEMS_SHOWN]]
            if (more := len(check.problems) - MAX_PROBLEMS_SHOWN) > 0:
                out.append(f"         and {more} more, all of them in gate.json")
        return out
