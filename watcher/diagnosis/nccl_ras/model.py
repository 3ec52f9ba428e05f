"""NCCL RAS: what one report says, and what is concluded from several reports. Data only.

NCCL's RAS subsystem (since 2.24; https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html)
counts, for each rank of a communicator, the operations of each kind that it has launched since the communicator was
created (src/ras/client_support.cc). What it cannot see:

- Counters are launches, not completions, and RAS reports OK for jobs that hang (NVIDIA/nccl#1730). So RAS alone is
never
  conclusive.
- Send and recv, all-to-all, gather, scatter, and operations captured in CUDA graphs are not counted.
- The text format names the ranks of small groups only, even if that group is the healthy one (NVIDIA/nccl#1911).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

# Text format: the process of the rank answers, but it does not know this communicator (any more).
LEFT_STATUSES: Final = ("NOCOMM", "UNKNOWN")


@dataclass(frozen=True, slots=True)
class RasRank:
    """One rank of one communicator. None: the report does not say."""

    rank: int  # within the communicator
    host: str | None
    pid: int | None
    gpu: int | None  # NVML index
    counts: Mapping[str, int] | None = None  # launches by kind of operation: {"AllReduce": 7}
    async_error: int = 0  # ncclResult: 0 is success, 7 in progress; -1: the text format gives an unknown phrase
    initialization_error: int = 0  # the same for its initialization
    finalizing: bool = False
    aborted: bool = False
    initializing: bool = False
    missing: bool = False  # RAS has no data from it
    unresponsive: bool = False
    dead: bool = False  # RAS has given up on its process


@dataclass(frozen=True, slots=True)
class RasLaunchCount:
    """Text format: how many ranks of a communicator have launched how many operations of one kind."""

    operation: str  # "AllReduce"; "collective" before NCCL 2.26, which counted all kinds together
    ranks: int
    launched: int
    named: tuple[int, ...] = ()  # the ranks, if this is one of the smaller groups


@dataclass(frozen=True, slots=True)
class RasStatusCount:
    """Text format: how many ranks of a communicator have this status, if their statuses differ."""

    status: str  # NOCOMM (UNKNOWN in older versions), INIT, RUNNING, FINALIZE, ABORT
    ranks: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    """One communicator in one report."""

    identity: str  # hash and secondary hash: the first one alone is not unique
    size: int  # 0: unknown (an excerpt in text format)
    ranks: tuple[RasRank, ...]  # those that answered, and the missing ones that the report names
    missing_count: int = 0  # 0 also if the report does not say
    state: str = ""  # text format: RUNNING, INIT, ...
    lines: tuple[str, ...] = ()  # text format: its error and warning lines
    identical_count: int = 1  # text format: this stands for so many healthy communicators, which it only counts
    counts: tuple[RasLaunchCount, ...] = ()  # text format: counts that differ between ranks
    statuses: tuple[RasStatusCount, ...] = ()  # text format: statuses that differ between ranks


@dataclass(frozen=True, slots=True)
class RasReport:
    """One answer of RAS."""

    source: str
    nccl_version: str | None
    communicators: tuple[RasCommunicator, ...]
    collected_seconds: float | None = None  # how long RAS took to collect it
    timeouts: int | None = None
    repaired: bool = False  # its JSON lacked a comma (NCCL 2.28.7 and 2.28.9)
    remarks: tuple[str, ...] = ()  # about the job as a whole, such as dead processes
    job_gpus: int | None = None  # text format: GPUs of the whole job
    problem: str | None = None  # why it could not be parsed, or not entirely


@dataclass(frozen=True, slots=True)
class RasPolls:
    """Reports of one node, oldest first. A hang is only visible between two of them."""

    node: str
    reports: tuple[RasReport, ...]
    interval_seconds: float | None = None  # between the reports
    problem: str | None = None  # why there is no report, or no second one


class RasFinding(StrEnum):
    """What is wrong with a communicator, or with the job."""

    DEAD = "dead"  # RAS has given up on a process after 60 s without contact; that is final
    FAILED = "failed"  # a rank reports an NCCL error
    PROGRESSING = "progressing"  # counters moved between two reports: the job runs, whatever the skew
    UNRESPONSIVE = "unresponsive"  # a process did not answer RAS: stopped, no CPU time, or its node is gone
    CROSSED = "crossed"  # some ranks launched other collectives than the rest
    BEHIND = "behind"  # no progress, and some ranks launched fewer operations
    LEAVING = "leaving"  # some ranks have finalized, aborted or left the communicator, others have not
    INITIALIZING = "initializing"
    MATCHED = "matched"  # no progress, and all ranks launched the same: network, GPU or host
    CANNOT_TELL = "cannot_tell"
    NO_COMMUNICATORS = "no_communicators"
    NO_REPORT = "no_report"


# Host, process, GPU (NVML index): the same in every communicator, unlike the rank. A process may have several GPUs.
RasDevice = tuple[str, int, int | None]


@dataclass(frozen=True, slots=True)
class RasSuspect:
    """One suspected rank, and where it runs. None: the report does not say."""

    rank: int  # within `communicator`
    communicator: str
    host: str | None
    pid: int | None
    gpu: int | None  # NVML index
    job_rank: int | None = None  # known if one communicator spans the job

    @property
    def device(self) -> RasDevice | None:
        """None: unknown."""
        return None if self.host is None or self.pid is None else (self.host, self.pid, self.gpu)


@dataclass(frozen=True, slots=True)
class CommunicatorAnalysis:
    """What is wrong with one communicator."""

    identity: str
    size: int
    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]  # sets of ranks of which one is at fault; the counters do not show which
    confidence: float  # 0..1
    why: str
    identical_count: int = 1
    waiting: tuple[RasDevice, ...] = ()  # ranks that wait in it for the suspects


@dataclass(frozen=True, slots=True)
class RasAnalysis:
    """What RAS says about the job as a whole."""

    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]
    confidence: float  # 0..1: that the finding holds and that the suspects are the right ones
    why: str
    communicators: tuple[CommunicatorAnalysis, ...] = ()  # most relevant first
    notes: tuple[str, ...] = ()  # what is missing, or had to be repaired
    sources: tuple[str, ...] = ()
