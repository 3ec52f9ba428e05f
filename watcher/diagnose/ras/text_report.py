"""A finished draft of a text report -> RasReport."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from watcher.diagnose.ras.report import RasCommunicator, RasReport
from watcher.diagnose.ras.text_draft import NOT_THERE, CommunicatorDraft, ReportDraft


def report_of(draft: ReportDraft, source: str) -> RasReport:
    for communicator in draft.communicators.values():
        _place_missing(communicator, draft)
    return RasReport(
        source=source,
        nccl_version=draft.nccl_version,
        communicators=tuple(_communicators(draft)),
        collected_seconds=draft.collected_seconds,
        timeouts=draft.timeouts,
        words=tuple(draft.words),
        job_gpus=draft.job_gpus,
        trouble=_trouble(draft),
    )


def _trouble(draft: ReportDraft) -> str | None:
    if draft.nccl_version is not None and "Warnings" not in draft.parts:
        return "its text ends early: read as far as it goes"
    if not (draft.parts or draft.groups or draft.communicators):
        return "it is neither the JSON nor the text of a RAS report"
    if not (draft.groups or draft.communicators or draft.processes or draft.none_collected):
        return "it says nothing of communicators: an excerpt"
    return None


def _place_missing(communicator: CommunicatorDraft, draft: ReportDraft) -> None:
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
        gone = sum(status.ranks for status in communicator.statuses if status.status in NOT_THERE)
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
