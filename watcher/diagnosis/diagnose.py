"""All evidence weighed together: `Evidence` -> `Diagnosis`. Pure; any part of the evidence may be missing.

The flight records decide where they are conclusive. Where they are not, or there are none, NCCL's RAS, the state of the
processes, how ranks ended, faults of nodes, stacks, heartbeats and power are weighed against each other
(`witnesses/weigh.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.model import (
    CollectiveAnalysis,
    Diagnosis,
    DiagnosisVerdict,
    Evidence,
    HangCause,
    SignalSummary,
    known_ranks,
)
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.model import RasAnalysis
from wattwatch.watcher.diagnosis.next_steps import recommend_next_step
from wattwatch.watcher.diagnosis.signals.combine import CombinedSignals, combine_signals
from wattwatch.watcher.diagnosis.signals.from_host import (
    fault_signals,
    heartbeats_signal,
    median_step,
    power_signal,
    processes_signal,
)
from wattwatch.watcher.diagnosis.signals.from_job import (
    RAS_VERDICTS,
    drop_foreign_ras_reports,
    exit_reports_signal,
    logs_signal,
    ras_signal,
    ras_suspect_hosts,
    stacks_signal,
)
from wattwatch.watcher.diagnosis.signals.root_cause import find_root_cause
from wattwatch.watcher.diagnosis.signals.signal import FLIGHT_RECORDER, HEARTBEATS, POWER, PROCESSES, THROTTLING, Signal
from wattwatch.watcher.diagnosis.stacks.activity import add_lines_from_stacks
from wattwatch.watcher.diagnosis.summary import describe_culprits, explain, summarize

MAX_STACKS: Final = 4  # of culprits
MAX_LOGS: Final = 2
ABSENT_RECORD_WEIGHT: Final = 0.25  # who left no record is not named for that, only where another source names it too
NOT_HUNG_STATES: Final = frozenset({"computing", "communicating", "completed", "unknown"})  # states that are no hang
EXTERNAL_SOURCES: Final = frozenset({POWER, HEARTBEATS, THROTTLING})


def diagnose(evidence: Evidence) -> Diagnosis:
    """Neither the order of files nor that of ranks changes the answer."""
    evidence = drop_foreign_ras_reports(sorted_evidence(evidence))
    reading = analyze_collectives(evidence.records, evidence.unread) if evidence.records else None
    ras = analyze_ras(evidence.ras) if evidence.ras else None
    witnesses = collect_signals(evidence, reading, ras)
    weighed = combine_signals(witnesses, reading)
    if ras is not None:
        evidence = replace(evidence, node_of_rank=ras_suspect_hosts(ras, evidence) | dict(evidence.node_of_rank))
    nothing_open = _no_open_collective(evidence, reading, weighed, witnesses)
    verdict = decide_verdict(weighed, reading, ras, nothing_open)
    cause = HangCause.UNKNOWN if nothing_open else find_root_cause(verdict, weighed, witnesses, reading, evidence)
    culprits = describe_culprits(weighed.ranks, evidence, witnesses, reading)
    step = _job_step(evidence)
    return Diagnosis(
        verdict=verdict,
        conclusive=reading is not None and reading.conclusive and bool(reading.culprits),
        cause=cause,
        culprits=culprits,
        confidence=round(weighed.confidence, 2) if culprits or verdict is not DiagnosisVerdict.UNKNOWN else 0.0,
        step=step,
        summary=summarize(verdict, culprits, weighed, witnesses, reading, step, nothing_open),
        why=explain(weighed, witnesses, reading),
        advice=recommend_next_step(verdict, cause, culprits, evidence, nothing_open, ras, reading),
        testimonies=tuple(SignalSummary(witness.source, yes, witness.words) for witness, yes in weighed.agrees),
        reading=None if reading is None else add_lines_from_stacks(reading, evidence.stacks),
        evidence=_source_files(evidence),
        missing=(*evidence.missing, *(ras.notes if ras is not None else ())),
        unread=evidence.unread,
        stacks=tuple(s for s in evidence.stacks if s.rank in weighed.ranks)[:MAX_STACKS],
        nothing_open=nothing_open,
        logs=tuple(log for log in evidence.logs if log.rank in weighed.ranks)[:MAX_LOGS],
    )


def sorted_evidence(evidence: Evidence) -> Evidence:
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


def collect_signals(evidence: Evidence, reading: CollectiveAnalysis | None, ras: RasAnalysis | None) -> list[Signal]:
    """All that have something to say."""
    seen = evidence.seen
    heard = [
        flight_record_signal(reading) if reading is not None else None,
        ras_signal(ras, evidence) if ras is not None else None,
        *fault_signals(evidence),
        processes_signal(evidence),
        logs_signal(evidence),
        exit_reports_signal(evidence),
        stacks_signal(evidence),
        heartbeats_signal(seen) if seen is not None else None,
        power_signal(seen) if seen is not None else None,
    ]
    return [witness for witness in heard if witness is not None]


def flight_record_signal(reading: CollectiveAnalysis) -> Signal:
    if reading.absent:
        return Signal(FLIGHT_RECORDER, reading.why, frozenset(reading.absent), ABSENT_RECORD_WEIGHT)
    joined = reading.verdict is DiagnosisVerdict.NO_DESYNC and bool(reading.groups)
    return Signal(FLIGHT_RECORDER, reading.why, frozenset(reading.culprits), reading.confidence, all_alike=joined)


def decide_verdict(
    weighed: CombinedSignals, reading: CollectiveAnalysis | None, ras: RasAnalysis | None, nothing_open: bool
) -> DiagnosisVerdict:
    """The records', where they tell; else that of RAS; else what the state of a process means for its peers."""
    nobody_waits = reading is None or (reading.verdict is DiagnosisVerdict.NO_DESYNC and not reading.groups)
    if reading is not None and (nothing_open or not nobody_waits) and reading.verdict is not DiagnosisVerdict.UNKNOWN:
        return reading.verdict
    from_ras = None if ras is None else RAS_VERDICTS.get(ras.finding)
    if from_ras is not None:
        return from_ras
    printed = next((witness.verdict for witness, yes in weighed.agrees if yes and witness.verdict is not None), None)
    if printed is not None:
        return printed
    hard = any(yes and witness.source not in EXTERNAL_SOURCES for witness, yes in weighed.agrees)
    return DiagnosisVerdict.NEVER_ARRIVED if weighed.ranks and hard else DiagnosisVerdict.UNKNOWN


def _no_open_collective(
    evidence: Evidence, reading: CollectiveAnalysis | None, weighed: CombinedSignals, witnesses: Sequence[Signal]
) -> bool:
    """Whole records of all ranks, nobody in a collective, and nothing else that speaks of a hang."""
    if any(witness.source == PROCESSES and witness.doing for witness in witnesses):
        return False
    if weighed.ranks or (evidence.seen is not None and evidence.seen.state not in NOT_HUNG_STATES):
        return False
    if reading is None and any(witness.shows_progress for witness in witnesses):
        return True
    if reading is None:
        ended = {ending.rank for ending in evidence.endings if ending.code == 0}
        return bool(ended) and ended >= known_ranks(evidence)
    told = any(part.group.members for record in evidence.records for part in record.groups)
    whole = told and not evidence.unread and {record.rank for record in evidence.records} >= known_ranks(evidence)
    return whole and reading.verdict is DiagnosisVerdict.NO_DESYNC and not reading.groups


def _job_step(evidence: Evidence) -> int | None:
    if evidence.seen is not None and (step := median_step(evidence.seen)) is not None:
        return step
    return min((ending.step for ending in evidence.endings if ending.step is not None), default=None)


def _source_files(evidence: Evidence) -> tuple[str, ...]:
    named = {
        *(record.source for record in evidence.records),
        *(stacks.source for stacks in evidence.stacks),
        *(process.source for process in evidence.processes),
        *(ending.source for ending in evidence.endings),
        *(log.source for log in evidence.logs),
        *(report.source for polls in evidence.ras for report in polls.reports),
    }
    return evidence.sources or tuple(sorted(named - {""}))
