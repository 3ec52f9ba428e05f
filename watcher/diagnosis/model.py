"""The data of a diagnosis: the evidence that goes in, and the conclusion that comes out. Any part may be missing.

`loading/` reads the evidence from a directory: a capture that `capture/` took from a running job, a run directory, or
dumps that somebody copied together. `diagnose.py` turns it into a `Diagnosis`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from wattwatch.watcher.diagnosis.flight_recorder.model import (
    DEFAULT_GROUP,
    LaunchFrame,
    Operation,
    ProcessGroup,
    RankRecord,
    UnreadableRecord,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasPolls

# Evidence


@dataclass(frozen=True, slots=True)
class StackFrame:
    function: str
    file: str
    line: int | None


@dataclass(frozen=True, slots=True)
class ThreadStack:
    """One thread, innermost frame first."""

    thread: str
    frames: tuple[StackFrame, ...]
    main: bool = False


@dataclass(frozen=True, slots=True)
class RankStacks:
    rank: int
    source: str
    threads: tuple[ThreadStack, ...]


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of a rank as the kernel reports it."""

    rank: int | None
    node: str
    pid: int
    state: str | None  # one letter, as in /proc/PID/stat; None: the process no longer exists
    wait_channel: str | None = None  # kernel function that it sleeps in; None: it runs, or we may not read it
    cpu_percent: float | None = None  # of one core, between two samples half a second apart
    source: str = ""
    kernel_stack: tuple[str, ...] = ()  # innermost first; only root may read it


@dataclass(frozen=True, slots=True)
class RankExitReport:
    """How a rank ended, as it reported itself before it exited. A rank that was killed leaves no report."""

    rank: int
    code: int
    why: str
    step: int | None = None
    is_consequence: bool = False  # the rank may have ended only because another rank did
    source: str = ""


@dataclass(frozen=True, slots=True)
class LogError:
    """The error that a rank's log ends with."""

    kind: str  # a row of log_errors.toml, or "raised"
    message: str
    is_consequence: bool = False  # the rank may have failed only because another rank did
    cause: str | None = None  # a value of `HangCause`
    frame: StackFrame | None = None  # innermost line of the job's own code


@dataclass(frozen=True, slots=True)
class RankLog:
    """The end of a rank's log, without terminal escape sequences."""

    rank: int
    source: str
    lines: tuple[str, ...]
    failure: LogError | None = None
    age_seconds: float | None = None  # time since the last write when the capture read it; None: unknown


# `LiveEvidence` and the two classes below are stored as seen.json in every capture: their field names are its keys.


@dataclass(frozen=True, slots=True)
class RankReadings:
    """What the watcher knew about one rank, from outside the job. None: unknown."""

    rank: int
    node: str
    gpu: int | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    step: int | None = None
    phase: str | None = None  # from its heartbeat
    alive: bool | None = None
    data_wait_ms: float | None = None
    throttled: bool | None = None
    blocks_left: int | None = None  # blocks of training data that this rank has not used yet


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A fault that a node reports, such as an Xid, an out-of-memory kill, a link that is down or a hung file system."""

    kind: str  # "gpu", "oom", "host", "network", "storage", "process" or "throttle"
    node: str
    words: str  # description with its numbers
    rank: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class LiveEvidence:
    """What the watcher knew about the job, from outside, when the capture began: power, progress and faults."""

    job: str
    wall_seconds: float  # Unix time
    state: str  # of the job, for example "hung" or "checkpointing"
    shape: str  # utilization pattern over the ranks, for example "one_low_rest_busy"
    step: int | None
    ranks: tuple[RankReadings, ...]
    suspects: tuple[int, ...] = ()  # ranks that differ from the others in power, utilization or step
    at_floor: bool = False  # the GPUs draw no more than a hang or a checkpoint does
    faults: tuple[NodeFault, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    records: tuple[RankRecord, ...] = ()
    unreadable: tuple[UnreadableRecord, ...] = ()
    stacks: tuple[RankStacks, ...] = ()
    processes: tuple[RankProcess, ...] = ()
    ras: tuple[RasPolls, ...] = ()
    live: LiveEvidence | None = None
    exit_reports: tuple[RankExitReport, ...] = ()
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()  # names of the files that were read
    missing: tuple[str, ...] = ()  # what was asked for and could not be collected, one sentence each
    logs: tuple[RankLog, ...] = ()  # of ranks that are gone or did not answer

    @property
    def live_ranks(self) -> tuple[RankReadings, ...]:
        """Empty if the watcher did not observe the job."""
        return () if self.live is None else self.live.ranks


# Conclusion


class DiagnosisVerdict(StrEnum):
    DESYNC = "desync"  # ranks launched different collectives at one slot of a group, or entered groups in other orders
    MISMATCH = "mismatch"  # ranks launched the same collective with different sizes or types
    NEVER_ARRIVED = "never_arrived"  # the others wait for ranks that did not launch the collective, or not finish it
    NO_DESYNC = "no_desync"  # all ranks wait in the same operation: the program is not the cause
    UNKNOWN = "unknown"


class HangCause(StrEnum):
    """What is to blame, as far as the evidence shows."""

    GPU = "gpu"
    RANK = "rank"  # the rank's process: stopped, in an endless loop, or waiting for something outside the job
    HOST = "host"
    STORAGE = "storage"
    NETWORK = "network"
    DATA = "data"
    PROGRAM = "program"
    UNKNOWN = "unknown"


class MemberState(StrEnum):
    """Where a member of a process group is, relative to the slot that the group is stuck at.

    The values are stored in diagnosis.json and served by the API.
    """

    WAITING = "waiting"  # launched the operation and did not finish it
    BEHIND = "behind"  # has not launched it, because it waits in another operation
    SILENT = "silent"  # has not launched it and waits in no operation: it executes its own code
    AHEAD = "ahead"  # finished it
    ABSENT = "absent"  # has no record of it


@dataclass(frozen=True, slots=True)
class GroupMember:
    rank: int
    state: MemberState
    operation: Operation | None = None  # at the slot; None: it has none there
    last_enqueued: int | None = None
    last_completed: int | None = None
    frame: LaunchFrame | None = None  # innermost line of the job's own code that launched it, or where the rank is now


@dataclass(frozen=True, slots=True)
class GroupSlotStatus:
    """The state of every member of a group at one slot: the slot that proves the verdict, or one where ranks wait."""

    group: ProcessGroup
    slot: int
    members: tuple[GroupMember, ...]  # ordered by rank


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """One edge of the wait-for graph: `rank` cannot continue before `awaited` does."""

    rank: int
    awaited: int
    group: ProcessGroup
    slot: int
    operation: Operation
    why: str  # "has not launched it", "is still in an earlier operation", "left no record"


@dataclass(frozen=True, slots=True)
class CollectiveAnalysis:
    """What the flight records alone show. It depends on the set of records, never on their order."""

    verdict: DiagnosisVerdict
    conclusive: bool
    culprits: tuple[int, ...]
    tied: tuple[tuple[int, ...], ...]  # sets of ranks: one of them is wrong, and the records cannot tell which
    confidence: float  # 0..1
    why: str
    groups: tuple[GroupSlotStatus, ...] = ()  # most relevant first
    waits: tuple[WaitEdge, ...] = ()
    sources: tuple[str, ...] = ()  # names of the files that it is based on
    absent: tuple[int, ...] = ()  # ranks without a record for which all others wait: the record may just be lost


@dataclass(frozen=True, slots=True)
class SignalSummary:
    """One source of evidence that supports or contradicts the conclusion."""

    source: str  # a name defined in signals/signal.py, for example "flight recorder"
    agrees: bool
    text: str


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int
    node: str | None = None
    gpu: int | None = None
    doing: str = ""  # "in barrier at sequence number 7 of default_pg (save_checkpoint, train.py:88)"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The conclusion from all evidence: what is printed, alerted, served by the API and shown in the report."""

    verdict: DiagnosisVerdict
    conclusive: bool  # the flight records prove who is to blame
    cause: HangCause
    culprits: tuple[Culprit, ...]
    confidence: float  # 0..1
    step: int | None
    summary: str  # one sentence: which ranks, where, in which operation, what the others do
    why: str  # the evidence with its numbers
    advice: str  # the next step
    signals: tuple[SignalSummary, ...] = ()
    collectives: CollectiveAnalysis | None = None
    evidence: tuple[str, ...] = ()  # file names
    missing: tuple[str, ...] = ()
    unreadable: tuple[UnreadableRecord, ...] = ()  # records that exist and could not be used
    stacks: tuple[RankStacks, ...] = ()  # of the culprits; the stacks of the others are in the evidence
    no_hang: bool = False  # the evidence is complete, and nothing in it shows a hang
    logs: tuple[RankLog, ...] = ()  # the last lines of the culprits' logs


# Ranks and nodes, from whichever source knows them


def nodes_by_rank(evidence: Evidence) -> dict[int, str]:
    """The node of every rank for which any source names one."""
    nodes = {process.rank: process.node for process in evidence.processes if process.rank is not None}
    nodes |= {each.rank: each.node for each in evidence.live_ranks if each.node}
    return nodes | dict(evidence.node_of_rank)


def known_ranks(evidence: Evidence) -> frozenset[int]:
    """Ranks named by records, the watcher, nodes or processes.

    Stacks, exit reports and logs do not count: they alone do not show that the list of ranks is complete.
    """
    members = (rank for record in evidence.records for part in record.groups for rank in part.group.members)
    return (
        frozenset(members)
        | frozenset(record.rank for record in evidence.records)
        | frozenset(evidence.node_of_rank)
        | frozenset(each.rank for each in evidence.live_ranks)
        | frozenset(process.rank for process in evidence.processes if process.rank is not None)
    )


def job_world_size(evidence: Evidence) -> int | None:
    """Number of ranks of the whole job, taken from its default process group; other groups may leave ranks out."""
    return max(
        (
            len(part.group.members)
            for record in evidence.records
            for part in record.groups
            if part.group.members and DEFAULT_GROUP in (part.group.description, part.group.name)
        ),
        default=None,
    )


def nodes_by_rank_if_complete(evidence: Evidence) -> dict[int, str]:
    """The node of every rank; empty if the node of any rank of the job is unknown."""
    nodes, world = nodes_by_rank(evidence), job_world_size(evidence)
    return nodes if world is not None and known_ranks(evidence) <= nodes.keys() else {}
