"""What a set of RAS reports says. Data only.

RAS alone is never conclusive: it counts what was launched, not what finished, and says OK of jobs that hang
(NVIDIA/nccl#1730). That crossed counters mean different collectives is derived from how they are counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


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
Device = tuple[str, int, int | None]


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
    def device(self) -> Device | None:
        return None if self.host is None or self.pid is None else (self.host, self.pid, self.gpu)


@dataclass(frozen=True, slots=True)
class CommunicatorReading:
    identity: str
    size: int
    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]  # sets of which one is at fault: the counters cannot tell which
    confidence: float  # 0..1
    why: str
    alike: int = 1
    waiting: tuple[Device, ...] = ()  # those that wait in it for its suspects


@dataclass(frozen=True, slots=True)
class RasReading:
    finding: RasFinding
    suspects: tuple[RasSuspect, ...]
    tied: tuple[tuple[RasSuspect, ...], ...]
    confidence: float  # 0..1, that the finding holds and the suspects are the right ones
    why: str
    communicators: tuple[CommunicatorReading, ...] = ()  # those that matter first
    notes: tuple[str, ...] = ()  # what could not be had, or was mended
    sources: tuple[str, ...] = ()
