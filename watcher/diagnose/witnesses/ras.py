"""What NCCL's RAS says, in ranks of the job. Pure."""

from __future__ import annotations

from typing import Final

from watcher.diagnose.diagnosis import Cause, DiagnosisVerdict
from watcher.diagnose.evidence import Evidence
from watcher.diagnose.known_ranks import known_ranks, nodes_of_ranks
from watcher.diagnose.ras.findings import RasFinding, RasReading, RasSuspect
from watcher.diagnose.witnesses.witness import RAS, Witness

VERDICTS: Final = {
    RasFinding.CROSSED: DiagnosisVerdict.DESYNC,
    RasFinding.BEHIND: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.LEAVING: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.DEAD: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.UNRESPONSIVE: DiagnosisVerdict.NEVER_ARRIVED,
    RasFinding.MATCHED: DiagnosisVerdict.NO_DESYNC,
}
CAUSES: Final = {
    RasFinding.CROSSED: Cause.PROGRAM,
    RasFinding.DEAD: Cause.RANK,
    RasFinding.UNRESPONSIVE: Cause.RANK,
    RasFinding.LEAVING: Cause.RANK,
    RasFinding.MATCHED: Cause.NETWORK,
}
DOING: Final = {
    RasFinding.CROSSED: "launched other collectives than the rest",
    RasFinding.BEHIND: "launched fewer collectives than the rest",
    RasFinding.DEAD: "was given up by NCCL: its process is gone or its node is",
    RasFinding.UNRESPONSIVE: "does not answer NCCL RAS",
    RasFinding.LEAVING: "left the communicator, others did not",
    RasFinding.FAILED: "holds an error of NCCL",
}


def of_ras(reading: RasReading, evidence: Evidence) -> Witness:
    ranks = {rank for suspect in reading.suspects if (rank := job_rank(suspect, reading, evidence)) is not None}
    finding = reading.finding
    doing = dict.fromkeys(ranks, DOING.get(finding, ""))
    clears = finding is RasFinding.MATCHED
    cause, saw = CAUSES.get(finding), known_ranks(evidence) if clears else frozenset[int]()
    if finding is RasFinding.PROGRESSING:
        return Witness(RAS, reading.why, weight=reading.confidence, denies=True)
    return Witness(RAS, reading.why, frozenset(ranks), reading.confidence, cause, doing, clears, saw=saw)


def job_rank(suspect: RasSuspect, reading: RasReading, evidence: Evidence) -> int | None:
    """RAS counts ranks within a communicator: the process, the board, or a communicator as large as the job tell."""
    if suspect.job_rank is not None:
        return suspect.job_rank
    if suspect.pid is not None:
        found = {process.rank for process in evidence.processes if process.pid == suspect.pid} - {None}
        if len(found) == 1:
            return found.pop()
    seen = evidence.seen_ranks
    board = [
        each.rank for each in seen if suspect.gpu is not None and (each.node, each.gpu) == (suspect.host, suspect.gpu)
    ]
    if len(board) == 1:
        return board[0]
    world = len(known_ranks(evidence))
    size = next((each.size for each in reading.communicators if each.identity == suspect.communicator), 0)
    largest = max((each.size for each in reading.communicators), default=0)
    return suspect.rank if size == (world or largest) else None


def hosts_of(reading: RasReading, evidence: Evidence) -> dict[int, str]:
    """Where RAS says that its suspects are, of those that nothing else places."""
    placed = nodes_of_ranks(evidence)
    return {
        rank: suspect.host
        for suspect in reading.suspects
        if suspect.host is not None
        and (rank := job_rank(suspect, reading, evidence)) is not None
        and rank not in placed
    }
