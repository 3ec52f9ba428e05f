"""What a text report has said so far: filled line by line, then made a report of."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from wattwatch.watcher.diagnosis.nccl_ras.model import (
    RasCommunicator,
    RasLaunchCount,
    RasRank,
    RasReport,
    RasStatusCount,
)
from wattwatch.watcher.diagnosis.nccl_ras.monitor_events import describe_monitor_events, parse_monitor_events
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import result_code

LEFT_STATUSES = ("NOCOMM", "UNKNOWN")  # its process answers, and knows nothing of this communicator (any more)


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
            missing=self.missing or self.status in LEFT_STATUSES,
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
    counts: list[RasLaunchCount] = field(default_factory=list)
    statuses: list[RasStatusCount] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def begin(self, kind: str) -> None:
        self.kind, self.about, self.share = kind, "", None

    def rank(self, number: int) -> RankDraft:
        return self.ranks.setdefault(number, RankDraft(number))

    def begin_count(self, launched: int, ranks: int) -> None:
        self.counts.append(RasLaunchCount(self.about or "collective", ranks, launched))

    def begin_status(self, status: str, ranks: int) -> None:
        self.statuses.append(RasStatusCount(status, ranks))

    def name_count(self, rank: RankDraft) -> None:
        if self.share is None or not self.counts:
            return
        last = self.counts[-1]
        rank.counts[last.operation] = last.launched
        self.counts[-1] = RasLaunchCount(last.operation, last.ranks, last.launched, (*last.named, rank.number))

    def name_status(self, rank: RankDraft) -> None:
        if self.share is None or not self.statuses:
            return
        last = self.statuses[-1]
        rank.status = last.status
        self.statuses[-1] = RasStatusCount(last.status, last.ranks, (*last.named, rank.number))


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


# RAS's text -> RasReport: whole reports, excerpts in documents, pastes in bug reports.
#
# The layout is that of NCCL 2.24 to 2.30 (src/ras/client_support.cc). The text tells less than the JSON: healthy
# communicators by their number only, counts only where they differ, and ranks only of the smaller groups.

_NUMBER = r"(\d{1,18})"
_VERSION = re.compile(r"NCCL version (\S{1,60})")
_COLLECTED = re.compile(r"Communicators\.\.\.(?: \((\d{1,9}(?:\.\d{1,9})?)s\))?")
_GROUP = re.compile(
    rf"{_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+\d{{1,9}}(?:-\d{{1,9}})?\s+{_NUMBER}\s+{_NUMBER}\s+([A-Z]+)\s+([A-Z,]+)"
)
_TOTALS = re.compile(r"\d{1,9}(?:\s+\d{1,9}){2,4}")
_HEADING = re.compile(r"(Job summary|Errors|Warnings|INCOMPLETE|DEAD|TIMEOUT)")
_DETAIL = re.compile(rf"#{_NUMBER}-{_NUMBER} \(([0-9a-fA-F]{{1,16}})\) ([A-Z]+)")
_PROCESSES = re.compile(rf"Missing communicator data from {_NUMBER} job process(?:es)?")
_DEAD = re.compile(rf"{_NUMBER} job process(?:es are| is) considered dead.*")
_PROCESS = re.compile(
    rf"Process {_NUMBER} on node (\S+) managing GPUs? ([\d,]{{1,200}})(?: \(NVML ([\d,]{{1,200}})\))?"
)
_TIMEOUTS = re.compile(rf"Encountered {_NUMBER} communication timeouts?.*")
_MISSING = re.compile(rf"Missing communicator data from {_NUMBER} ranks?")
_MISSING_RANKS = re.compile(r"The missing ranks?: (\d{1,9}(?:, ?\d{1,9})*)")
_DIFFERENT = re.compile(r"Communicator ranks have different (?:(status)|(?:(\w+) )?operation counts)")
_ERRORS = re.compile(rf"(Initialization|Asynchronous) errors? on {_NUMBER} ranks?")
_SHARE = re.compile(rf"{_NUMBER} ranks (have|reported) (.+)")
_RANK = re.compile(
    rf"Rank {_NUMBER}(?: (has|reported) (.+?))? -- "
    rf"(?:GPU {_NUMBER}(?: \(NVML {_NUMBER}\))? managed by process {_NUMBER} on node (\S+)|\[process .*)"
)
_LAUNCHED = re.compile(rf"launched up to operation {_NUMBER}|(not launched any operations)")
_STATUS = re.compile(r"status (\w+)")
_MONITOR = re.compile(r"(?:\[.{19}\] PEER_\w+:|RAS Monitor Mode)")


def parse_text(text: str, source: str) -> RasReport:
    """Never raises: lines that it does not know are left aside, and what makes no report is said in `trouble`."""
    draft = ReportDraft()
    for raw in text.splitlines():
        line = raw.strip()
        if line:
            _read_line(line, draft)
    report = build_report(draft, source)
    return replace(report, trouble=describe_monitor_events(parse_monitor_events(text))) if draft.monitor else report


def _read_line(line: str, draft: ReportDraft) -> None:
    if line.startswith("#") and (found := _DETAIL.fullmatch(line)):
        _begin_detail(found, draft)
    elif found := _HEADING.fullmatch(line):
        draft.begin(found[1])
    elif draft.detail is not None:
        _read_detail(line, draft, draft.detail)
    elif draft.part == "Job summary" and _TOTALS.fullmatch(line):
        if draft.totals_follow:
            draft.job_gpus = int(line.split()[-1])
    elif draft.part in ("INCOMPLETE", "DEAD", "TIMEOUT") and _read_job_line(line, draft):
        draft.words.append(line)
    else:
        _read_table(line, draft)


def _read_table(line: str, draft: ReportDraft) -> None:
    """The head of the report, and its table of groups of communicators."""
    if found := _GROUP.fullmatch(line):
        group, communicators, _, size, _, status, errors = found.groups()
        draft.groups[int(group)] = (int(communicators), int(size), status, errors)
    elif line.startswith("(total)"):
        draft.totals_follow = True
    elif found := _COLLECTED.match(line):
        draft.begin("Communicators")
        draft.collected_seconds = float(found[1]) if found[1] else None
    elif found := _VERSION.match(line):
        draft.nccl_version = found[1]
    elif line == "No communicator data collected!":
        draft.none_collected = True
    elif _MONITOR.match(line):
        draft.monitor = True


def _read_job_line(line: str, draft: ReportDraft) -> bool:
    """A line on the whole job: its processes, and timeouts. False where it is none of these."""
    if found := _PROCESS.match(line):
        gpus = [int(gpu) for gpu in (found[4] or found[3]).split(",") if gpu and len(gpu) < 10]
        process = ProcessDraft(int(found[1]), found[2], tuple(gpus), dead=draft.part == "DEAD")
        draft.processes.append(process)
    elif found := _TIMEOUTS.fullmatch(line):
        draft.timeouts = int(found[1])
    elif (found := _PROCESSES.fullmatch(line)) or (found := _DEAD.fullmatch(line)):
        draft.lost_processes += int(found[1])
    else:
        return False
    return True


def _begin_detail(found: re.Match[str], draft: ReportDraft) -> None:
    key = (int(found[1]), int(found[2]))
    draft.detail = draft.communicators.setdefault(key, CommunicatorDraft(f"0x{int(found[3], 16):x}"))
    draft.detail.begin(found[4])
    draft.detail.words.append(found[4])


def _read_detail(line: str, draft: ReportDraft, detail: CommunicatorDraft) -> None:
    """A line below "#0-0 (hash) KIND"."""
    if found := _RANK.match(line):
        _read_rank(found, detail)
    elif found := _SHARE.fullmatch(line):
        _begin_share(int(found[1]), found[3], detail)
    elif found := _DIFFERENT.fullmatch(line):
        detail.about = "status" if found[1] else (found[2] or "collective")
        detail.share = None
    elif found := _MISSING.fullmatch(line):
        detail.missing_count = int(found[1])
    elif found := _MISSING_RANKS.fullmatch(line):
        for rank in found[1].split(","):
            detail.rank(int(rank)).missing = True
    elif found := _ERRORS.fullmatch(line):
        detail.about, detail.share = found[1], None
    else:
        if not line.startswith(("[...]", "```")):
            _read_table(line, draft)
        return
    detail.words.append(line)


def _begin_share(ranks: int, what: str, detail: CommunicatorDraft) -> None:
    """So many ranks have one count, one status or one error; the lines below may name them."""
    detail.share = what
    if detail.about == "status" and (found := _STATUS.fullmatch(what)):
        detail.begin_status(found[1], ranks)
    elif found := _LAUNCHED.fullmatch(what):
        detail.begin_count(int(found[1] or 0), ranks)


def _read_rank(found: re.Match[str], detail: CommunicatorDraft) -> None:
    number, verb, what, cuda_gpu, nvml_gpu, pid, host = found.groups()
    rank = detail.rank(int(number))
    if pid is not None:
        rank.pid, rank.host, rank.gpu = int(pid), host, int(nvml_gpu or cuda_gpu)
    if verb is not None:
        _begin_share(1, what, detail)
    if detail.kind == "INCOMPLETE":
        rank.missing = True
    elif detail.kind == "ERROR":
        rank.take_error(detail.about, detail.share or "")
    elif detail.about == "status":
        detail.name_status(rank)
    else:
        detail.name_count(rank)


# A finished draft of a text report -> RasReport.


def build_report(draft: ReportDraft, source: str) -> RasReport:
    for communicator in draft.communicators.values():
        _locate_missing_ranks(communicator, draft)
    return RasReport(
        source=source,
        nccl_version=draft.nccl_version,
        communicators=tuple(_communicators(draft)),
        collected_seconds=draft.collected_seconds,
        timeouts=draft.timeouts,
        words=tuple(draft.words),
        job_gpus=draft.job_gpus,
        trouble=_report_problem(draft),
    )


def _report_problem(draft: ReportDraft) -> str | None:
    if draft.nccl_version is not None and "Warnings" not in draft.parts:
        return "its text ends early: read as far as it goes"
    if not (draft.parts or draft.groups or draft.communicators):
        return "it is neither the JSON nor the text of a RAS report"
    if not (draft.groups or draft.communicators or draft.processes or draft.none_collected):
        return "it says nothing of communicators: an excerpt"
    return None


def _locate_missing_ranks(communicator: CommunicatorDraft, draft: ReportDraft) -> None:
    """Say of each missing rank whether its process is dead or silent, and where: the processes are listed elsewhere."""
    for rank in communicator.ranks.values():
        if not rank.missing:
            continue
        process = next((p for p in draft.processes if (p.pid, p.host) == (rank.pid, rank.host)), None)
        # Older versions give only the number: one lost process with one GPU and one missing rank are the same.
        if process is None and rank.pid is None and communicator.missing_count == draft.lost_processes == 1:
            process = draft.processes[0] if len(draft.processes) == 1 else None
        if process is not None:
            rank.pid, rank.host, rank.dead = process.pid, process.host, process.dead
            if rank.gpu is None and len(process.gpus) == 1:
                rank.gpu = process.gpus[0]
        rank.unresponsive = not rank.dead


def _communicators(draft: ReportDraft) -> Iterator[RasCommunicator]:
    seen: Counter[str] = Counter()
    for (group, _), communicator in sorted(draft.communicators.items()):
        _, size, status, _ = draft.groups.get(group, (1, _size(communicator), "", ""))
        seen[communicator.identity] += 1
        again = seen[communicator.identity]
        gone = sum(status.ranks for status in communicator.statuses if status.status in LEFT_STATUSES)
        yield RasCommunicator(
            identity=communicator.identity if again == 1 else f"{communicator.identity} ({again})",
            size=size,
            ranks=tuple(rank.finish() for _, rank in sorted(communicator.ranks.items())),
            missing_count=communicator.missing_count + gone,
            state=status,
            words=tuple(communicator.words),
            counts=tuple(communicator.counts),
            statuses=tuple(communicator.statuses),
        )
    for group, (number, size, status, errors) in sorted(draft.groups.items()):
        detailed = sum(1 for key in draft.communicators if key[0] == group)
        if number > detailed:
            words = () if errors == "OK" else (errors,)
            identity = f"group {group}"
            yield RasCommunicator(identity, size, (), state=status, words=words, alike=number - detailed)


def _size(communicator: CommunicatorDraft) -> int:
    """Of a communicator whose group is not in the excerpt: all its ranks are counted where they differ."""
    totals: Counter[str] = Counter()
    for count in communicator.counts:
        totals[count.operation] += count.ranks
    totals["status"] = sum(status.ranks for status in communicator.statuses)
    return max(totals.values())
