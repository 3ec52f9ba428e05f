"""What NCCL's RAS says of its communicators, from JSON or text, and two such reports side by side. Data only.

Counters are launches of each kind by each rank since the communicator was made (NCCL v2.30 src/ras/client_support.cc);
send and recv, all-to-all and what a CUDA graph captured are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class RasRank:
    """One rank of one communicator. None where the form (text) does not tell."""

    rank: int  # within the communicator
    host: str | None
    pid: int | None
    gpu: int | None  # NVML index
    counts: Mapping[str, int] | None = None  # "AllReduce" -> launches; None: not told
    async_error: int = 0  # ncclResult: 0 is ok, 7 in progress; -1: the text form gives a word that is not known
    initialization_error: int = 0  # the same, of its initialisation
    finalizing: bool = False
    aborted: bool = False
    initializing: bool = False
    missing: bool = False  # did not answer
    unresponsive: bool = False
    dead: bool = False


@dataclass(frozen=True, slots=True)
class RasLaunchCount:
    """Text form: so many ranks of a communicator have launched so many; it names those of the smaller groups only."""

    operation: str  # "AllReduce"; "collective" before NCCL 2.26, which counted all kinds as one
    ranks: int
    launched: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RasStatusCount:
    """Text form: so many ranks of a communicator have this status, where they differ."""

    status: str  # NOCOMM (UNKNOWN in older versions), INIT, RUNNING, FINALIZE, ABORT
    ranks: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    identity: str  # hash and secondary hash: hashes alone repeat
    size: int  # 0: not told (an excerpt of the text form)
    ranks: tuple[RasRank, ...]  # those that answered, and those missing that it can name
    missing_count: int = 0  # 0 where the report says so, or says nothing
    state: str = ""  # text form: RUNNING, INIT, ...
    words: tuple[str, ...] = ()  # text form: its error and warning lines
    alike: int = 1  # text form: communicators that this one stands for (it lists healthy ones by their number only)
    counts: tuple[RasLaunchCount, ...] = ()  # text form, where they differ
    statuses: tuple[RasStatusCount, ...] = ()  # text form, where they differ


@dataclass(frozen=True, slots=True)
class RasReport:
    """One answer."""

    source: str
    nccl_version: str | None
    communicators: tuple[RasCommunicator, ...]
    collected_seconds: float | None = None  # how long RAS took to collect it
    timeouts: int | None = None
    repaired: bool = False  # the JSON of 2.28.7 and 2.28.9 lacks a comma
    words: tuple[str, ...] = ()  # lines that say what is wrong as a whole, such as dead peers
    job_gpus: int | None = None  # text form: GPUs of the whole job
    trouble: str | None = None  # why it could not be read, or not whole


@dataclass(frozen=True, slots=True)
class RasPolls:
    """Reports of one node, oldest first; a hang can only be seen between two."""

    node: str
    reports: tuple[RasReport, ...]
    apart_seconds: float | None = None
    trouble: str | None = None  # why there is no report, or no second one


# What a set of RAS reports says. Data only.
#
# RAS alone is never conclusive: it counts what was launched, not what finished, and says OK of jobs that hang
# (NVIDIA/nccl#1730). That crossed counters mean different collectives is derived from how they are counted.


class RasFinding(StrEnum):
    DEAD = "dead"  # RAS gave a process up (60 s without a sign): for good
    FAILED = "failed"  # NCCL holds an error on some rank
    PROGRESSING = "progressing"  # counters moved between two reports: whatever the skew, it runs
    UNRESPONSIVE = "unresponsive"  # a process did not answer RAS: stopped, starved, or its node is gone
    CROSSED = "crossed"  # some ranks launched other collectives than the rest
    BEHIND = "behind"  # frozen, and some ranks launched fewer
    LEAVING = "leaving"  # some ranks finalised, aborted or left it, others did not
    INITIALIZING = "initializing"
    MATCHED = "matched"  # frozen, and all launched the same: network, GPU or host
    CANNOT_TELL = "cannot_tell"
    NO_COMMUNICATORS = "no_communicators"
    NO_REPORT = "no_report"


# Host, process, GPU by NVML: what is the same in every communicator; a process may hold several GPUs.
RasDevice = tuple[str, int, int | None]


@dataclass(frozen=True, slots=True)
class RasSuspect:
    """One rank, and where it is. None: not told."""

    rank: int  # within `communicator`
    communicator: str
    host: str | None
    pid: int | None
    gpu: int | None  # NVML index
    job_rank: int | None = None  # known where one communicator spans the job

    @property
    def device(self) -> RasDevice | None:
        return None if self.host is None or self.pid is None else (self.host, self.pid, self.gpu)


@dataclass(frozen=True, slots=True)
class CommunicatorAnalysis:
    identity: str
    size: int
    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]  # sets of which one is at fault: the counters cannot tell which
    confidence: float  # 0..1
    why: str
    alike: int = 1
    waiting: tuple[RasDevice, ...] = ()  # those that wait in it for its suspects


@dataclass(frozen=True, slots=True)
class RasAnalysis:
    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]
    confidence: float  # 0..1, that the finding holds and the suspects are the right ones
    why: str
    communicators: tuple[CommunicatorAnalysis, ...] = ()  # those that matter first
    notes: tuple[str, ...] = ()  # what could not be had, or was mended
    sources: tuple[str, ...] = ()
