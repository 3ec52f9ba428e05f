"""RAS's text -> RasReport: whole reports, excerpts in documents, pastes in bug reports.

The layout is that of NCCL 2.24 to 2.30 (src/ras/client_support.cc). The text tells less than the JSON: healthy
communicators by their number only, counts only where they differ, and ranks only of the smaller groups.
"""

from __future__ import annotations

import re
from dataclasses import replace

from watcher.diagnose.ras.events import monitor_words, read_events
from watcher.diagnose.ras.report import RasReport
from watcher.diagnose.ras.text_draft import CommunicatorDraft, ProcessDraft, ReportDraft
from watcher.diagnose.ras.text_report import report_of

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
    report = report_of(draft, source)
    return replace(report, trouble=monitor_words(read_events(text))) if draft.monitor else report


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
    elif draft.part in ("INCOMPLETE", "DEAD", "TIMEOUT") and _read_whole(line, draft):
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


def _read_whole(line: str, draft: ReportDraft) -> bool:
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
