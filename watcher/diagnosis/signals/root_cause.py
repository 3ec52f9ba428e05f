"""What is to blame, from what the sources that agree take for the cause. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    DiagnosisVerdict,
    Evidence,
    HangCause,
    MemberState,
    nodes_by_rank,
)
from wattwatch.watcher.diagnosis.signals.combine import CombinedSignals
from wattwatch.watcher.diagnosis.signals.signal import (
    EXIT_REPORTS,
    FILE_SYSTEM,
    HEARTBEATS,
    KERNEL_LOG,
    LINKS,
    LOGS,
    NCCL_RAS,
    PROCESSES,
    REACHABILITY,
    STACKS,
    Signal,
)

# A board that the kernel gave up explains a stopped process, and that explains where its stack stands.
CLOSEST_TO_ROOT_CAUSE_FIRST: Final = (
    KERNEL_LOG,
    REACHABILITY,
    FILE_SYSTEM,
    LINKS,
    LOGS,
    PROCESSES,
    EXIT_REPORTS,
    HEARTBEATS,
    STACKS,
    NCCL_RAS,
)
SOURCES_WITHOUT_RANK: Final = (KERNEL_LOG, REACHABILITY, FILE_SYSTEM, LINKS, LOGS, PROCESSES)  # and be the cause still
PROGRAM_VERDICTS: Final = frozenset({DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH})


def find_root_cause(
    verdict: DiagnosisVerdict,
    weighed: CombinedSignals,
    witnesses: Sequence[Signal],
    reading: CollectiveAnalysis | None,
    evidence: Evidence,
) -> HangCause:
    told = {w.source: w.cause for w, yes in weighed.agrees if yes and w.cause is not None}
    if verdict in PROGRAM_VERDICTS:
        return HangCause.DATA if HangCause.DATA in told.values() else HangCause.PROGRAM
    if not weighed.ranks:
        return _cause_without_culprit(verdict, witnesses)
    found = next((told[source] for source in CLOSEST_TO_ROOT_CAUSE_FIRST if source in told), None)
    found = found or _cause_from_records(weighed.ranks, verdict, reading, evidence)
    if found in (HangCause.RANK, HangCause.UNKNOWN) and fully_named_nodes(weighed.ranks, evidence):
        return HangCause.HOST
    return found


def _cause_without_culprit(verdict: DiagnosisVerdict, witnesses: Sequence[Signal]) -> HangCause:
    """All ranks launched the same: something between them does not carry it. Faults that name no rank count here."""
    faults = {w.source: w.cause for w in witnesses if w.cause is not None}
    named = next((faults[source] for source in SOURCES_WITHOUT_RANK if source in faults), None)
    if named is not None:
        return named
    return HangCause.NETWORK if verdict is DiagnosisVerdict.NO_DESYNC else HangCause.UNKNOWN


def _cause_from_records(
    ranks: frozenset[int], verdict: DiagnosisVerdict, reading: CollectiveAnalysis | None, evidence: Evidence
) -> HangCause:
    if reading is None:
        return HangCause.UNKNOWN
    places = {member.place for group in reading.groups for member in group.members if member.rank in ranks}
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return HangCause.GPU  # it launched what all launched, and stands out from outside: its board does not run it
    if any(is_behind_its_group(reading, rank) for rank in ranks):
        return HangCause.GPU
    alive = {process.rank for process in evidence.processes if process.state is not None}
    # It left no record, its process lives: whatever keeps it from answering is in there.
    return HangCause.RANK if MemberState.SILENT in places or ranks <= alive else HangCause.UNKNOWN


def is_behind_its_group(reading: CollectiveAnalysis, rank: int) -> bool:
    """It is in an operation that others of the group have finished."""
    for group in reading.groups:
        places = {member.rank: member.place for member in group.members}
        if places.get(rank) is MemberState.WAITING and MemberState.AHEAD in places.values():
            return True
    return False


def fully_named_nodes(ranks: frozenset[int], evidence: Evidence) -> tuple[str, ...]:
    """The nodes of which all of at least two ranks are named, where that is all who are named."""
    of_node: dict[str, set[int]] = defaultdict(set)
    for rank, node in nodes_by_rank(evidence).items():
        of_node[node].add(rank)
    whole = tuple(sorted(node for node, held in of_node.items() if len(held) > 1 and held <= ranks))
    return whole if len(of_node) > 1 and ranks == {rank for node in whole for rank in of_node[node]} else ()
