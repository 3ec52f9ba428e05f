"""All that a diagnosis may rest on, from whatever source. Data only; every part may be missing.

Read from a directory by `directory/`: one that `capture/` filled from a live job, or anybody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from watcher.diagnose.flight.record import RankRecord, Unread
from watcher.diagnose.ras.report import RasPolls


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
class RankEnding:
    """How a rank ended, as it says itself. A rank that was killed says nothing."""

    rank: int
    code: int
    why: str
    step: int | None = None
    follows: bool = False  # it may well be that another rank's end was the cause
    source: str = ""


@dataclass(frozen=True, slots=True)
class LogFailure:
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
    failure: LogFailure | None = None
    age_seconds: float | None = None  # since it was written to, as the capture came; None: not known


@dataclass(frozen=True, slots=True)
class RankSeen:
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
class Seen:
    """The job from outside at the moment of the capture: power, progress, faults."""

    job: str
    wall_seconds: float
    state: str  # of the job: "hung", "checkpointing"
    shape: str  # over the ranks: "one_low_rest_busy"
    step: int | None
    ranks: tuple[RankSeen, ...]
    suspects: tuple[int, ...] = ()  # ranks that stand out by power and utilisation, or by their step
    at_floor: bool = False
    faults: tuple[Fault, ...] = ()


@dataclass(frozen=True, slots=True)
class Fault:
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
    unread: tuple[Unread, ...] = ()
    stacks: tuple[RankStacks, ...] = ()
    processes: tuple[RankProcess, ...] = ()
    ras: tuple[RasPolls, ...] = ()
    seen: Seen | None = None
    endings: tuple[RankEnding, ...] = ()
    node_of_rank: Mapping[int, str] = field(default_factory=dict)
    sources: tuple[str, ...] = ()  # files that something was read from
    missing: tuple[str, ...] = ()
    logs: tuple[RankLog, ...] = ()  # of ranks that are gone or did not answer

    @property
    def seen_ranks(self) -> tuple[RankSeen, ...]:
        """() where nobody looked from outside."""
        return () if self.seen is None else self.seen.ranks
