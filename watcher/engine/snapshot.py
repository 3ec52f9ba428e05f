"""What the engine publishes after each tick, and what the API, the page and the metrics read. Frozen: no locks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from wattwatch.collectors.samples import NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import Finding, JobSample, JobState, Severity, Suspect, Verdict
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.diagnosis.model import Diagnosis


@dataclass(frozen=True, slots=True)
class JobView:
    """One job after a tick."""

    name: str
    state: JobState
    state_since_wall_seconds: float
    reason: str  # why it is in this state, in words with numbers
    sample: JobSample
    verdict: Verdict
    findings: tuple[Finding, ...]
    wasted_gpu_seconds: Mapping[str, float]  # by alert name
    timeline: tuple[TimelinePoint, ...]  # oldest first, thinned with age
    wasted_joules: Mapping[str, float] = field(default_factory=dict)  # what those boards drew meanwhile, by alert name


@dataclass(frozen=True, slots=True)
class NodeView:
    node: str
    link: NodeLink
    sample: NodeSample | None  # the last one that came, however old: see link.last_line_age_seconds
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One open or recently closed alert episode."""

    id: str  # stable over restarts; new for each episode
    job: str
    alert: str
    scope: str
    severity: Severity
    confirmed: bool
    summary: str
    evidence: tuple[str, ...]
    advice: str
    suspects: tuple[Suspect, ...]
    opened_wall_seconds: float
    closed_wall_seconds: float | None
    gpu_hours_lost: float
    suppressed_by: str | None = None  # root cause that keeps this one quiet, e.g. "NodeUnreachable node-02"
    kilowatt_hours_lost: float = 0.0  # drawn meanwhile, in looks that saw it
    diagnosis: str = ""  # who holds the job up, in a sentence, once that is known


class DiagnosisStage(StrEnum):
    OFF = "off"  # the job's configuration says `capture = false`
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class DiagnosisView:
    """The latest diagnosis of one job, or why there is none."""

    job: str
    stage: DiagnosisStage  # of the latest capture
    episode_id: str = ""  # that it belongs to
    alert: str = ""
    began_wall_seconds: float = 0.0
    ended_wall_seconds: float | None = None
    diagnosis: Diagnosis | None = None  # of the latest capture that gave one
    trouble: str = ""  # why the latest gave none, a sentence
    directory: str = ""  # on the watcher's host, with all that was captured
    report: str = ""  # path of the HTML page of the incident, there


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """Counters of the outbox, by receiver and reason; ages on the watcher's clock."""

    sent: Mapping[str, int] = field(default_factory=dict)
    failed: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (receiver, reason)
    waiting: int = 0
    oldest_waiting_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the watcher knows after one tick."""

    tick: int
    wall_seconds: float
    tick_seconds: float  # how long the tick itself took
    late_seconds: float  # how late it started
    jobs: Mapping[str, JobView]
    nodes: Mapping[str, NodeView]
    episodes: tuple[EpisodeView, ...]
    deliveries: DeliveryStats
    blind: bool  # most nodes went silent at once: our own network, not theirs
    ticks_overrun: int = 0
    detection_delays_seconds: tuple[float, ...] = ()  # from condition to episode, of episodes opened in this tick
    diagnoses: Mapping[str, DiagnosisView] = field(default_factory=dict)  # by job; none was ever asked for: absent
