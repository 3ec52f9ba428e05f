"""`diagnose`: all evidence together gives a `Diagnosis`. Pure; any part of the evidence may be missing.

The flight records decide where they are conclusive. Otherwise NCCL RAS, processes, exit reports, logs, node faults,
stacks, heartbeats and power are weighed against each other (`signals/combine.py`).
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
from wattwatch.watcher.diagnosis.signals.signal import (
    FLIGHT_RECORDER,
    HEARTBEATS,
    POWER,
    PROCESSES,
    THROTTLING,
    Signal,
)
from wattwatch.watcher.diagnosis.stacks.activity import add_lines_from_stacks
from wattwatch.watcher.diagnosis.summary import describe_culprits, explain, summarize

MAX_STACKS: Final = 4  # of culprits
MAX_LOGS: Final = 2  # of culprits
# A missing record may just be lost, so its rank is named only if another source names it too. Chosen, not fitted.
ABSENT_RECORD_WEIGHT: Final = 0.25
NOT_HUNG_STATES: Final = frozenset({"computing", "communicating", "completed", "unknown"})
# Observed from outside the job: they raise suspicion, but do not show that the others wait for a rank.
EXTERNAL_SOURCES: Final = frozenset({POWER, HEARTBEATS, THROTTLING})


def diagnose(evidence: Evidence) -> Diagnosis:
    """Neither the order of files nor the order of ranks changes the result."""
    evidence = drop_foreign_ras_reports(sorted_evidence(evidence))
    collectives = analyze_collectives(evidence.records, evidence.unreadable) if evidence.records else None
    ras = analyze_ras(evidence.ras) if evidence.ras else None
    signals = collect_signals(evidence, collectives, ras)
    combined = combine_signals(signals, collectives)
    if ras is not None:
        evidence = replace(evidence, node_of_rank=ras_suspect_hosts(ras, evidence) | dict(evidence.node_of_rank))
    no_hang = _shows_no_hang(evidence, collectives, combined, signals)
    verdict = decide_verdict(combined, collectives, ras, no_hang)
    cause = HangCause.UNKNOWN if no_hang else find_root_cause(verdict, combined, signals, collectives, evidence)
    culprits = describe_culprits(combined.ranks, evidence, signals, collectives)
    step = _job_step(evidence)
    return Diagnosis(
        verdict=verdict,
        conclusive=collectives is not None and collectives.conclusive and bool(collectives.culprits),
        cause=cause,
        culprits=culprits,
        confidence=round(combined.confidence, 2) if culprits or verdict is not DiagnosisVerdict.UNKNOWN else 0.0,
        step=step,
        summary=summarize(verdict, culprits, combined, signals, collectives, step, no_hang),
        why=explain(combined, signals, collectives),
        advice=recommend_next_step(verdict, cause, culprits, evidence, no_hang, ras, collectives),
        signals=tuple(SignalSummary(signal.source, yes, signal.text) for signal, yes in combined.agrees),
        collectives=None if collectives is None else add_lines_from_stacks(collectives, evidence.stacks),
        evidence=_source_files(evidence),
        missing=(*evidence.missing, *(ras.notes if ras is not None else ())),
        unreadable=evidence.unreadable,
        stacks=tuple(each for each in evidence.stacks if each.rank in combined.ranks)[:MAX_STACKS],
        no_hang=no_hang,
        logs=tuple(log for log in evidence.logs if log.rank in combined.ranks)[:MAX_LOGS],
    )


def sorted_evidence(evidence: Evidence) -> Evidence:
    """In a fixed order, because the first of two statements about one rank wins."""
    live = evidence.live
    if live is not None:
        ranks = sorted(live.ranks, key=lambda each: (each.rank, each.node, str(each.gpu)))
        live = replace(live, ranks=tuple(ranks), faults=tuple(sorted(live.faults, key=repr)))
    return replace(
        evidence,
        stacks=tuple(sorted(evidence.stacks, key=lambda each: (each.rank, each.source))),
        processes=tuple(
            sorted(evidence.processes, key=lambda each: (str(each.rank), each.node, each.pid, str(each.state)))
        ),
        exit_reports=tuple(sorted(evidence.exit_reports, key=lambda each: (each.rank, each.source, each.code))),
        live=live,
        logs=tuple(sorted(evidence.logs, key=lambda each: (each.rank, each.source))),
    )


def collect_signals(
    evidence: Evidence, collectives: CollectiveAnalysis | None, ras: RasAnalysis | None
) -> list[Signal]:
    live = evidence.live
    signals = [
        flight_record_signal(collectives) if collectives is not None else None,
        ras_signal(ras, evidence) if ras is not None else None,
        *fault_signals(evidence),
        processes_signal(evidence),
        logs_signal(evidence),
        exit_reports_signal(evidence),
        stacks_signal(evidence),
        heartbeats_signal(live) if live is not None else None,
        power_signal(live) if live is not None else None,
    ]
    return [signal for signal in signals if signal is not None]


def flight_record_signal(collectives: CollectiveAnalysis) -> Signal:
    if collectives.absent:
        return Signal(FLIGHT_RECORDER, collectives.why, frozenset(collectives.absent), ABSENT_RECORD_WEIGHT)
    all_alike = collectives.verdict is DiagnosisVerdict.NO_DESYNC and bool(collectives.groups)
    culprits = frozenset(collectives.culprits)
    return Signal(FLIGHT_RECORDER, collectives.why, culprits, collectives.confidence, all_alike=all_alike)


def decide_verdict(
    combined: CombinedSignals, collectives: CollectiveAnalysis | None, ras: RasAnalysis | None, no_hang: bool
) -> DiagnosisVerdict:
    """The verdict of the flight records if they have one, else that of RAS, else what the other signals imply."""
    if collectives is not None and collectives.verdict is not DiagnosisVerdict.UNKNOWN:
        # "No desync" without a group means that no rank waits in a collective: a verdict only if there is no hang.
        no_rank_waits = collectives.verdict is DiagnosisVerdict.NO_DESYNC and not collectives.groups
        if no_hang or not no_rank_waits:
            return collectives.verdict
    from_ras = None if ras is None else RAS_VERDICTS.get(ras.finding)
    if from_ras is not None:
        return from_ras
    implied = next((signal.verdict for signal, yes in combined.agrees if yes and signal.verdict is not None), None)
    if implied is not None:
        return implied
    # A rank that is stopped, gone or elsewhere in its code has not arrived where the others wait.
    direct = any(yes and signal.source not in EXTERNAL_SOURCES for signal, yes in combined.agrees)
    return DiagnosisVerdict.NEVER_ARRIVED if combined.ranks and direct else DiagnosisVerdict.UNKNOWN


def _shows_no_hang(
    evidence: Evidence,
    collectives: CollectiveAnalysis | None,
    combined: CombinedSignals,
    signals: Sequence[Signal],
) -> bool:
    """Whether the evidence is complete and shows no hang: no rank waits in a collective, or all ranks exited with 0."""
    if any(signal.source == PROCESSES and signal.rank_text for signal in signals):
        return False
    if combined.ranks or (evidence.live is not None and evidence.live.state not in NOT_HUNG_STATES):
        return False
    if collectives is None and any(signal.shows_progress for signal in signals):
        return True
    if collectives is None:
        exited = {report.rank for report in evidence.exit_reports if report.code == 0}
        return bool(exited) and exited >= known_ranks(evidence)
    # A rank whose record is missing or unreadable may be the one that hangs.
    members_known = any(part.group.members for record in evidence.records for part in record.groups)
    complete = {record.rank for record in evidence.records} >= known_ranks(evidence) and not evidence.unreadable
    return members_known and complete and collectives.verdict is DiagnosisVerdict.NO_DESYNC and not collectives.groups


def _job_step(evidence: Evidence) -> int | None:
    if evidence.live is not None and (step := median_step(evidence.live)) is not None:
        return step
    return min((report.step for report in evidence.exit_reports if report.step is not None), default=None)


def _source_files(evidence: Evidence) -> tuple[str, ...]:
    named = {
        *(record.source for record in evidence.records),
        *(stacks.source for stacks in evidence.stacks),
        *(process.source for process in evidence.processes),
        *(report.source for report in evidence.exit_reports),
        *(log.source for log in evidence.logs),
        *(report.source for polls in evidence.ras for report in polls.reports),
    }
    return evidence.sources or tuple(sorted(named - {""}))
