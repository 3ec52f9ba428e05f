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
    async_error: int = 0  # ncclResult: 0 is ok
    finalizing: bool = False
    aborted: bool = False
    initializing: bool = False
    missing: bool = False  # did not answer
    unresponsive: bool = False
    dead: bool = False


@dataclass(frozen=True, slots=True)
class RasCommunicator:
    identity: str  # hash and secondary hash: hashes alone repeat
    size: int
    ranks: tuple[RasRank, ...]  # those that answered, and those missing that it can name
    missing_count: int = 0  # 0 where the report says so, or says nothing
    state: str = ""  # text form: RUNNING, INIT, ...
    words: tuple[str, ...] = ()  # text form: its error and warning lines


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


@dataclass(frozen=True, slots=True)
class RasPolls:
    """Reports of one node, oldest first; a hang can only be seen between two."""

    node: str
    reports: tuple[RasReport, ...]
    apart_seconds: float | None = None
    trouble: str | None = None  # why there is no report, or no second one
