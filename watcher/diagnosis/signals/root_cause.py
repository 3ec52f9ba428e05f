"""What is to blame: the GPU, the host, storage, the network, the data or the program. Pure.

Decided from the causes that the agreeing signals point to; where they point to several, the one closest to the root
wins.
"""

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

# A GPU that the kernel reports as lost explains a stopped process, and the stopped process explains its stack.
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
# A link or a file system can be the cause although it is not tied to a rank.
SOURCES_WITHOUT_RANK: Final = (KERNEL_LOG, REACHABILITY, FILE_SYSTEM, LINKS, LOGS, PROCESSES)
PROGRAM_VERDICTS: Final = frozenset({DiagnosisVerdict.DESYNC, DiagnosisVerdict.MISMATCH})


def find_root_cause(
    verdict: DiagnosisVerdict,
    combined: CombinedSignals,
    signals: Sequence[Signal],
    collectives: CollectiveAnalysis | None,
    evidence: Evidence,
) -> HangCause:
    causes = {s.source: s.cause for s, yes in combined.agrees if yes and s.cause is not None}
    if verdict in PROGRAM_VERDICTS:
        # Ranks that run out of data early leave the loop and launch other collectives: the data is the cause, not the
        # code (arXiv 2608.05944, the 16-rank hang at the epoch-end save).
        return HangCause.DATA if HangCause.DATA in causes.values() else HangCause.PROGRAM
    if not combined.ranks:
        return _cause_without_culprit(verdict, signals)
    found = next((causes[source] for source in CLOSEST_TO_ROOT_CAUSE_FIRST if source in causes), None)
    found = found or _cause_from_records(combined.ranks, verdict, collectives, evidence)
    if found in (HangCause.RANK, HangCause.UNKNOWN) and fully_named_nodes(combined.ranks, evidence):
        return HangCause.HOST
    return found


def _cause_without_culprit(verdict: DiagnosisVerdict, signals: Sequence[Signal]) -> HangCause:
    causes = {signal.source: signal.cause for signal in signals if signal.cause is not None}
    reported = next((causes[source] for source in SOURCES_WITHOUT_RANK if source in causes), None)
    if reported is not None:
        return reported
    # All ranks launched the same operation, and it does not complete: what connects them is left.
    return HangCause.NETWORK if verdict is DiagnosisVerdict.NO_DESYNC else HangCause.UNKNOWN


def _cause_from_records(
    ranks: frozenset[int], verdict: DiagnosisVerdict, collectives: CollectiveAnalysis | None, evidence: Evidence
) -> HangCause:
    if collectives is None:
        return HangCause.UNKNOWN
    if verdict is DiagnosisVerdict.NO_DESYNC:
        # The rank launched what all launched, yet it differs from outside: its GPU does not execute it.
        return HangCause.GPU
    if any(is_behind_its_group(collectives, rank) for rank in ranks):
        return HangCause.GPU
    states = {member.state for group in collectives.groups for member in group.members if member.rank in ranks}
    alive = {process.rank for process in evidence.processes if process.state is not None}
    # A live process that left no record: whatever keeps it from answering is inside the process.
    return HangCause.RANK if MemberState.SILENT in states or ranks <= alive else HangCause.UNKNOWN


def is_behind_its_group(collectives: CollectiveAnalysis, rank: int) -> bool:
    """Whether the rank is still in an operation that other members of the group have finished."""
    for group in collectives.groups:
        states = {member.rank: member.state for member in group.members}
        if states.get(rank) is MemberState.WAITING and MemberState.AHEAD in states.values():
            return True
    return False


def fully_named_nodes(ranks: frozenset[int], evidence: Evidence) -> tuple[str, ...]:
    """The nodes whose ranks are all in `ranks`, sorted. Empty unless these nodes account for every one of `ranks`.

    Nodes with a single rank do not count, nor does a job on one node: there a rank and its node cannot be told apart.
    """
    ranks_of_node: dict[str, set[int]] = defaultdict(set)
    for rank, node in nodes_by_rank(evidence).items():
        ranks_of_node[node].add(rank)
    full = tuple(sorted(node for node, held in ranks_of_node.items() if len(held) > 1 and held <= ranks))
    accounted = {rank for node in full for rank in ranks_of_node[node]}
    return full if len(ranks_of_node) > 1 and ranks == accounted else ()
