"""RAS's text format to a RasReport: whole reports, excerpts in documents, pastes in bug reports.

The layout is that of NCCL 2.24 to 2.30 (src/ras/client_support.cc). The text contains less than the JSON: it only
counts healthy communicators, gives counts only if they differ, and names only the ranks of the smaller groups. Its
lines first fill a draft, because what belongs together is spread over several sections of the report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from wattwatch.watcher.diagnosis.nccl_ras.model import (
    LEFT_STATUSES,
    RasCommunicator,
    RasLaunchCount,
    RasRank,
    RasReport,
    RasStatusCount,
)
from wattwatch.watcher.diagnosis.nccl_ras.monitor_events import describe_monitor_events, parse_monitor_events
from wattwatch.watcher.diagnosis.nccl_ras.nccl_results import result_code

# Repetition counts are bounded everywhere, so that hostile input cannot make a match expensive or a number huge.
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


@dataclass(slots=True)
class _ProcessDraft:
    pid: int
    host: str
    gpus: tuple[int, ...]
    dead: bool


@dataclass(slots=True)
class _RankDraft:
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

    def set_error(self, kind: str, text: str) -> None:
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
class _CommunicatorDraft:
    """One "#group-index (hash)". It has one section for each kind of problem that it has."""

    identity: str
    kind: str = ""  # of the current section: INCOMPLETE, ERROR, MISMATCH
    about: str = ""  # what the following lines are about: "status", a kind of operation, a kind of error
    share: str | None = None  # the last "N ranks have ...", which the following ranks belong to
    missing_count: int = 0
    ranks: dict[int, _RankDraft] = field(default_factory=dict)
    counts: list[RasLaunchCount] = field(default_factory=list)
    statuses: list[RasStatusCount] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def begin_section(self, kind: str) -> None:
        self.kind, self.about, self.share = kind, "", None

    def rank(self, number: int) -> _RankDraft:
        return self.ranks.setdefault(number, _RankDraft(number))

    def begin_count(self, launched: int, ranks: int) -> None:
        self.counts.append(RasLaunchCount(self.about or "collective", ranks, launched))

    def begin_status(self, status: str, ranks: int) -> None:
        self.statuses.append(RasStatusCount(status, ranks))

    def add_rank_to_count(self, rank: _RankDraft) -> None:
        if self.share is None or not self.counts:
            return
        last = self.counts[-1]
        rank.counts[last.operation] = last.launched
        self.counts[-1] = RasLaunchCount(last.operation, last.ranks, last.launched, (*last.named, rank.number))

    def add_rank_to_status(self, rank: _RankDraft) -> None:
        if self.share is None or not self.statuses:
            return
        last = self.statuses[-1]
        rank.status = last.status
        self.statuses[-1] = RasStatusCount(last.status, last.ranks, (*last.named, rank.number))


@dataclass(slots=True)
class _ReportDraft:
    section: str = ""  # the current heading
    sections: set[str] = field(default_factory=set)
    detail: _CommunicatorDraft | None = None
    nccl_version: str | None = None
    totals_follow: bool = False
    job_gpus: int | None = None
    collected_seconds: float | None = None
    none_collected: bool = False
    monitor: bool = False
    timeouts: int | None = None
    lost_processes: int = 0
    processes: list[_ProcessDraft] = field(default_factory=list)
    groups: dict[int, tuple[int, int, str, str]] = field(default_factory=dict)  # communicators, size, status, errors
    communicators: dict[tuple[int, int], _CommunicatorDraft] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)

    def begin_section(self, heading: str) -> None:
        self.section, self.detail = heading, None
        self.sections.add(heading)


def parse_text(text: str, source: str) -> RasReport:
    """Unknown lines are ignored; `problem` says why the report is incomplete. Raises nothing for any text."""
    draft = _ReportDraft()
    for raw in text.splitlines():
        line = raw.strip()
        if line:
            _read_line(line, draft)
    report = _finish_report(draft, source)
    return replace(report, problem=describe_monitor_events(parse_monitor_events(text))) if draft.monitor else report


def _read_line(line: str, draft: _ReportDraft) -> None:
    if line.startswith("#") and (found := _DETAIL.fullmatch(line)):
        _begin_detail(found, draft)
    elif found := _HEADING.fullmatch(line):
        draft.begin_section(found[1])
    elif draft.detail is not None:
        _read_detail(line, draft, draft.detail)
    elif draft.section == "Job summary" and _TOTALS.fullmatch(line):
        if draft.totals_follow:
            draft.job_gpus = int(line.split()[-1])
    elif draft.section in ("INCOMPLETE", "DEAD", "TIMEOUT") and _read_job_line(line, draft):
        draft.remarks.append(f"RAS lists under {draft.section}: {line}")
    else:
        _read_table(line, draft)


def _read_table(line: str, draft: _ReportDraft) -> None:
    """A line of the head of the report, or of its table of groups of communicators."""
    if found := _GROUP.fullmatch(line):
        group, communicators, _, size, _, status, errors = found.groups()
        draft.groups[int(group)] = (int(communicators), int(size), status, errors)
    elif line.startswith("(total)"):
        draft.totals_follow = True
    elif found := _COLLECTED.match(line):
        draft.begin_section("Communicators")
        draft.collected_seconds = float(found[1]) if found[1] else None
    elif found := _VERSION.match(line):
        draft.nccl_version = found[1]
    elif line == "No communicator data collected!":
        draft.none_collected = True
    elif _MONITOR.match(line):
        draft.monitor = True


def _read_job_line(line: str, draft: _ReportDraft) -> bool:
    """A line about the whole job: its processes, and timeouts. False if it is something else."""
    if found := _PROCESS.match(line):
        gpus = [int(gpu) for gpu in (found[4] or found[3]).split(",") if gpu and len(gpu) < 10]
        process = _ProcessDraft(int(found[1]), found[2], tuple(gpus), dead=draft.section == "DEAD")
        draft.processes.append(process)
    elif found := _TIMEOUTS.fullmatch(line):
        draft.timeouts = int(found[1])
    elif (found := _PROCESSES.fullmatch(line)) or (found := _DEAD.fullmatch(line)):
        draft.lost_processes += int(found[1])
    else:
        return False
    return True


def _begin_detail(found: re.Match[str], draft: _ReportDraft) -> None:
    key = (int(found[1]), int(found[2]))
    draft.detail = draft.communicators.setdefault(key, _CommunicatorDraft(f"0x{int(found[3], 16):x}"))
    draft.detail.begin_section(found[4])
    draft.detail.lines.append(found[4])


def _read_detail(line: str, draft: _ReportDraft, detail: _CommunicatorDraft) -> None:
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
        # Marks of an excerpt or of a code block in a document; anything else may begin the next section.
        if not line.startswith(("[...]", "```")):
            _read_table(line, draft)
        return
    detail.lines.append(line)


def _begin_share(ranks: int, what: str, detail: _CommunicatorDraft) -> None:
    """N ranks have one count, one status or one error; the following lines may name them."""
    detail.share = what
    if detail.about == "status" and (found := _STATUS.fullmatch(what)):
        detail.begin_status(found[1], ranks)
    elif found := _LAUNCHED.fullmatch(what):
        detail.begin_count(int(found[1] or 0), ranks)


def _read_rank(found: re.Match[str], detail: _CommunicatorDraft) -> None:
    number, verb, what, cuda_gpu, nvml_gpu, pid, host = found.groups()
    rank = detail.rank(int(number))
    if pid is not None:
        rank.pid, rank.host, rank.gpu = int(pid), host, int(nvml_gpu or cuda_gpu)
    if verb is not None:
        _begin_share(1, what, detail)  # "Rank 5 has ..." is a share of one rank
    if detail.kind == "INCOMPLETE":
        rank.missing = True
    elif detail.kind == "ERROR":
        rank.set_error(detail.about, detail.share or "")
    elif detail.about == "status":
        detail.add_rank_to_status(rank)
    else:
        detail.add_rank_to_count(rank)


# From the finished draft to the report


def _finish_report(draft: _ReportDraft, source: str) -> RasReport:
    for communicator in draft.communicators.values():
        _locate_missing_ranks(communicator, draft)
    return RasReport(
        source=source,
        nccl_version=draft.nccl_version,
        communicators=tuple(_communicators(draft)),
        collected_seconds=draft.collected_seconds,
        timeouts=draft.timeouts,
        remarks=tuple(draft.remarks),
        job_gpus=draft.job_gpus,
        problem=_report_problem(draft),
    )


def _report_problem(draft: _ReportDraft) -> str | None:
    if draft.nccl_version is not None and "Warnings" not in draft.sections:
        return "the text is cut off; the part before that was used"
    if not (draft.sections or draft.groups or draft.communicators):
        return "this is not a RAS report in JSON or text format"
    if not (draft.groups or draft.communicators or draft.processes or draft.none_collected):
        return "this is an excerpt that contains no communicator"
    return None


def _locate_missing_ranks(communicator: _CommunicatorDraft, draft: _ReportDraft) -> None:
    """Set for each missing rank whether its process is dead or unresponsive, and where it is.

    The report lists processes in another section than ranks.
    """
    for rank in communicator.ranks.values():
        if not rank.missing:
            continue
        process = next((p for p in draft.processes if (p.pid, p.host) == (rank.pid, rank.host)), None)
        # Older versions only give the number of a rank. One lost process and one missing rank must belong together.
        if process is None and rank.pid is None and communicator.missing_count == draft.lost_processes == 1:
            process = draft.processes[0] if len(draft.processes) == 1 else None
        if process is not None:
            rank.pid, rank.host, rank.dead = process.pid, process.host, process.dead
            if rank.gpu is None and len(process.gpus) == 1:
                rank.gpu = process.gpus[0]
        rank.unresponsive = not rank.dead


def _communicators(draft: _ReportDraft) -> Iterator[RasCommunicator]:
    """Those with a section of their own, then, per group, the healthy ones that the report only counts."""
    seen: Counter[str] = Counter()
    for (group, _), communicator in sorted(draft.communicators.items()):
        _, size, status, _ = draft.groups.get(group, (1, _size(communicator), "", ""))
        seen[communicator.identity] += 1
        occurrence = seen[communicator.identity]
        left = sum(status.ranks for status in communicator.statuses if status.status in LEFT_STATUSES)
        yield RasCommunicator(
            identity=communicator.identity if occurrence == 1 else f"{communicator.identity} ({occurrence})",
            size=size,
            ranks=tuple(rank.finish() for _, rank in sorted(communicator.ranks.items())),
            missing_count=communicator.missing_count + left,
            state=status,
            lines=tuple(communicator.lines),
            counts=tuple(communicator.counts),
            statuses=tuple(communicator.statuses),
        )
    for group, (number, size, status, errors) in sorted(draft.groups.items()):
        detailed = sum(1 for key in draft.communicators if key[0] == group)
        if number > detailed:
            lines = () if errors == "OK" else (errors,)
            identity = f"group {group}"
            yield RasCommunicator(identity, size, (), state=status, lines=lines, identical_count=number - detailed)


def _size(communicator: _CommunicatorDraft) -> int:
    """The size of a communicator whose group is not in the excerpt: if ranks differ, the report counts all of them."""
    totals: Counter[str] = Counter()
    for count in communicator.counts:
        totals[count.operation] += count.ranks
    totals["status"] = sum(status.ranks for status in communicator.statuses)
    return max(totals.values())
