"""Who, where, why, and how sure. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from watcher.diagnose.evidence import RankLog, RankStacks
from watcher.diagnose.flight.record import Frame, Group, Operation, Unread


class DiagnosisVerdict(StrEnum):
    DESYNC = "desync"  # different collectives at one slot of one group, or groups entered in different orders
    MISMATCH = "mismatch"  # the same collective with other sizes or types
    NEVER_ARRIVED = "never_arrived"  # the rest waits for ranks that did not launch it, or did not finish it
    NO_DESYNC = "no_desync"  # all wait in the same operation: not the program
    UNKNOWN = "unknown"


class Cause(StrEnum):
    """What is to blame, as far as the evidence goes."""

    GPU = "gpu"
    RANK = "rank"  # its process: stopped, looping, waiting for something else
    HOST = "host"
    STORAGE = "storage"
    NETWORK = "network"
    DATA = "data"
    PROGRAM = "program"
    UNKNOWN = "unknown"


class Place(StrEnum):
    """Where one member of a group stands against the slot that the group is stuck at."""

    WAITING = "waiting"  # launched it, not finished
    BEHIND = "behind"  # has not launched it, and waits elsewhere
    SILENT = "silent"  # has not launched it, and waits in nothing: it is in its own code
    AHEAD = "ahead"  # finished it
    ABSENT = "absent"  # no record of it


@dataclass(frozen=True, slots=True)
class Member:
    rank: int
    place: Place
    operation: Operation | None = None  # at the slot; None where it has none there
    last_enqueued: int | None = None
    last_completed: int | None = None
    frame: Frame | None = None  # innermost line of the job's own code that launched it, or where the rank is instead


@dataclass(frozen=True, slots=True)
class GroupFrontier:
    """Where each member of a group stands against one slot: the conclusion rests on it, or somebody waits in it."""

    group: Group
    slot: int
    members: tuple[Member, ...]  # in the order of ranks


@dataclass(frozen=True, slots=True)
class Wait:
    """One edge of the wait-for graph: `rank` cannot go on before `awaited` does something."""

    rank: int
    awaited: int
    group: Group
    slot: int
    operation: Operation
    why: str  # "has not launched it", "is still in an earlier operation", "left no record"


@dataclass(frozen=True, slots=True)
class CollectiveReading:
    """What the flight records alone say. Pure function of the set of records: their order does not matter."""

    verdict: DiagnosisVerdict
    conclusive: bool
    culprits: tuple[int, ...]
    tied: tuple[tuple[int, ...], ...]  # sets of ranks of which one is wrong and the records cannot tell which
    confidence: float  # 0..1
    why: str
    groups: tuple[GroupFrontier, ...] = ()  # those that matter first
    waits: tuple[Wait, ...] = ()
    sources: tuple[str, ...] = ()  # files that it rests on
    absent: tuple[int, ...] = ()  # the one without a record for whom all wait: its record may only be lost


@dataclass(frozen=True, slots=True)
class Testimony:
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
    cause: Cause
    culprits: tuple[Culprit, ...]
    confidence: float  # 0..1
    step: int | None
    summary: str  # one sentence: who, where, in what, against whom
    why: str  # with the numbers
    advice: str  # the next step
    testimonies: tuple[Testimony, ...] = ()
    reading: CollectiveReading | None = None
    evidence: tuple[str, ...] = ()  # files
    missing: tuple[str, ...] = ()
    unread: tuple[Unread, ...] = ()  # records that are there and cannot be used
    stacks: tuple[RankStacks, ...] = ()  # of the culprits; the others' are in the evidence
    nothing_open: bool = False  # the records are whole, and no rank is in a collective: no hang in them
    logs: tuple[RankLog, ...] = ()  # of the culprits: their last lines
