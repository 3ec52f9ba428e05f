"""What the API answers, as documented models, each made from the frozen snapshot.

Times are RFC 3339 in UTC. What is not known is null. Ages are counted up to the moment of the answer, so an answer of
a watcher that stands still grows old where everybody can see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import UTC, datetime

from pydantic import BaseModel, Field

from watcher.judge.finding import Finding, JobState, Severity
from watcher.judge.job_sample import JobProgress, NodeState, RankGpu
from watcher.judge.verdict import PowerState, Shape, Suspect, Verdict
from watcher.serve.metrics import newest_complete, node_status
from watcher.snapshot import EpisodeView, JobView, NodeView, TimelinePoint


class SuspectAnswer(BaseModel):
    node: str
    gpu: int | None = Field(description="index as the driver numbers it")
    rank: int | None


class AlternativeAnswer(BaseModel):
    state: PowerState
    confidence: float = Field(ge=0, le=1)


class VerdictAnswer(BaseModel):
    """What one picture of the job's boards says."""

    state: PowerState
    shape: Shape = Field(description="how utilisation lies over the ranks")
    confidence: float = Field(ge=0, le=1)
    why: str = Field(description="what decided, with its numbers")
    advice: str
    power_fraction: float | None = Field(description="median board power as a share of the limit")
    suspects: list[SuspectAnswer]
    alternative: AlternativeAnswer | None
    settle: str | None = Field(description="the one observation that decides against the alternative")


class ProgressAnswer(BaseModel):
    """How far the job says it is."""

    step: int | None = Field(description="furthest step of any source; null: progress cannot be read")
    slowest_step: int | None
    total_steps: int | None
    tokens_per_second: float | None
    loss: float | None = Field(description="null also where it is not finite: see loss_finite")
    loss_finite: bool | None = Field(description="false: the job reported NaN or Inf")
    age_seconds: float | None = Field(description="since the step last changed")
    restart: int | None = Field(description="how often the launcher has restarted the job")


class CheckpointAnswer(BaseModel):
    """The newest complete checkpoint."""

    name: str
    step: int | None
    bytes: int
    age_seconds: float | None = Field(description="since it last changed")


class JobNodeAnswer(BaseModel):
    node: str
    status: str
    detail: str = Field(description="empty where all is well")
    age_seconds: float | None = Field(description="of its last line; null: it never answered")
    gpus: int = Field(description="boards in the last picture")
    expected_gpus: int | None


class FindingAnswer(BaseModel):
    """Something that is true of the job now."""

    alert: str
    severity: Severity
    scope: str
    confirmed: bool
    summary: str
    evidence: list[str]
    advice: str
    suspects: list[SuspectAnswer]


class JobAnswer(BaseModel):
    name: str
    state: JobState
    since: datetime = Field(description="when it came into this state")
    reason: str = Field(description="why it is in this state, with numbers")
    judged: datetime = Field(description="when the job was last looked at")
    age_seconds: float = Field(description="since then")
    verdict: VerdictAnswer
    progress: ProgressAnswer
    checkpoint: CheckpointAnswer | None = Field(description="null: none is complete, or none can be seen")
    gpus: int = Field(description="boards in the last picture")
    expected_gpus: int | None
    nodes: list[JobNodeAnswer]
    findings: list[FindingAnswer]
    wasted_gpu_seconds: dict[str, float] = Field(description="by the alert that says why, since the watcher began")
    wasted_energy_joules: dict[str, float] = Field(
        description="what those boards drew meanwhile; of those that were read"
    )
    incident: str | None = Field(
        description="the recording of its newest incident, on the watcher's host, for `wattwatch replay`; null: none"
    )


class GpuAnswer(BaseModel):
    """One board of the job as last read."""

    node: str
    rank: int | None
    gpu: int | None = Field(description="index as the driver numbers it")
    uuid: str | None
    pci_bus_id: str | None
    name: str | None
    power_watts: float | None
    power_source: str | None = Field(description="which reading the watts are")
    power_limit_watts: float | None
    utilization_percent: float | None
    memory_utilization_percent: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    temperature_celsius: float | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    reasons: dict[str, str] = Field(description="field -> why it is null: unsupported, unreadable, lost, ...")


class TimelineAnswer(BaseModel):
    """One moment of the job's history."""

    time: datetime
    state: JobState
    step: int | None
    tokens_per_second: float | None
    power_watts_median: float | None
    power_watts_low: float | None
    power_watts_high: float | None
    utilization_percent_mean: float | None


class NodeAnswer(BaseModel):
    node: str
    status: str = Field(description="ok, unreachable, auth_failed, host_key_changed, sampler_timeout, driver_down, ...")
    detail: str = Field(description="empty where all is well; else what was seen")
    age_seconds: float | None = Field(description="of its last line; null: it never answered")
    jobs: list[str]
    gpus: int | None = Field(description="boards in its last line; null: they could not be read")
    gpu_source: str | None = Field(description="nvml, nvidia-smi, shell")
    hung_calls: dict[str, float] = Field(description="calls that have not returned, with their age in seconds")
    clock_skew_seconds: float | None = Field(description="its wall clock minus the watcher's")
    logins: int
    login_failures: int
    lines: int
    garbage_bytes: int


class AlertAnswer(BaseModel):
    """One alert episode, open or lately closed."""

    id: str = Field(description="the same over restarts, another for each episode")
    job: str = Field(description="empty: about the watcher itself")
    alert: str
    scope: str
    severity: Severity
    confirmed: bool = Field(description="false: only power and utilisation say so yet")
    summary: str
    evidence: list[str]
    advice: str
    suspects: list[SuspectAnswer]
    opened: datetime
    closed: datetime | None = Field(description="null: open")
    gpu_hours_lost: float
    kilowatt_hours_lost: float = Field(description="what boards drew meanwhile for nothing; of those read")
    suppressed_by: str | None = Field(description="root cause that keeps this one quiet")
    diagnosis: str | None = Field(description="who holds the job up, in a sentence, once that is known")


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def job_answer(view: JobView, late_seconds: float, now: float, incident: str | None = None) -> JobAnswer:
    """`late_seconds`: how old the snapshot is, added to every age in it. `incident`: path of the newest recording."""
    sample = view.sample
    boards: dict[str, int] = {}
    for board in sample.gpus:
        boards[board.node] = boards.get(board.node, 0) + 1
    newest = newest_complete(sample)
    return JobAnswer(
        name=view.name,
        state=view.state,
        since=utc(view.state_since_wall_seconds),
        reason=view.reason,
        judged=utc(sample.wall_seconds),
        age_seconds=max(0.0, now - sample.wall_seconds),
        verdict=verdict_answer(view.verdict),
        progress=progress_answer(sample.progress, late_seconds),
        checkpoint=None
        if newest is None
        else CheckpointAnswer(
            name=newest.name, step=newest.step, bytes=newest.bytes, age_seconds=older(newest.age_seconds, late_seconds)
        ),
        gpus=len(sample.gpus),
        expected_gpus=sample.expected_gpus,
        nodes=[job_node_answer(node, boards.get(node.node, 0), late_seconds) for node in sample.nodes],
        findings=[finding_answer(finding) for finding in view.findings],
        wasted_gpu_seconds=dict(view.wasted_gpu_seconds),
        wasted_energy_joules=dict(view.wasted_joules),
        incident=incident,
    )


def older(age_seconds: float | None, late_seconds: float) -> float | None:
    return None if age_seconds is None else age_seconds + late_seconds


def verdict_answer(verdict: Verdict) -> VerdictAnswer:
    other = verdict.alternative
    return VerdictAnswer(
        state=verdict.state,
        shape=verdict.shape,
        confidence=verdict.confidence,
        why=verdict.why,
        advice=verdict.advice,
        power_fraction=verdict.power_fraction,
        suspects=suspect_answers(verdict.suspects),
        alternative=None if other is None else AlternativeAnswer(state=other.state, confidence=other.confidence),
        settle=verdict.settle,
    )


def suspect_answers(suspects: Iterable[Suspect]) -> list[SuspectAnswer]:
    return [SuspectAnswer(node=s.node, gpu=s.gpu, rank=s.rank) for s in suspects]


def progress_answer(progress: JobProgress, late_seconds: float) -> ProgressAnswer:
    finite = None if progress.loss is None else math.isfinite(progress.loss)
    return ProgressAnswer(
        step=progress.step,
        slowest_step=progress.slowest_step,
        total_steps=progress.total_steps,
        tokens_per_second=progress.tokens_per_second,
        loss=progress.loss if finite else None,
        loss_finite=finite,
        age_seconds=older(progress.age_seconds, late_seconds),
        restart=progress.restart,
    )


def job_node_answer(node: NodeState, boards: int, late_seconds: float) -> JobNodeAnswer:
    return JobNodeAnswer(
        node=node.node,
        status=node.status.value,
        detail=node.detail,
        age_seconds=older(node.age_seconds, late_seconds),
        gpus=boards,
        expected_gpus=node.expected_gpus,
    )


def finding_answer(finding: Finding) -> FindingAnswer:
    return FindingAnswer(
        alert=finding.alert.value,
        severity=finding.severity,
        scope=finding.scope,
        confirmed=finding.confirmed,
        summary=finding.summary,
        evidence=list(finding.evidence),
        advice=finding.advice,
        suspects=suspect_answers(finding.suspects),
    )


def gpu_answer(board: RankGpu) -> GpuAnswer:
    gpu = board.gpu
    return GpuAnswer(
        node=board.node,
        rank=board.rank,
        gpu=gpu.index,
        uuid=gpu.uuid,
        pci_bus_id=gpu.pci_bus_id,
        name=gpu.name,
        power_watts=gpu.power_watts,
        power_source=None if gpu.power_source is None else gpu.power_source.value,
        power_limit_watts=gpu.power_limit_watts,
        utilization_percent=gpu.utilization_percent,
        memory_utilization_percent=gpu.memory_utilization_percent,
        memory_used_bytes=gpu.memory_used_bytes,
        memory_total_bytes=gpu.memory_total_bytes,
        temperature_celsius=gpu.temperature_celsius,
        energy_joules=gpu.energy_joules,
        throttle_reasons=None if gpu.throttle_reasons is None else sorted(gpu.throttle_reasons),
        reasons={name: reason.value for name, reason in gpu.reasons.items()},
    )


def timeline_answer(point: TimelinePoint) -> TimelineAnswer:
    return TimelineAnswer(
        time=utc(point.wall_seconds),
        state=point.state,
        step=point.step,
        tokens_per_second=point.tokens_per_second,
        power_watts_median=point.power_watts_median,
        power_watts_low=point.power_watts_low,
        power_watts_high=point.power_watts_high,
        utilization_percent_mean=point.utilization_percent_mean,
    )


def node_answer(view: NodeView, late_seconds: float) -> NodeAnswer:
    link, sample = view.link, view.sample
    status = node_status(view)
    detail = link.detail if status is link.status or sample is None else sample.detail
    return NodeAnswer(
        node=view.node,
        status=status.value,
        detail=detail,
        age_seconds=older(link.last_line_age_seconds, late_seconds),
        jobs=list(view.jobs),
        gpus=None if sample is None or sample.gpus is None else len(sample.gpus),
        gpu_source=None if sample is None else sample.gpu_source or None,
        hung_calls={} if sample is None else {call.call: call.age_seconds for call in sample.hung_calls},
        clock_skew_seconds=link.clock_skew_seconds,
        logins=link.logins,
        login_failures=link.failures,
        lines=link.lines,
        garbage_bytes=link.garbage_bytes,
    )


def alert_answer(episode: EpisodeView) -> AlertAnswer:
    return AlertAnswer(
        id=episode.id,
        job=episode.job,
        alert=episode.alert,
        scope=episode.scope,
        severity=episode.severity,
        confirmed=episode.confirmed,
        summary=episode.summary,
        evidence=list(episode.evidence),
        advice=episode.advice,
        suspects=suspect_answers(episode.suspects),
        opened=utc(episode.opened_wall_seconds),
        closed=None if episode.closed_wall_seconds is None else utc(episode.closed_wall_seconds),
        gpu_hours_lost=episode.gpu_hours_lost,
        kilowatt_hours_lost=episode.kilowatt_hours_lost,
        suppressed_by=episode.suppressed_by,
        diagnosis=episode.diagnosis or None,
    )
