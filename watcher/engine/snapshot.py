"""What the engine publishes after each tick, and what the API, the page and the metrics read.

A snapshot is frozen, so threads share it without locks. `LatestSnapshot` at the end is where the engine's thread puts
each one and where every other thread finds the newest, with its age.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import Finding, JobSample, JobState, JobThroughput, Severity, Suspect, Verdict
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.diagnosis.model import Diagnosis

# A tick may have to wait for a slow disk or a busy machine. A watcher whose last tick is older than this is not
# working, and everything it serves is out of date. Chosen, not measured.
FRESH_INTERVALS: Final = 10.0
FRESH_MIN_SECONDS: Final = 10.0


# Readings of a job that was last evaluated longer ago than this are history, not current readings.
STALE_INTERVALS: Final = 5.0
STALE_MIN_SECONDS: Final = 5.0


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as it was last evaluated, which may be several ticks ago. Every age in it is of that time."""

    name: str
    state: JobState
    evaluated_seconds: float  # on the monotonic clock of the watcher
    state_since_seconds: float  # the same clock
    state_since_wall_seconds: float
    reason: str  # why it is in this state, a sentence with numbers
    sample: JobSample
    verdict: Verdict
    findings: tuple[Finding, ...]
    wasted_gpu_seconds: Mapping[str, float]  # by alert name
    timeline: tuple[TimelinePoint, ...]  # oldest first, thinned with age
    wasted_joules: Mapping[str, float] = field(default_factory=dict)  # by alert name: drawn during the wasted time
    throughput: JobThroughput = JobThroughput()
    state_began_unseen: bool = False  # the watcher only began to see the state then; it may be older


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node after a tick. Ages are those of the snapshot."""

    node: str
    link: NodeLink
    sample: NodeSample | None  # the last one, however old: see link.last_line_age_seconds
    jobs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One open or recently closed alert episode."""

    id: str  # stable across restarts; each episode has a new one
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
    suppressed_by: str | None = None  # the root cause that is reported instead, e.g. "NodeUnreachable node-02"
    kilowatt_hours_lost: float = 0.0  # drawn meanwhile, as far as it was measured
    diagnosis: str = ""  # which rank blocks the job, in a sentence, once known
    last_seen_wall_seconds: float | None = None  # when an evaluation last showed the problem; None: unknown
    # Since when evaluations have not shown it any more, although the episode is still open; None while they do.
    absent_since_wall_seconds: float | None = None
    # That, and why it is open all the same, a sentence without its capital; "" while they do, or once it is closed.
    kept_open: str = ""
    notified_causes: tuple[str, ...] = ()  # those that any message has named


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
    episode_id: str = ""  # the alert episode that it belongs to
    alert: str = ""
    began_wall_seconds: float = 0.0
    ended_wall_seconds: float | None = None
    diagnosis: Diagnosis | None = None  # from the latest capture that gave one
    trouble: str = ""  # why the latest capture gave none, a sentence
    directory: str = ""  # on the control host, with everything captured
    report: str = ""  # path of the incident's HTML report on the control host


@dataclass(frozen=True, slots=True)
class DeliveryStats:
    """Counters of the delivery queue; ages by the watcher's clock."""

    sent: Mapping[str, int] = field(default_factory=dict)  # by receiver
    failed: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by (receiver, reason)
    waiting: int = 0
    oldest_waiting_seconds: float = 0.0
    # By receiver whose last message was given up: why. Removed when it accepts one again.
    given_up: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything the watcher knows after one tick."""

    tick: int
    seconds: float  # on the monotonic clock of the watcher
    wall_seconds: float
    tick_seconds: float  # how long the tick took
    late_seconds: float  # how late it started
    jobs: Mapping[str, JobView]
    nodes: Mapping[str, NodeView]
    episodes: tuple[EpisodeView, ...]
    deliveries: DeliveryStats
    blind: bool  # the watcher has lost most nodes at once: its own network failed, not the nodes
    ticks_overrun: int = 0  # ticks so late that this process must have been stopped or starved of CPU
    detection_delays_seconds: tuple[float, ...] = ()  # from condition to finding, of findings new in this tick
    diagnoses: Mapping[str, DiagnosisView] = field(default_factory=dict)  # by job; no entry if never captured


class LatestSnapshot:
    """The newest snapshot. Only the engine's thread calls `publish`; any thread may read the rest."""

    def __init__(
        self,
        snapshot: Snapshot,
        clock: Clock,
        interval_seconds: float,
        recordings: Mapping[str, str] | None = None,
        deliveries: Callable[[], DeliveryStats] | None = None,
    ) -> None:
        """`recordings`: by job, the path of the recording of its newest incident; it may change at any time.
        `deliveries`: the state of the delivery queue now; None: as in the newest snapshot."""
        self._clock = clock
        self._lock = threading.Lock()
        self._listeners: list[Callable[[Snapshot], None]] = []
        self._published_seconds: float | None = None
        self.interval_seconds = interval_seconds
        self.recordings: Mapping[str, str] = {} if recordings is None else recordings
        self._deliveries = deliveries
        self.snapshot = snapshot
        self.ticks = 0  # ticks of the engine, including those in which no job was due

    def listen(self, listener: Callable[[Snapshot], None]) -> None:
        """Call `listener` with every new snapshot, on the engine's thread: it must return at once."""
        with self._lock:
            self._listeners.append(listener)

    def publish(self, snapshot: Snapshot) -> None:
        """The engine has ticked. If no job was due, it passes the same snapshot again, which only renews its age."""
        self._published_seconds = self._clock.monotonic()
        self.ticks += 1
        if snapshot is self.snapshot:
            return
        self.snapshot = snapshot
        with self._lock:
            listeners = tuple(self._listeners)
        for listener in listeners:
            listener(snapshot)

    @property
    def age_seconds(self) -> float:
        """Seconds since the engine last ticked; infinite before the first tick."""
        if self._published_seconds is None:
            return float("inf")
        return max(0.0, self._clock.monotonic() - self._published_seconds)

    def seconds_since(self, seconds: float) -> float:
        """From a time on the monotonic clock until now: what must be added to an age that was measured then. Setting
        the wall clock does not change it."""
        return max(0.0, self._clock.monotonic() - seconds)

    def job_age_seconds(self, view: JobView) -> float:
        """Since the job was last evaluated. A job may be left out of many ticks: while its evaluation fails, or while
        the watcher has lost its nodes."""
        return self.seconds_since(view.evaluated_seconds)

    @property
    def snapshot_age_seconds(self) -> float:
        """Since the newest snapshot was made. Ticks in which no job was due make none."""
        return self.seconds_since(self.snapshot.seconds)

    @property
    def stale_limit_seconds(self) -> float:
        """Readings of a job that was last evaluated longer ago are not current."""
        return max(STALE_MIN_SECONDS, STALE_INTERVALS * self.interval_seconds)

    def deliveries(self) -> DeliveryStats:
        """The delivery queue now. Messages are delivered between ticks, and after the engine has stopped."""
        return self.snapshot.deliveries if self._deliveries is None else self._deliveries()

    @property
    def fresh_limit_seconds(self) -> float:
        return max(FRESH_MIN_SECONDS, FRESH_INTERVALS * self.interval_seconds)

    @property
    def is_fresh(self) -> bool:
        return self.age_seconds <= self.fresh_limit_seconds

    @property
    def wall_seconds(self) -> float:
        """Now, for people: the ages in the snapshot are counted up to this time."""
        return self._clock.wall()
