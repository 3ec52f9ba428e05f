"""A diagnosis as a plain document: what `diagnose --json` prints, the API answers and diagnosis.json holds. Pure.

Ranks that stand alike are one row, so that the document of a thousand ranks stays readable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from wattwatch.watcher.diagnosis.collectives.operations import describe_operation
from wattwatch.watcher.diagnosis.model import Diagnosis, GroupMember, GroupSlotStatus, MemberState, RankStacks, WaitEdge
from wattwatch.watcher.diagnosis.stacks.python_stacks import displayed_frames, format_frame

MAX_FRAMES: Final = 12


def diagnosis_document(diagnosis: Diagnosis) -> dict[str, Any]:
    """Plain values only."""
    reading = diagnosis.reading
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
        "tied": [] if reading is None else [list(ranks) for ranks in reading.tied],
        "groups": [] if reading is None else [group_document(group) for group in reading.groups],
        "waits": [] if reading is None else wait_documents(reading.waits),
        "testimonies": [
            {"source": each.source, "agrees": each.agrees, "words": each.words} for each in diagnosis.testimonies
        ],
        "stacks": [stack_document(each) for each in diagnosis.stacks],
        "logs": [{"rank": log.rank, "source": log.source, "lines": list(log.lines)} for log in diagnosis.logs],
        "evidence": list(diagnosis.evidence),
        "missing": list(diagnosis.missing),
        "nothing_open": diagnosis.nothing_open,
        "unread": [{"source": each.source, "rank": each.rank, "why": each.why} for each in diagnosis.unread],
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
    """Members with the same three stand in the same place."""
    operation = None if member.operation is None else describe_operation(member.operation, sizes=True)
    line = None if member.frame is None else format_frame(member.frame)
    return member.place.value, operation, line


def wait_documents(waits: tuple[WaitEdge, ...]) -> list[dict[str, Any]]:
    """Who waits for whom, in what and why; those that wait for the same ranks in the same slot together."""
    awaited: dict[tuple[str, int, str, str], dict[int, list[int]]] = {}
    for wait in waits:
        key = (str(wait.group), wait.slot, describe_operation(wait.operation), wait.why)
        awaited.setdefault(key, {}).setdefault(wait.rank, []).append(wait.awaited)
    found = []
    for (group, slot, operation, why), by_rank in awaited.items():
        together: dict[tuple[int, ...], list[int]] = {}
        for rank, others in by_rank.items():
            together.setdefault(tuple(sorted(others)), []).append(rank)
        found += [
            _wait_document(sorted(ranks), list(others), group, slot, operation, why)
            for others, ranks in together.items()
        ]
    return found


def _wait_document(
    ranks: list[int], awaited: list[int], group: str, slot: int, operation: str, why: str
) -> dict[str, Any]:
    return {"ranks": ranks, "awaited": awaited, "group": group, "slot": slot, "operation": operation, "why": why}


def waits_at_shared_slot(diagnosis: Diagnosis, culprits: frozenset[int]) -> list[dict[str, Any]]:
    """Where ranks met at one slot in different operations, each waits for the others: there is no edge to draw."""
    groups = () if diagnosis.reading is None else diagnosis.reading.groups
    group = next((each for each in groups if culprits & {member.rank for member in each.members}), None)
    if group is None:
        return []
    held: dict[str, list[int]] = {}
    others: dict[str, list[int]] = {}
    for member in group.members:
        if member.operation is not None and (member.rank in culprits or member.place is MemberState.WAITING):
            side = held if member.rank in culprits else others
            side.setdefault(describe_operation(member.operation), []).append(member.rank)
    slot = str(group.group), group.slot
    return [
        _wait_document(ranks, awaited, *slot, operation, f"in {theirs} at the same slot")
        for operation, ranks in others.items()
        for theirs, awaited in held.items()
    ]


def culprits_first(waits: Sequence[Mapping[str, Any]], culprits: Collection[int]) -> list[Mapping[str, Any]]:
    """Who waits for a culprit, then the most ranks: the order in which people are shown `wait_documents`."""
    return sorted(waits, key=lambda row: (not {*culprits} & {*row["awaited"]}, -len(row["ranks"])))


def stack_document(stacks: RankStacks) -> Mapping[str, Any]:
    frames = displayed_frames(stacks)[:MAX_FRAMES]
    return {
        "rank": stacks.rank,
        "source": stacks.source,
        "frames": [{"function": each.function, "file": each.file, "line": each.line} for each in frames],
    }
