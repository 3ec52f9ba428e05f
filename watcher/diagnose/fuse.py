"""All evidence weighed together: `Evidence` -> `Diagnosis`. Pure; any part of the evidence may be missing.

The flight records decide where they are conclusive. Where they are not, or there are none, NCCL's RAS, the state of the
processes, how ranks ended, faults of nodes, stacks, heartbeats and power are weighed against each other
(`witnesses/weigh.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from watcher.diagnose.collectives.reading import read_collectives
from watcher.diagnose.diagnosis import Cause, CollectiveReading, Diagnosis, DiagnosisVerdict, Testimony
from watcher.diagnose.evidence import Evidence
from watcher.diagnose.known_ranks import known_ranks
from watcher.diagnose.next_step import advice_of
from watcher.diagnose.ras.findings import RasReading
from watcher.diagnose.ras.reading import read_ras
from watcher.diagnose.sentences import culprits_of, summary_of, why_of
from watcher.diagnose.traces.stack_lines import with_lines
from watcher.diagnose.witnesses.causes import cause_of
from watcher.diagnose.witnesses.faults import of_faults
from watcher.diagnose.witnesses.inside import of_endings, of_stacks
from watcher.diagnose.witnesses.logs import of_logs
from watcher.diagnose.witnesses.processes import of_processes
from watcher.diagnose.witnesses.ras import VERDICTS, hosts_of, of_ras
from watcher.diagnose.witnesses.ras_fit import with_fitting_ras
from watcher.diagnose.witnesses.watched import median_step, of_heartbeats, of_power
from watcher.diagnose.witnesses.weigh import Weighed, weigh
from watcher.diagnose.witnesses.witness import HEARTBEATS, POWER, PROCESSES, RECORDS, THROTTLING, Witness

STACKS_SHOWN: Final = 4  # of culprits
LOGS_SHOWN: Final = 2
OF_ABSENCE: Final = 0.25  # who left no record is not named for that, only where another source names it too
AT_WORK: Final = frozenset({"computing", "communicating", "completed", "unknown"})  # states that are no hang
FROM_OUTSIDE: Final = frozenset({POWER, HEARTBEATS, THROTTLING})


def diagnose(evidence: Evidence) -> Diagnosis:
    """Neither the order of files nor that of ranks changes the answer."""
    evidence = with_fitting_ras(in_order(evidence))
    reading = read_collectives(evidence.records, evidence.unread) if evidence.records else None
    ras = read_ras(evidence.ras) if evidence.ras else None
    witnesses = testify(evidence, reading, ras)
    weighed = weigh(witnesses, reading)
    if ras is not None:
        evidence = replace(evidence, node_of_rank=hosts_of(ras, evidence) | dict(evidence.node_of_rank))
    nothing_open = _nothing_open(evidence, reading, weighed, witnesses)
    verdict = verdict_of(weighed, reading, ras, nothing_open)
    cause = Cause.UNKNOWN if nothing_open else cause_of(verdict, weighed, witnesses, reading, evidence)
    culprits = culprits_of(weighed.ranks, evidence, witnesses, reading)
    step = _step(evidence)
    return Diagnosis(
        verdict=verdict,
        conclusive=reading is not None and reading.conclusive and bool(reading.culprits),
        cause=cause,
        culprits=culprits,
        confidence=round(weighed.confidence, 2) if culprits or verdict is not DiagnosisVerdict.UNKNOWN else 0.0,
        step=step,
        summary=summary_of(verdict, culprits, weighed, witnesses, reading, step, nothing_open),
        why=why_of(weighed, witnesses, reading),
        advice=advice_of(verdict, cause, culprits, evidence, nothing_open, ras, reading),
        testimonies=tuple(Testimony(witness.source, yes, witness.words) for witness, yes in weighed.agrees),
        reading=None if reading is None else with_lines(reading, evidence.stacks),
        evidence=_sources(evidence),
        missing=(*evidence.missing, *(ras.notes if ras is not None else ())),
        unread=evidence.unread,
        stacks=tuple(s for s in evidence.stacks if s.rank in weighed.ranks)[:STACKS_SHOWN],
        nothing_open=nothing_open,
        logs=tuple(log for log in evidence.logs if log.rank in weighed.ranks)[:LOGS_SHOWN],
    )


def in_order(evidence: Evidence) -> Evidence:
    """So that two words on one rank are always heard in the same order."""
    seen = evidence.seen
    if seen is not None:
        ranks = sorted(seen.ranks, key=lambda each: (each.rank, each.node, str(each.gpu)))
        seen = replace(seen, ranks=tuple(ranks), faults=tuple(sorted(seen.faults, key=repr)))
    return replace(
        evidence,
        stacks=tuple(sorted(evidence.stacks, key=lambda each: (each.rank, each.source))),
        processes=tuple(
            sorted(evidence.processes, key=lambda each: (str(each.rank), each.node, each.pid, str(each.state)))
        ),
        endings=tuple(sorted(evidence.endings, key=lambda each: (each.rank, each.source, each.code))),
        seen=seen,
        logs=tuple(sorted(evidence.logs, key=lambda each: (each.rank, each.source))),
    )


def testify(evidence: Evidence, reading: CollectiveReading | None, ras: RasReading | None) -> list[Witness]:
    """All that have something to say."""
    seen = evidence.seen
    heard = [
        of_records(reading) if reading is not None else None,
        of_ras(ras, evidence) if ras is not None else None,
        *of_faults(evidence),
        of_processes(evidence),
        of_logs(evidence),
        of_endings(evidence),
        of_stacks(evidence),
        of_heartbeats(seen) if seen is not None else None,
        of_power(seen) if seen is not None else None,
    ]
    return [witness for witness in heard if witness is not None]


def of_records(reading: CollectiveReading) -> Witness:
    if reading.absent:
        return Witness(RECORDS, reading.why, frozenset(reading.absent), OF_ABSENCE)
    joined = reading.verdict is DiagnosisVerdict.NO_DESYNC and bool(reading.groups)
    return Witness(RECORDS, reading.why, frozenset(reading.culprits), reading.confidence, clears=joined)


def verdict_of(
    weighed: Weighed, reading: CollectiveReading | None, ras: RasReading | None, nothing_open: bool
) -> DiagnosisVerdict:
    """The records', where they tell; else that of RAS; else what the state of a process means for its peers."""
    nobody_waits = reading is None or (reading.verdict is DiagnosisVerdict.NO_DESYNC and not reading.groups)
    if reading is not None and (nothing_open or not nobody_waits) and reading.verdict is not DiagnosisVerdict.UNKNOWN:
        return reading.verdict
    from_ras = None if ras is None else VERDICTS.get(ras.finding)
    if from_ras is not None:
        return from_ras
    printed = next((witness.verdict for witness, yes in weighed.agrees if yes and witness.verdict is not None), None)
    if printed is not None:
        return printed
    hard = any(yes and witness.source not in FROM_OUTSIDE for witness, yes in weighed.agrees)
    return DiagnosisVerdict.NEVER_ARRIVED if weighed.ranks and hard else DiagnosisVerdict.UNKNOWN


def _nothing_open(
    evidence: Evidence, reading: CollectiveReading | None, weighed: Weighed, witnesses: Sequence[Witness]
) -> bool:
    """Whole records of all ranks, nobody in a collective, and nothing else that speaks of a hang."""
    if any(witness.source == PROCESSES and witness.doing for witness in witnesses):
        return False
    if weighed.ranks or (evidence.seen is not None and evidence.seen.state not in AT_WORK):
        return False
    if reading is None and any(witness.denies for witness in witnesses):
        return True
    if reading is None:
        ended = {ending.rank for ending in evidence.endings if ending.code == 0}
        return bool(ended) and ended >= known_ranks(evidence)
    told = any(part.group.members for record in evidence.records for part in record.groups)
    whole = told and not evidence.unread and {record.rank for record in evidence.records} >= known_ranks(evidence)
    return whole and reading.verdict is DiagnosisVerdict.NO_DESYNC and not reading.groups


def _step(evidence: Evidence) -> int | None:
    if evidence.seen is not None and (step := median_step(evidence.seen)) is not None:
        return step
    return min((ending.step for ending in evidence.endings if ending.step is not None), default=None)


def _sources(evidence: Evidence) -> tuple[str, ...]:
    named = {
        *(record.source for record in evidence.records),
        *(stacks.source for stacks in evidence.stacks),
        *(process.source for process in evidence.processes),
        *(ending.source for ending in evidence.endings),
        *(log.source for log in evidence.logs),
        *(report.source for polls in evidence.ras for report in polls.reports),
    }
    return evidence.sources or tuple(sorted(named - {""}))
