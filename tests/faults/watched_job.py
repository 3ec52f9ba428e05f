"""The watcher over a simulated job: the engine of live use, one tick an interval, and what it said."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from tests.faults.plan import Phase, Setting
from tests.faults.simulated_job import CHECKPOINTS, LOG, RUN_DIRECTORY, SILENT, TOKENS_PER_STEP, SimulatedJob
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink, UnreachableCause
from wattwatch.watcher.detection.model import AlertName, Finding, JobSpec, JobState, Severity
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.snapshot import DeliveryStats, EpisodeView

UNREACHABLE_AFTER_SECONDS: Final = 5.0
LIMIT_FACTOR, LEAST_LIMIT_SECONDS, KEPT = 6.0, 30.0, 20
# A finding that is gone for less than this is the same episode: the teller holds it as long.
SAME_EPISODE_SECONDS: Final = 60.0


@dataclass(slots=True)
class RecordedEpisode:
    """One episode of one finding."""

    alert: AlertName
    scope: str
    opened: float
    last: float
    first: Finding
    newest: Finding
    confirmed: float | None = None
    worst: Severity = Severity.INFO


RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


@dataclass(slots=True)
class SampleSource(Clock):
    """Source and clock in one: what came, how the links stand, what time it is."""

    samples: list[NodeSample] = field(default_factory=list)
    states: dict[str, NodeLink] = field(default_factory=dict)
    now: float = 0.0
    wall_seconds: float = 0.0

    def drain(self) -> list[NodeSample]:
        came, self.samples = self.samples, []
        return came

    def links(self) -> Mapping[str, NodeLink]:
        return self.states

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.wall_seconds


class RecordingAlertManager:
    """Stands where people are told: keeps each episode with its times."""

    def __init__(self) -> None:
        self.said: list[RecordedEpisode] = []
        self._open: dict[tuple[str, str, str], RecordedEpisode] = {}
        self.judged = 0

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence],
    ) -> None:
        self.judged += 1
        for finding in findings:
            said = self._open.get(finding.key)
            if said is None or now - said.last > SAME_EPISODE_SECONDS:
                said = RecordedEpisode(finding.alert, finding.scope, now, now, finding, finding)
                self._open[finding.key] = said
                self.said.append(said)
            said.last, said.newest = now, finding
            if RANK[finding.severity] > RANK[said.worst]:
                said.worst = finding.severity
            if finding.confirmed and said.confirmed is None:
                said.confirmed = now

    def episodes(self) -> tuple[EpisodeView, ...]:
        return ()

    def stats(self) -> DeliveryStats:
        return DeliveryStats()


def job_spec(setting: Setting) -> JobSpec:
    """What the watcher is told of the job."""
    usual_rate = TOKENS_PER_STEP / setting.step_seconds
    return JobSpec(
        name="pretrain",
        nodes=setting.node_names,
        run_directory=RUN_DIRECTORY if setting.progress == "heartbeat" else None,
        logs=(LOG,) if setting.progress == "log" else (),
        checkpoint_directory=CHECKPOINTS,
        floor_tokens_per_second=None if setting.floor_share is None else setting.floor_share * usual_rate,
        checkpoint_every_seconds=setting.save_every_seconds,
        interval_seconds=setting.interval_seconds,
    )


class WatchedJob:
    """Plays phases and keeps what was said. `stood_since` and `own_limit` follow the counter as a bystander would."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.job = SimulatedJob(setting)
        self.line = SampleSource(states={node: NodeLink(node, HostStatus.OK, "") for node in setting.node_names})
        self.ear = RecordingAlertManager()
        self._move(0.0)
        self.engine = Engine((job_spec(setting),), self.line, self.ear, self.line)
        self.injected: float | None = None
        self.states: list[JobState] = []
        self._step: int | None = None
        self._changed = 0.0
        self._intervals: list[float] = []
        self._silent_since: float | None = None

    @property
    def said(self) -> list[RecordedEpisode]:
        return self.ear.said

    def play(self, phase: Phase) -> None:
        interval = self.setting.interval_seconds
        if phase.skip_seconds:
            self.job.tell(phase, phase.skip_seconds)
        self.job.begin(phase)
        if phase.injects and self.injected is None:
            self.injected = self.job.now
        left = phase.seconds
        while left >= interval:
            left -= interval
            self._look(phase, self.job.tell(phase, interval))

    def _look(self, phase: Phase, lines: list[NodeSample]) -> None:
        self._move(0.02)
        self._follow_links(phase)
        self.line.samples.extend(lines)
        judged = self.ear.judged
        self.engine.tick()
        if self.ear.judged == judged and lines:
            self._move(0.3 * self.setting.interval_seconds)  # the round waits for its stragglers
            self.engine.tick()
        self._follow_counter()
        view = self.engine.snapshot.jobs.get("pretrain")
        if view is not None and (not self.states or self.states[-1] is not view.state):
            self.states.append(view.state)

    def _move(self, after_seconds: float) -> None:
        self.line.now, self.line.wall_seconds = self.job.now + after_seconds, self.job.wall + after_seconds

    def _follow_links(self, phase: Phase) -> None:
        victim = self.job.node_of(self.setting.victim)
        away = phase.node_state in SILENT
        self._silent_since = None if not away else self._silent_since or self.job.now
        refused = phase.node_state == "refused"
        late = away and (refused or self.job.now - (self._silent_since or 0.0) > UNREACHABLE_AFTER_SECONDS)
        detail = "" if not late else "connection refused" if refused else "no line for some seconds"
        self.line.states[victim] = NodeLink(
            victim,
            HostStatus.UNREACHABLE if late else HostStatus.OK,
            detail,
            cause=None if not late else UnreachableCause.REFUSED if refused else UnreachableCause.SILENT,
        )

    def _follow_counter(self) -> None:
        job, step = self.job, self.job.counter.step
        if self.setting.progress == "log":
            step = job.logged_step or 0
        if step != self._step:
            if self._step is not None and step > self._step and self._changed:
                self._intervals.append(job.now - self._changed)
            self._step, self._changed = step, job.now

    @property
    def stall_limit_seconds(self) -> float:
        """What the job's own pace allows: six times the slowest recent interval, and 30 s."""
        recent = self._intervals[-KEPT:]
        return max(LEAST_LIMIT_SECONDS, LIMIT_FACTOR * max(recent, default=0.0))

    @property
    def stood_since(self) -> float:
        return self._changed
