"""A diagnosis as plain values: what `diagnose --json` prints, the API returns and diagnosis.json holds. Pure.

Ranks in the same state share a row, so that the document of a thousand ranks stays readable. The keys are a public
contract; some are older than the names in `model.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.model import Diagnosis, GroupMember, GroupSlotStatus, MemberState, RankStacks, WaitEdge
from wattwatch.watcher.diagnosis.stacks.python_stacks import displayed_frames, format_frame

MAX_FRAMES: Final = 12


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    collectives = diagnosis.collectives
    return {
        "verdict": diagnosis.verdict.value,
        "conclusive": diagnosis.conclusive,
        "culprits": [culprit.rank for culprit in diagnosis.culprits],
        "confidence": round(diagnosis.confidence, 3),
        "step": diagnosis.step,
        "cause": diagnosis.cause.value,
        "summary": diagnosis.summary,
        "why": diagnosis.why,
        "advice": diagnosis.advice,
        "who": [{"rank": who.rank, "node": who.node, "gpu": who.gpu, "doing": who.doing} for who in diagnosis.culprits],
        "tied": [] if collectives is None else [list(ranks) for ranks in collectives.tied],
        "groups": [] if collectives is None else [group_document(group) for group in collectives.groups],
        "waits": [] if collectives is None else wait_documents(collectives.waits),
        "testimonies": [
            {"source": each.source, "agrees": each.agrees, "words": each.text} for each in diagnosis.signals
        ],
        "stacks": [stack_document(each) for each in diagnosis.stacks],
        "logs": [{"rank": log.rank, "source": log.source, "lines": list(log.lines)} for log in diagnosis.logs],
        "evidence": list(diagnosis.evidence),
        "missing": list(diagnosis.missing),
        "nothing_open": diagnosis.no_hang,
        "unread": [{"source": each.source, "rank": each.rank, "why": each.why} for each in diagnosis.unreadable],
    }


def group_document(group: GroupSlotStatus) -> dict[str, Any]:
    rows: dict[tuple[str, str | None, str | None], list[int]] = {}
    for member in group.members:
        rows.setdefault(member_row_key(member), []).append(member.rank)
    return {
        "group": str(group.group),
        "name": group.group.name,
        "size": len(group.group.members) or len(group.members),
        "slot": group.slot,
        "members": [
            {"place": place, "operation": operation, "line": line, "ranks": ranks}
            for (place, operation, line), ranks in rows.items()
        ],
    }


def member_row_key(member: GroupMember) -> tuple[str, str | None, str | None]:
    """State, operation and line: members with the same key share a row."""
    operation = None if member.operation is None else describe_operation(member.operation, sizes=True)
    line = None if member.frame is None else format_frame(member.frame)
    return member.state.value, operation, line


def wait_documents(waits: tuple[WaitEdge, ...]) -> list[dict[str, Any]]:
    """Who waits for whom, in which operation and why. Ranks that wait for the same ranks at one slot share a row."""
    # First by what is waited in, then by which ranks are awaited: 15 ranks that wait for rank 3 become one row.
    awaited: dict[tuple[str, int, str, str], dict[int, list[int]]] = {}
    for wait in waits:
        key = (str(wait.group), wait.slot, describe_operation(wait.operation), wait.why)
        awaited.setdefault(key, {}).setdefault(wait.rank, []).append(wait.awaited)
    found = []
    for (group, slot, operation, why), by_rank in awaited.items():
        by_awaited: dict[tuple[int, ...], list[int]] = {}
        for rank, others in by_rank.items():
            by_awaited.setdefault(tuple(sorted(others)), []).append(rank)
        found += [
            _wait_document(sorted(ranks), list(others), group, slot, operation, why)
            for others, ranks in by_awaited.items()
        ]
    return found


def _wait_document(
    ranks: list[int], awaited: list[int], group: str, slot: int, operation: str, why: str
) -> dict[str, Any]:
    return {"ranks": ranks, "awaited": awaited, "group": group, "slot": slot, "operation": operation, "why": why}


def waits_at_shared_slot(diagnosis: Diagnosis, culprits: frozenset[int]) -> list[dict[str, Any]]:
    """Rows like those of `wait_documents` for ranks that launched different operations at one slot.

    The wait-for graph has no edges for them, because each side waits for the other.
    """
    groups = () if diagnosis.collectives is None else diagnosis.collectives.groups
    group = next((each for each in groups if culprits & {member.rank for member in each.members}), None)
    if group is None:
        return []
    of_culprits: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for member in group.members:
        if member.operation is not None and (member.rank in culprits or member.state is MemberState.WAITING):
            side = of_culprits if member.rank in culprits else others
            side.setdefault(describe_operation(member.operation), []).append(member.rank)
    # Every pair of operations: the culprits may be in several, and so may the others.
    slot = str(group.group), group.slot
    return [
        _wait_document(ranks, awaited, *slot, operation, f"in {theirs} at the same sequence number")
        for operation, ranks in others.items()
        for theirs, awaited in of_culprits.items()
    ]


def culprits_first(waits: Sequence[Mapping[str, Any]], culprits: Collection[int]) -> list[Mapping[str, Any]]:
    """The rows of `wait_documents` in display order: waits for a culprit first, then by number of waiting ranks."""
    return sorted(waits, key=lambda row: (not {*culprits} & {*row["awaited"]}, -len(row["ranks"])))


def stack_document(stacks: RankStacks) -> Mapping[str, Any]:
    frames = displayed_frames(stacks)[:MAX_FRAMES]
    return {
        "rank": stacks.rank,
        "source": stacks.source,
        "frames": [{"function": each.function, "file": each.file, "line": each.line} for each in frames],
    }
