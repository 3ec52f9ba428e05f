"""The API's responses as documented models, each built from the frozen snapshot.

Times are RFC 3339 in UTC; null means unknown. Ages are counted up to the time of the response, so the age of a stopped
watcher's data visibly grows. The names of the models are published in /openapi.json: renaming one breaks generated
clients.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from urllib.parse import quote

from pydantic import BaseModel, Field

from wattwatch.watcher.detection.model import (
    Finding,
    JobProgress,
    JobState,
    JobThroughput,
    NodeState,
    PowerState,
    RankGpu,
    Severity,
    Suspect,
    UtilizationPattern,
    Verdict,
)
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.diagnosis.model import Diagnosis, DiagnosisVerdict, HangCause, MemberState
from wattwatch.watcher.diagnosis.serialization import diagnosis_document
from wattwatch.watcher.engine.snapshot import (
    DeliveryStats,
    DiagnosisStage,
    DiagnosisView,
    EpisodeView,
    JobView,
    NodeView,
)
from wattwatch.watcher.web.metrics import newest_complete_checkpoint, node_status


class SuspectAnswer(BaseModel):
    node: str
    gpu: int | None = Field(description="GPU index as the driver numbers it")
    rank: int | None


class AlternativeAnswer(BaseModel):
    state: PowerState
    confidence: float = Field(ge=0, le=1)


class VerdictAnswer(BaseModel):
    """What one sample of the job's GPUs shows, regardless of earlier samples."""

    state: PowerState
    shape: UtilizationPattern = Field(description="the pattern of utilization over the ranks")
    confidence: float = Field(ge=0, le=1)
    why: str = Field(description="the reason for this state, with numbers")
    advice: str
    power_fraction: float | None = Field(description="median GPU power as a fraction of the power limit")
    suspects: list[SuspectAnswer]
    alternative: AlternativeAnswer | None
    settle: str | None = Field(
        description="the check that would decide between this state and the alternative, or show the state if there "
        "is no alternative"
    )


class ProgressAnswer(BaseModel):
    """The job's progress, as reported by the job."""

    step: int | None = Field(description="highest step that any source reports; null if progress cannot be read")
    slowest_step: int | None
    total_steps: int | None
    tokens_per_second: float | None = Field(
        description="throughput now: as the job reports it, 0 while its next step is late, null if unknown"
    )
    reported_tokens_per_second: float | None = Field(description="throughput as the job last reported it")
    reported_tokens_per_second_age_seconds: float | None = Field(
        description="time since the step to which the reported throughput belongs; null if none was reported"
    )
    loss: float | None = Field(description="last loss; null if unknown, NaN or Inf (see loss_finite)")
    loss_finite: bool | None = Field(description="false if the job reported NaN or Inf")
    age_seconds: float | None = Field(description="time since the step last changed")
    restart: int | None = Field(description="number of times that the launcher has restarted the job")
    epoch: int | None = Field(description="as the log prints it; the first epoch may be 0 or 1")
    epochs: int | None
    epoch_step: int | None = Field(
        description="step within the epoch, if the job's counter restarts in each epoch; `step` counts over all epochs"
    )
    epoch_steps: int | None
    seconds_per_step: float | None = Field(description="measured by the watcher, or else as the log prints it")
    eta_seconds: float | None = Field(
        description="time until the last planned step; null if unknown or while the next step is late"
    )
    samples_per_second: float | None = Field(description="as the log prints it: of the whole job or of one rank")
    tokens_per_second_calculated: bool = Field(
        description="true if throughput is calculated from the step rate and tokens_per_step, not reported by the job"
    )
    unreadable_reason: str = Field(
        description="why the logs that were read show no step; empty if a step is read, or if no log exists"
    )
    guessed: bool = Field(
        description="true if the format of the log is unknown and the step is the number in it that grows steadily"
    )


class CheckpointAnswer(BaseModel):
    """The newest complete checkpoint."""

    name: str
    step: int | None
    bytes: int
    age_seconds: float | None = Field(description="time since the checkpoint last changed")


CAUSE_DESCRIPTION = (
    "why it is unreachable: silent, route, refused, name, handshake, session, gateway, configuration or not_tried; "
    "null if the node is reachable or the reason is unknown"
)


class JobNodeAnswer(BaseModel):
    node: str
    status: str
    detail: str = Field(description="what is wrong with the node; empty if nothing is wrong")
    cause: str | None = Field(description=CAUSE_DESCRIPTION)
    age_seconds: float | None = Field(description="age of the last data from the node; null if it never answered")
    gpus: int = Field(description="number of GPUs in the last sample")
    expected_gpus: int | None


class UnseenGpuAnswer(BaseModel):
    """A GPU of the job without a reading in the last sample."""

    node: str
    gpu: int | None = Field(description="GPU index as the driver numbers it, when it was last read")
    rank: int | None = Field(description="rank when the GPU was last read")
    why: str = Field(description="why there is no reading")


class FindingAnswer(BaseModel):
    """A problem that the job has now."""

    alert: str
    severity: Severity
    scope: str
    confirmed: bool
    summary: str
    evidence: list[str]
    advice: str
    suspects: list[SuspectAnswer]


class JobAnswer(BaseModel):
    """One job: its state and why, its progress, nodes and problems."""

    name: str
    state: JobState
    since: datetime = Field(
        description="when the job entered this state, or when the watcher first saw the job in this state"
    )
    began_unseen: bool = Field(
        description="true if the job may have been in this state before `since`, without the watcher seeing it"
    )
    reason: str = Field(description="why the job is in this state, with numbers")
    judged: datetime = Field(description="when the job was last evaluated")
    age_seconds: float = Field(description="time since the job was last evaluated")
    stale: bool = Field(
        description="true if the last evaluation is too old: state and readings are from that time, not current"
    )
    verdict: VerdictAnswer
    progress: ProgressAnswer
    checkpoint: CheckpointAnswer | None = Field(
        description="null if no checkpoint is complete or the directory cannot be read"
    )
    gpus: int = Field(description="number of GPUs in the last sample")
    expected_gpus: int | None
    seen: str = Field(
        description='how much of the job the last sample shows, e.g. "4 of 8 GPUs seen"; empty if it shows all'
    )
    unseen: list[UnseenGpuAnswer] = Field(description="the job's GPUs without a reading, as far as they are known")
    nodes: list[JobNodeAnswer]
    findings: list[FindingAnswer]
    wasted_gpu_seconds: dict[str, float] = Field(
        description="GPU time without useful work since the watcher started, by alert"
    )
    wasted_energy_joules: dict[str, float] = Field(
        description="energy drawn during wasted_gpu_seconds, by alert; counts only GPUs whose power was read"
    )
    incident: str | None = Field(
        description="path of the newest incident recording on the control host, for `wattwatch replay`; null if none"
    )


class GpuAnswer(BaseModel):
    """One GPU of the job as last read."""

    node: str
    rank: int | None
    gpu: int | None = Field(description="GPU index as the driver numbers it")
    uuid: str | None
    pci_bus_id: str | None
    name: str | None
    age_seconds: float | None = Field(description="age of these readings")
    power_watts: float | None
    power_source: str | None = Field(description="the reading that power_watts is taken from")
    power_limit_watts: float | None
    utilization_percent: float | None
    memory_utilization_percent: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    temperature_celsius: float | None
    energy_joules: float | None
    throttle_reasons: list[str] | None
    reasons: dict[str, str] = Field(
        description="for each field that is null, the reason: unsupported, unreadable, lost, ..."
    )


class TimelineAnswer(BaseModel):
    """One point of the job's history."""

    time: datetime
    state: JobState
    step: int | None
    tokens_per_second: float | None = Field(description="0 while the next step is late, null if unknown")
    power_watts_median: float | None
    power_watts_low: float | None
    power_watts_high: float | None
    utilization_percent_mean: float | None


class NodeAnswer(BaseModel):
    """One node: whether it answers, and how old its data is."""

    node: str
    status: str = Field(description="ok, unreachable, auth_failed, host_key_changed, sampler_timeout, driver_down, ...")
    detail: str = Field(description="what is wrong with the node; empty if nothing is wrong")
    cause: str | None = Field(description=CAUSE_DESCRIPTION)
    age_seconds: float | None = Field(description="age of the last data from the node; null if it never answered")
    jobs: list[str]
    gpus: int | None = Field(description="number of GPUs in the last data; null if they could not be read")
    gpu_source: str | None = Field(description="how the GPUs are read: nvml, nvidia-smi or shell")
    hung_calls: dict[str, float] = Field(
        description="calls on the node that had not returned when it last answered, with their age in seconds now"
    )
    clock_skew_seconds: float | None = Field(
        description="wall clock of the node minus that of the watcher; null while the node does not answer"
    )
    logins: int
    login_failures: int
    lines: int
    garbage_bytes: int


class AlertAnswer(BaseModel):
    """One alert episode, open or recently closed."""

    id: str = Field(description="unique for each episode, and unchanged when the watcher restarts")
    job: str = Field(description="empty if the alert is about the watcher itself")
    alert: str
    scope: str
    severity: Severity
    confirmed: bool = Field(
        description="false while only power and utilization suggest the problem, and progress has not confirmed it"
    )
    summary: str
    evidence: list[str]
    advice: str
    suspects: list[SuspectAnswer]
    opened: datetime
    closed: datetime | None = Field(description="null while the alert is open")
    last_seen: datetime | None = Field(
        description="when the problem was last seen: summary and evidence are from that time; null for a closed alert"
    )
    absent_since: datetime | None = Field(
        description="since when the problem has no longer been seen, although the alert is still open; null while "
        "the problem is seen"
    )
    kept_open: str | None = Field(
        description="why the alert is still open, and since when the problem has not been seen"
    )
    gpu_hours_lost: float
    kilowatt_hours_lost: float = Field(
        description="energy drawn without useful work; counts only GPUs whose power was read"
    )
    suppressed_by: str | None = Field(
        description="the alert about the root cause, which is reported instead of this one"
    )
    diagnosis: str | None = Field(description="one sentence that says which rank blocks the job; null if not known")


def utc_datetime(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def optional_utc_datetime(seconds: float | None) -> datetime | None:
    return None if seconds is None else utc_datetime(seconds)


def job_answer(
    view: JobView, late_seconds: float, incident: str | None = None, *, stale_limit_seconds: float
) -> JobAnswer:
    """`late_seconds`: the time since the job was evaluated, added to every age of that time. `incident`: path of the
    newest recording."""
    sample, stale = view.sample, late_seconds > stale_limit_seconds
    throughput = replace(view.throughput, tokens_per_second=None) if stale else view.throughput
    gpus_by_node = Counter(rank_gpu.node for rank_gpu in sample.gpus)
    newest = newest_complete_checkpoint(sample)
    return JobAnswer(
        name=view.name,
        state=view.state,
        since=utc_datetime(view.state_since_wall_seconds),
        began_unseen=view.state_began_unseen,
        reason=view.reason,
        judged=utc_datetime(sample.wall_seconds),
        age_seconds=late_seconds,
        stale=stale,
        verdict=verdict_answer(view.verdict),
        progress=progress_answer(sample.progress, throughput, late_seconds),
        checkpoint=None
        if newest is None
        else CheckpointAnswer(
            name=newest.name,
            step=newest.step,
            bytes=newest.bytes,
            age_seconds=add_age(newest.age_seconds, late_seconds),
        ),
        gpus=len(sample.gpus),
        expected_gpus=sample.expected_gpus,
        seen=sample.extent,
        unseen=[UnseenGpuAnswer(node=u.node, gpu=u.index, rank=u.rank, why=u.reason) for u in sample.unseen],
        nodes=[job_node_answer(node, gpus_by_node[node.node], late_seconds) for node in sample.nodes],
        findings=[finding_answer(finding) for finding in view.findings],
        wasted_gpu_seconds=dict(view.wasted_gpu_seconds),
        wasted_energy_joules=dict(view.wasted_joules),
        incident=incident,
    )


def add_age(age_seconds: float | None, late_seconds: float) -> float | None:
    return None if age_seconds is None else age_seconds + late_seconds


def verdict_answer(verdict: Verdict) -> VerdictAnswer:
    other = verdict.alternative
    return VerdictAnswer(
        state=verdict.state,
        shape=verdict.pattern,
        confidence=verdict.confidence,
        why=verdict.why,
        advice=verdict.advice,
        power_fraction=verdict.power_fraction,
        suspects=suspect_answers(verdict.suspects),
        alternative=None if other is None else AlternativeAnswer(state=other.state, confidence=other.confidence),
        settle=verdict.deciding_check,
    )


def suspect_answers(suspects: Iterable[Suspect]) -> list[SuspectAnswer]:
    return [SuspectAnswer(node=s.node, gpu=s.gpu, rank=s.rank) for s in suspects]


def progress_answer(progress: JobProgress, throughput: JobThroughput, late_seconds: float) -> ProgressAnswer:
    # JSON has no NaN or Inf; loss_finite keeps the difference between "diverged" and "not known".
    finite = None if progress.loss is None else math.isfinite(progress.loss)
    return ProgressAnswer(
        step=progress.step,
        slowest_step=progress.slowest_step,
        total_steps=progress.total_steps,
        tokens_per_second=throughput.tokens_per_second,
        reported_tokens_per_second=throughput.reported,
        reported_tokens_per_second_age_seconds=add_age(throughput.reported_age_seconds, late_seconds),
        loss=progress.loss if finite else None,
        loss_finite=finite,
        age_seconds=add_age(progress.age_seconds, late_seconds),
        restart=progress.restart,
        epoch=progress.epoch,
        epochs=progress.epochs,
        epoch_step=progress.epoch_step,
        epoch_steps=progress.epoch_steps,
        seconds_per_step=throughput.seconds_per_step,
        eta_seconds=None if throughput.eta_seconds is None else max(0.0, throughput.eta_seconds - late_seconds),
        samples_per_second=progress.samples_per_second,
        tokens_per_second_calculated=throughput.calculated,
        unreadable_reason=progress.unreadable_reason,
        guessed=progress.guessed,
    )


def job_node_answer(node: NodeState, gpus: int, late_seconds: float) -> JobNodeAnswer:
    return JobNodeAnswer(
        node=node.node,
        status=node.status.value,
        detail=node.detail,
        cause=node.cause,
        age_seconds=add_age(node.age_seconds, late_seconds),
        gpus=gpus,
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


def gpu_answers(view: JobView, late_seconds: float) -> list[GpuAnswer]:
    """Every GPU of the job. A reading is as old as the last line of its node, and the job's evaluation."""
    node_ages = {node.node: node.age_seconds for node in view.sample.nodes}
    return [gpu_answer(each, add_age(node_ages.get(each.node), late_seconds)) for each in view.sample.gpus]


def gpu_answer(rank_gpu: RankGpu, age_seconds: float | None) -> GpuAnswer:
    gpu = rank_gpu.gpu
    return GpuAnswer(
        node=rank_gpu.node,
        rank=rank_gpu.rank,
        gpu=gpu.index,
        uuid=gpu.uuid,
        pci_bus_id=gpu.pci_bus_id,
        name=gpu.name,
        age_seconds=age_seconds,
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
        time=utc_datetime(point.wall_seconds),
        state=point.state,
        step=point.step,
        tokens_per_second=point.tokens_per_second,
        power_watts_median=point.power_watts_median,
        power_watts_low=point.power_watts_low,
        power_watts_high=point.power_watts_high,
        utilization_percent_mean=point.utilization_percent_mean,
    )


def node_answer(view: NodeView, late_seconds: float) -> NodeAnswer:
    """`late_seconds`: the age of the snapshot."""
    link, sample = view.link, view.sample
    status = node_status(view)
    sample_age = late_seconds + (link.last_line_age_seconds or 0.0)
    detail = link.detail if status is link.status or sample is None else sample.detail
    return NodeAnswer(
        node=view.node,
        status=status.value,
        detail=detail,
        cause=link.cause,
        age_seconds=add_age(link.last_line_age_seconds, late_seconds),
        jobs=list(view.jobs),
        gpus=None if sample is None or sample.gpus is None else len(sample.gpus),
        gpu_source=None if sample is None else sample.gpu_source or None,
        hung_calls={} if sample is None else {call.call: call.age_seconds + sample_age for call in sample.hung_calls},
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
        opened=utc_datetime(episode.opened_wall_seconds),
        closed=optional_utc_datetime(episode.closed_wall_seconds),
        last_seen=optional_utc_datetime(episode.last_seen_wall_seconds),
        absent_since=optional_utc_datetime(episode.absent_since_wall_seconds),
        kept_open=episode.kept_open or None,
        gpu_hours_lost=episode.gpu_hours_lost,
        kilowatt_hours_lost=episode.kilowatt_hours_lost,
        suppressed_by=episode.suppressed_by,
        diagnosis=episode.diagnosis or None,
    )


class DeliveriesAnswer(BaseModel):
    """The messages to receivers. Counters start at 0 when the watcher starts."""

    waiting: int = Field(description="messages that are not delivered yet")
    oldest_waiting_seconds: float = Field(description="age of the oldest undelivered message; 0 if there is none")
    sent: dict[str, int] = Field(description="delivered messages, by receiver")
    failed: dict[str, dict[str, int]] = Field(description="failed attempts, by receiver and reason")
    given_up: dict[str, str] = Field(
        description="receivers whose last message will not be retried, with the reason; cleared by the next "
        "delivered message"
    )


def deliveries_answer(stats: DeliveryStats) -> DeliveriesAnswer:
    failed: dict[str, dict[str, int]] = {}
    for (receiver, reason), count in stats.failed.items():
        failed.setdefault(receiver, {})[reason] = count
    return DeliveriesAnswer(
        waiting=stats.waiting,
        oldest_waiting_seconds=stats.oldest_waiting_seconds,
        sent=dict(stats.sent),
        failed=failed,
        given_up=dict(stats.given_up),
    )


class CulpritAnswer(BaseModel):
    rank: int
    node: str | None
    gpu: int | None
    doing: str = Field(description="what the rank is doing, with the line of code if known")


class StandingAnswer(BaseModel):
    """Ranks of a process group in the same state at one sequence number."""

    place: MemberState = Field(description="waiting, behind, silent, ahead or absent")
    operation: str | None = Field(description="the operation that these ranks launched at this sequence number")
    line: str | None = Field(
        description="the line of the job's own code that launched the operation, or where the ranks are now"
    )
    ranks: list[int]


class GroupAnswer(BaseModel):
    """The ranks of one process group at one sequence number (`slot`). The diagnosis is based on it, or ranks wait at
    it."""

    group: str
    name: str
    size: int
    slot: int
    members: list[StandingAnswer]


class WaitAnswer(BaseModel):
    """`ranks` cannot continue until `awaited` do."""

    ranks: list[int]
    awaited: list[int]
    group: str
    slot: int
    operation: str
    why: str


class TestimonyAnswer(BaseModel):
    """One piece of evidence that supports the diagnosis or contradicts it."""

    source: str
    agrees: bool
    words: str


class StackFrameAnswer(BaseModel):
    function: str
    file: str
    line: int | None


class StackAnswer(BaseModel):
    """The main thread of a blocking rank, innermost frame first."""

    rank: int
    source: str
    frames: list[StackFrameAnswer]


class LogAnswer(BaseModel):
    """The last lines that a blocking rank printed, without terminal control sequences."""

    rank: int
    source: str
    lines: list[str]


class UnreadAnswer(BaseModel):
    """A record that exists but cannot be used."""

    source: str
    rank: int | None
    why: str


class DiagnosisAnswer(BaseModel):
    """Which rank blocks the job, where, why, and how certain that is: the fields of `wattwatch diagnose --json`, and
    the capture they come from."""

    job: str
    alert: str = Field(description="the alert that the diagnosis explains")
    episode: str = Field(description="id of the alert episode")
    stage: DiagnosisStage = Field(
        description="stage of the latest capture; if it is running or failed, this diagnosis is from an earlier capture"
    )
    began: datetime = Field(description="when the latest capture began")
    ended: datetime | None = Field(description="when the latest capture ended; null while it is running")
    trouble: str | None = Field(description="why the latest capture gave no diagnosis")
    directory: str = Field(description="directory of the capture on the control host; `wattwatch diagnose` reads it")
    report: str | None = Field(description="URL path of the incident report on this server")
    verdict: DiagnosisVerdict
    conclusive: bool = Field(description="true if the evidence proves the diagnosis; false if it is only likely")
    culprits: list[int] = Field(description="blocking ranks")
    confidence: float = Field(ge=0, le=1)
    step: int | None
    cause: HangCause = Field(description="the kind of root cause, as far as the evidence shows")
    summary: str
    why: str
    advice: str
    who: list[CulpritAnswer]
    tied: list[list[int]] = Field(
        description="sets of ranks: one of these sets is at fault, but the records do not show which"
    )
    groups: list[GroupAnswer]
    waits: list[WaitAnswer]
    testimonies: list[TestimonyAnswer]
    stacks: list[StackAnswer]
    logs: list[LogAnswer]
    evidence: list[str] = Field(description="files in `directory` that the diagnosis is based on")
    missing: list[str] = Field(description="evidence that was requested but not obtained")
    unread: list[UnreadAnswer]


def diagnosis_answer(view: DiagnosisView, diagnosis: Diagnosis) -> DiagnosisAnswer:
    return DiagnosisAnswer(
        job=view.job,
        alert=view.alert,
        episode=view.episode_id,
        stage=view.stage,
        began=utc_datetime(view.began_wall_seconds),
        ended=None if view.ended_wall_seconds is None else utc_datetime(view.ended_wall_seconds),
        trouble=view.trouble or None,
        directory=view.directory,
        report=report_path(view) if view.report else None,
        **diagnosis_document(diagnosis),
    )


def report_path(view: DiagnosisView) -> str:
    return f"/api/v1/jobs/{quote(view.job, safe='/')}/diagnosis/report"


def no_diagnosis_reason(job: str, view: DiagnosisView | None) -> str:
    """Why there is no diagnosis, one sentence."""
    if view is None:
        return f"nothing has been captured for {job!r}: no hang or stalled checkpoint has been detected so far"
    if view.stage is DiagnosisStage.OFF:
        return f"no evidence is captured for {job!r}, because its configuration says `capture = false`"
    if view.stage is DiagnosisStage.RUNNING:
        began = f"{utc_datetime(view.began_wall_seconds):%H:%M:%S} UTC"
        return f"a capture of {job!r} has been running since {began}: try again in a moment"
    return f"the capture of {job!r} gave no diagnosis: {view.trouble}; the captured files are in {view.directory}"
