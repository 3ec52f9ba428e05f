"""All that a diagnosis may rest on, from whatever source. Data only; every part may be missing.

Read from a directory by `directory/`: one that `capture/` filled from a live job, or anybody's.
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
    """A rank's process as the kernel sees it. `state` as in /proc/PID/stat; None: it is gone."""

    rank: int | None
    node: str
    pid: int
    state: str | None
    wait_channel: str | None = None  # kernel function that it sleeps in; None: running, or not allowed to read
    cpu_percent: float | None = None  # over the time between two looks
    source: str = ""
    kernel_stack: tuple[str, ...] = ()  # innermost first; only root may read it


@dataclass(frozen=True, slots=True)
class RankExitReport:
    """How a rank ended, as it says itself. A rank that was killed says nothing."""

    rank: int
    code: int
    why: str
    step: int | None = None
    follows: bool = False  # it may well be that another rank's end was the cause
    source: str = ""


@dataclass(frozen=True, slots=True)
class LogError:
    """What a rank's log ends with. `kind` is a row of failures.toml, or "raised"; `cause` a value of `Cause`."""

    kind: str
    words: str
    follows: bool = False  # a consequence of another rank's end
    cause: str | None = None
    frame: StackFrame | None = None  # innermost line of its own code


@dataclass(frozen=True, slots=True)
class RankLog:
    """The end of a rank's log. `lines`: the last, without anything that a terminal would obey."""

    rank: int
    source: str
    lines: tuple[str, ...]
    failure: LogError | None = None
    age_seconds: float | None = None  # since it was written to, as the capture came; None: not known


@dataclass(frozen=True, slots=True)
class RankReadings:
    """One rank from outside, as the watcher saw it. None: not known."""

    rank: int
    node: str
    gpu: int | None = None
    power_watts: float | None = None
    utilization_percent: float | None = None
    step: int | None = None
    phase: str | None = None  # of its heartbeat
    alive: bool | None = None
    data_wait_ms: float | None = None
    throttled: bool | None = None
    blocks_left: int | None = None  # of its share of the data


@dataclass(frozen=True, slots=True)
class LiveEvidence:
    """The job from outside at the moment of the capture: power, progress, faults."""

    job: str
    wall_seconds: float
    state: str  # of the job: "hung", "checkpointing"
    shape: str  # over the ranks: "one_low_rest_busy"
    step: int | None
    ranks: tuple[RankReadings, ...]
    suspects: tuple[int, ...] = ()  # ranks that stand out by power and utilisation, or by their step
    at_floor: bool = False
    faults: tuple[NodeFault, ...] = ()


@dataclass(frozen=True, slots=True)
class NodeFault:
    """A fault that a node reports: an Xid, a lost board, an out-of-memory kill, a link, a hung file system."""

    kind: str  # "gpu", "oom", "host", "network", "storage", "process", "throttle"
    node: str
    words: str  # with its numbers
    rank: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Evidence:
    """`missing`: what was asked for and not had, one sentence each."""

    records: tuple[RankRecord, ...] = ()
    unread: tuple[UnreadableRecord, ...] = ()
    stacks: tuple[RankStacks, ...] = ()
    processes: tuple[RankProcess, ...] = ()
    ras: tuple[RasPolls, ...] = ()
    seen: LiveEvidence | None = None
    endings: tuple[RankExitReport, ...] = ()
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()  # files that something was read from
    missing: tuple[str, ...] = ()
    logs: tuple[RankLog, ...] = ()  # of ranks that are gone or did not answer

    @property
    def live_ranks(self) -> tuple[RankReadings, ...]:
        """() where nobody looked from outside."""
        return () if self.seen is None else self.seen.ranks


# Who, where, why, and how sure. Data only.


class DiagnosisVerdict(StrEnum):
    DESYNC = "desync"  # different collectives at one slot of one group, or groups entered in different orders
    MISMATCH = "mismatch"  # the same collective with other sizes or types
    NEVER_ARRIVED = "never_arrived"  # the rest waits for ranks that did not launch it, or did not finish it
    NO_DESYNC = "no_desync"  # all wait in the same operation: not the program
    UNKNOWN = "unknown"


class HangCause(StrEnum):
    """What is to blame, as far as the evidence goes."""

    GPU = "gpu"
    RANK = "rank"  # its process: stopped, looping, waiting for something else
    HOST = "host"
    STORAGE = "storage"
    NETWORK = "network"
    DATA = "data"
    PROGRAM = "program"
    UNKNOWN = "unknown"


class MemberState(StrEnum):
    """Where one member of a group stands against the slot that the group is stuck at."""

    WAITING = "waiting"  # launched it, not finished
    BEHIND = "behind"  # has not launched it, and waits elsewhere
    SILENT = "silent"  # has not launched it, and waits in nothing: it is in its own code
    AHEAD = "ahead"  # finished it
    ABSENT = "absent"  # no record of it


@dataclass(frozen=True, slots=True)
class GroupMember:
    rank: int
    place: MemberState
    operation: Operation | None = None  # at the slot; None where it has none there
    last_enqueued: int | None = None
    last_completed: int | None = None
    frame: LaunchFrame | None = (
        None  # innermost line of the job's own code that launched it, or where the rank is instead
    )


@dataclass(frozen=True, slots=True)
class GroupSlotStatus:
    """Where each member of a group stands against one slot: the conclusion rests on it, or somebody waits in it."""

    group: ProcessGroup
    slot: int
    members: tuple[GroupMember, ...]  # in the order of ranks


@dataclass(frozen=True, slots=True)
class WaitEdge:
    """One edge of the wait-for graph: `rank` cannot go on before `awaited` does something."""

    rank: int
    awaited: int
    group: ProcessGroup
    slot: int
    operation: Operation
    why: str  # "has not launched it", "is still in an earlier operation", "left no record"


@dataclass(frozen=True, slots=True)
class CollectiveAnalysis:
    """What the flight records alone say. Pure function of the set of records: their order does not matter."""

    verdict: DiagnosisVerdict
    conclusive: bool
    culprits: tuple[int, ...]
    tied: tuple[tuple[int, ...], ...]  # sets of ranks of which one is wrong and the records cannot tell which
    confidence: float  # 0..1
    why: str
    groups: tuple[GroupSlotStatus, ...] = ()  # those that matter first
    waits: tuple[WaitEdge, ...] = ()
    sources: tuple[str, ...] = ()  # files that it rests on
    absent: tuple[int, ...] = ()  # the one without a record for whom all wait: its record may only be lost


@dataclass(frozen=True, slots=True)
class SignalSummary:
    """One source that speaks for or against the conclusion."""

    source: str  # a name of witnesses/witness.py: "flight recorder", "kernel log"
    agrees: bool
    words: str


@dataclass(frozen=True, slots=True)
class Culprit:
    rank: int
    node: str | None = None
    gpu: int | None = None
    doing: str = ""  # "in barrier at slot 7 (save_checkpoint, train.py:88)"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything weighed together: what is printed, told, served and put on the incident page."""

    verdict: DiagnosisVerdict
    conclusive: bool
    cause: HangCause
    culprits: tuple[Culprit, ...]
    confidence: float  # 0..1
    step: int | None
    summary: str  # one sentence: who, where, in what, against whom
    why: str  # with the numbers
    advice: str  # the next step
    testimonies: tuple[SignalSummary, ...] = ()
    reading: CollectiveAnalysis | None = None
    evidence: tuple[str, ...] = ()  # files
    missing: tuple[str, ...] = ()
    unread: tuple[UnreadableRecord, ...] = ()  # records that are there and cannot be used
    stacks: tuple[RankStacks, ...] = ()  # of the culprits; the others' are in the evidence
    nothing_open: bool = False  # the records are whole, and no rank is in a collective: no hang in them
    logs: tuple[RankLog, ...] = ()  # of the culprits: their last lines


# Which ranks the evidence knows of, how many there are, and on which nodes: by whichever source tells. Pure.


def nodes_by_rank(evidence: Evidence) -> dict[int, str]:
    """Those that any source places."""
    nodes = {process.rank: process.node for process in evidence.processes if process.rank is not None}
    nodes |= {each.rank: each.node for each in evidence.live_ranks if each.node}
    return nodes | dict(evidence.node_of_rank)


def known_ranks(evidence: Evidence) -> frozenset[int]:
    """Ranks that records, the watcher, nodes or processes name; not those of stacks, endings and logs alone."""
    members = (rank for record in evidence.records for part in record.groups for rank in part.group.members)
    return (
        frozenset(members)
        | frozenset(record.rank for record in evidence.records)
        | frozenset(evidence.node_of_rank)
        | frozenset(each.rank for each in evidence.live_ranks)
        | frozenset(process.rank for process in evidence.processes if process.rank is not None)
    )


def job_world_size(evidence: Evidence) -> int | None:
    """Ranks of the whole job, where its default group tells: other groups may leave some out."""
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
    """By rank; nothing where the node of any rank that may be there is not known."""
    nodes, world = nodes_by_rank(evidence), job_world_size(evidence)
    return nodes if world is not None and known_ranks(evidence) <= nodes.keys() else {}
