"""What a text report has said so far: filled line by line, then made a report of."""

from __future__ import annotations

from dataclasses import dataclass, field

from watcher.diagnose.ras.report import RasCount, RasRank, RasStatus
from watcher.diagnose.ras.results import result_code

NOT_THERE = ("NOCOMM", "UNKNOWN")  # its process answers, and knows nothing of this communicator (any more)


@dataclass(slots=True)
class ProcessDraft:
    pid: int
    host: str
    gpus: tuple[int, ...]
    dead: bool


@dataclass(slots=True)
class RankDraft:
    number: int
    host: str | None = None
    pid: int | None = None
    gpu: int | None = None
    counts: dict[str, int] = field(default_factory=dict)
    status: str = ""
    async_error: int = 0
    initialization_error: int = 0
    missing: bool = False
    unresponsive: bool = False
    dead: bool = False

    def take_error(self, kind: str, text: str) -> None:
        if kind == "Initialization":
            self.initialization_error = result_code(text)
        else:
            self.async_error = result_code(text)

    def finish(self) -> RasRank:
        return RasRank(
            rank=self.number,
            host=self.host,
            pid=self.pid,
            gpu=self.gpu,
            counts=self.counts or None,
            async_error=self.async_error,
            initialization_error=self.initialization_error,
            finalizing=self.status == "FINALIZE",
            aborted=self.status == "ABORT",
            initializing=self.status == "INIT",
            missing=self.missing or self.status in NOT_THERE,
            unresponsive=self.unresponsive,
            dead=self.dead,
        )


@dataclass(slots=True)
class CommunicatorDraft:
    """One "#group-index (hash)"; it comes up once for each kind of trouble that it has."""

    identity: str
    kind: str = ""  # INCOMPLETE, ERROR, MISMATCH
    about: str = ""  # what its ranks differ in, or the kind of error: the lines below belong to it
    share: str | None = None  # the last "so many ranks have ..."
    missing_count: int = 0
    ranks: dict[int, RankDraft] = field(default_factory=dict)
    counts: list[RasCount] = field(default_factory=list)
    statuses: list[RasStatus] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def begin(self, kind: str) -> None:
        self.kind, self.about, self.share = kind, "", None

    def rank(self, number: int) -> RankDraft:
        return self.ranks.setdefault(number, RankDraft(number))

    def begin_count(self, launched: int, ranks: int) -> None:
        self.counts.append(RasCount(self.about or "collective", ranks, launched))

    def begin_status(self, status: str, ranks: int) -> None:
        self.statuses.append(RasStatus(status, ranks))

    def name_count(self, rank: RankDraft) -> None:
        if self.share is None or not self.counts:
            return
        last = self.counts[-1]
        rank.counts[last.operation] = last.launched
        self.counts[-1] = RasCount(last.operation, last.ranks, last.launched, (*last.named, rank.number))

    def name_status(self, rank: RankDraft) -> None:
        if self.share is None or not self.statuses:
            return
        last = self.statuses[-1]
        rank.status = last.status
        self.statuses[-1] = RasStatus(last.status, last.ranks, (*last.named, rank.number))


@dataclass(slots=True)
class ReportDraft:
    part: str = ""  # the heading that the lines belong to
    parts: set[str] = field(default_factory=set)
    detail: CommunicatorDraft | None = None
    nccl_version: str | None = None
    totals_follow: bool = False
    job_gpus: int | None = None
    collected_seconds: float | None = None
    none_collected: bool = False
    monitor: bool = False
    timeouts: int | None = None
    lost_processes: int = 0
    processes: list[ProcessDraft] = field(default_factory=list)
    groups: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)  # communicators, size, status, errors
    communicators: dict[tuple[int, int], CommunicatorDraft] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)

    def begin(self, part: str) -> None:
        self.part, self.detail = part, None
        self.parts.add(part)
