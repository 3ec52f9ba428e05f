"""What is to blame, from what the sources that agree take for the cause. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from watcher.diagnose.diagnosis import Cause, CollectiveReading, DiagnosisVerdict, Place
from watcher.diagnose.evidence import Evidence
from watcher.diagnose.known_ranks import nodes_of_ranks
from watcher.diagnose.witnesses.weigh import Weighed
from watcher.diagnose.witnesses.witness import (
    ENDINGS,
    FILE_SYSTEM,
    HEARTBEATS,
    KERNEL_LOG,
    LINKS,
    LOGS,
    PROCESSES,
    RAS,
    REACHABILITY,
    STACKS,
    Witness,
)

# A board that the kernel gave up explains a stopped process, and that explains where its stack stands.
NEAREST_TO_THE_ROOT: Final = (
    KERNEL_LOG,
    REACHABILITY,
    FILE_SYSTEM,
    LINKS,
    LOGS,
    PROCESSES,
    ENDINGS,
    HEARTBEATS,
    STACKS,
    RAS,
)
MAY_NAME_NOBODY: Final = (KERNEL_LOG, REACHABILITY, FILE_SYSTEM, LINKS, LOGS, PROCESSES)  # and be the cause still
OF_THE_JOB: Final = frozenset({DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH})


def cause_of(
    verdict: DiagnosisVerdict,
    weighed: Weighed,
    witnesses: Sequence[Witness],
    reading: CollectiveReading | None,
    evidence: Evidence,
) -> Cause:
    told = {w.source: w.cause for w, yes in weighed.agrees if yes and w.cause is not None}
    if verdict in OF_THE_JOB:
        return Cause.DATA if Cause.DATA in told.values() else Cause.PROGRAM
    if not weighed.ranks:
        return _of_nobody(verdict, witnesses)
    found = next((told[source] for source in NEAREST_TO_THE_ROOT if source in told), None)
    found = found or _of_records(weighed.ranks, verdict, reading, evidence)
    if found in (Cause.RANK, Cause.UNKNOWN) and whole_nodes(weighed.ranks, evidence):
        return Cause.HOST
    return found


def _of_nobody(verdict: DiagnosisVerdict, witnesses: Sequence[Witness]) -> Cause:
    """All ranks launched the same: something between them does not carry it. Faults that name no rank count here."""
    faults = {w.source: w.cause for w in witnesses if w.cause is not None}
    named = next((faults[source] for source in MAY_NAME_NOBODY if source in faults), None)
    if named is not None:
        return named
    return Cause.NETWORK if verdict is DiagnosisVerdict.NO_DESYNC else Cause.UNKNOWN


def _of_records(
    ranks: frozenset[int], verdict: DiagnosisVerdict, reading: CollectiveReading | None, evidence: Evidence
) -> Cause:
    if reading is None:
        return Cause.UNKNOWN
    places = {member.place for group in reading.groups for member in group.members if member.rank in ranks}
    if verdict is DiagnosisVerdict.NO_DESYNC:
        return Cause.GPU  # it launched what all launched, and stands out from outside: its board does not run it
    if any(left_behind(reading, rank) for rank in ranks):
        return Cause.GPU
    alive = {process.rank for process in evidence.processes if process.state is not None}
    # It left no record, its process lives: whatever keeps it from answering is in there.
    return Cause.RANK if Place.SILENT in places or ranks <= alive else Cause.UNKNOWN


def left_behind(reading: CollectiveReading, rank: int) -> bool:
    """It is in an operation that others of the group have finished."""
    for group in reading.groups:
        places = {member.rank: member.place for member in group.members}
        if places.get(rank) is Place.WAITING and Place.AHEAD in places.values():
            return True
    return False


def whole_nodes(ranks: frozenset[int], evidence: Evidence) -> tuple[str, ...]:
    """The nodes of which all of at least two ranks are named, where that is all who are named."""
    of_node: dict[str, set[int]] = defaultdict(set)
    for rank, node in nodes_of_ranks(evidence).items():
        of_node[node].add(rank)
    whole = tuple(sorted(node for node, held in of_node.items() if len(held) > 1 and held <= ranks))
    return whole if len(of_node) > 1 and ranks == {rank for node in whole for rank in of_node[node]} else ()
