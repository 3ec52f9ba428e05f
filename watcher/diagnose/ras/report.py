"""What NCCL's RAS says of its communicators, from JSON or text, and two such reports side by side. Data only.

Counters are launches of each kind by each rank since the communicator was made (NCCL v2.30 src/ras/client_support.cc);
send and recv, all-to-all and what a CUDA graph captured are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


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
class RasCount:
    """Text form: so many ranks of a communicator have launched so many; it names those of the smaller groups only."""

    operation: str  # "AllReduce"; "collective" before NCCL 2.26, which counted all kinds as one
    ranks: int
    launched: int
    named: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RasStatus:
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
    counts: tuple[RasCount, ...] = ()  # text form, where they differ
    statuses: tuple[RasStatus, ...] = ()  # text form, where they differ


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
