"""One tick of the watcher: samples, job samples, verdicts, findings, alert episodes, snapshot.

The engine owns no thread, socket or file. It takes the samples that have arrived, evaluates each job whose round of
samples is complete, passes the findings on to alerting, and publishes a frozen Snapshot for everyone else. The daemon,
replay, the demo and the tests all run this code, with different sources and clocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.common.state_store import StateStore, StateStoreError
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.baselines.baseline import BaselineTable, load_baselines
from wattwatch.watcher.detection.baselines.learner import JobLearner
from wattwatch.watcher.detection.baselines.profiles import PowerProfile, UserProfile, user_profile_for
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import Finding, JobSample, JobSpec
from wattwatch.watcher.detection.prior_state import PriorState
from wattwatch.watcher.detection.timeline import Timeline, timeline_point
from wattwatch.watcher.detection.trackers.recovery import RecoveryEvidence, RecoveryTracker
from wattwatch.watcher.engine.self_monitoring import NetworkLossDetector, SelfProblems
from wattwatch.watcher.engine.snapshot import DeliveryStats, DiagnosisView, EpisodeView, JobView, NodeView, Snapshot

# A job is evaluated when every answering node has sent its sample, or this share of the interval after the first one: a
# slow node must not delay the verdict on the others for a whole interval.
ROUND_GRACE_INTERVALS: Final = 0.25
# Learned baselines change with every sample; losing a minute of them costs nothing.
SAVE_LEARNED_EVERY_SECONDS: Final = 60.0
# Some 30 ms of SQLite: a tick must not wait for the rows of thousands of GPUs. The rest is saved next time.
MAX_ROWS_PER_SAVE: Final = 2000
MAX_WARNINGS: Final = 5

log = logging.getLogger("wattwatch.engine")


class SampleSource(Protocol):
    """Where samples come from: the SSH fleet, a recording, a log."""

    def drain(self) -> list[NodeSample]:
        """The samples that have arrived since the last call."""
        ...

    def links(self) -> Mapping[str, NodeLink]:
        """The state of the connection to each node."""
        ...


class FindingSink(Protocol):
    """What takes the findings: alerting, which is a layer above the engine and so cannot be imported here.

    Jobs that were not evaluated in this tick keep their episodes.
    """

    def observe(
        self,
        findings: Sequence[Finding],
        evaluated_jobs: frozenset[str],
        now: float,
        wall: float,
        recoveries: Mapping[str, RecoveryEvidence],
        /,
    ) -> None: ...

    def episodes(self) -> tuple[EpisodeView, ...]: ...

    def stats(self) -> DeliveryStats: ...


@dataclass(slots=True)
class JobPipeline:
    """The stages of one job, and what they keep between ticks."""

    spec: JobSpec
    assembler: JobAssembler
    detector: JobDetector
    learner: JobLearner
    timeline: Timeline = field(default_factory=Timeline)
    recovery: RecoveryTracker = field(default_factory=RecoveryTracker)
    reported_nodes: set[str] = field(default_factory=set)  # nodes with a sample since the last evaluation
    first_sample_seconds: float | None = None  # of this round
    evaluated_seconds: float | None = None
    view: JobView | None = None

    def add_sample(self, sample: NodeSample, now: float) -> None:
        self.assembler.add(sample)
        self.reported_nodes.add(sample.node)
        if self.first_sample_seconds is None:
            self.first_sample_seconds = now

    def is_due(self, links: Mapping[str, NodeLink], now: float) -> bool:
        """The round is complete, or has waited long enough. A job without samples is evaluated once an interval."""
        if self.first_sample_seconds is not None:
            answering = {n for n in self.spec.nodes if n in links and links[n].status is HostStatus.OK}
            grace_seconds = ROUND_GRACE_INTERVALS * self.spec.interval_seconds
            return self.reported_nodes >= answering or now - self.first_sample_seconds >= grace_seconds
        return self.evaluated_seconds is None or now - self.evaluated_seconds >= self.spec.interval_seconds

    def all_nodes_answer(self, links: Mapping[str, NodeLink]) -> bool:
        """Whether the job can be evaluated although the watcher has lost most other nodes."""
        return all(node in links and links[node].status is HostStatus.OK for node in self.spec.nodes)

    def end_round(self, now: float) -> None:
        """This round is over for the job, evaluated or not."""
        self.reported_nodes.clear()
        self.first_sample_seconds = None
        self.evaluated_seconds = now

    def evaluate(
        self, sample: JobSample, profile: PowerProfile | None, now: float, last_samples: Mapping[str, NodeSample]
    ) -> tuple[Finding, ...]:
        """Classify, detect, learn, and renew the view. `last_samples`: the newest one of every node."""
        verdict = classify(sample, profile, learned=self.learner.learned(sample))
        findings = self.detector.observe(verdict, sample, now)
        self.learner.update(sample, verdict, findings, self.detector.state, now, last_samples)
        if self.learner.power_limits_changed:
            self.detector.power_limits_changed()
        self.end_round(now)
        self.timeline.add(timeline_point(sample, self.detector.state, self.detector.throughput), now)
        self.view = JobView(
            name=self.spec.name,
            state=self.detector.state,
            evaluated_seconds=now,
            state_since_seconds=self.detector.state_since,
            state_since_wall_seconds=sample.wall_seconds - (now - self.detector.state_since),
            reason=self.detector.reason,
            sample=sample,
            verdict=verdict,
            findings=findings,
            wasted_gpu_seconds=dict(self.detector.wasted_gpu_seconds),
            timeline=self.timeline.points(),
            wasted_joules=dict(self.detector.wasted_joules),
            throughput=self.detector.throughput,
            state_began_unseen=self.detector.state_began_unseen,
        )
        return findings


class Engine:
    """Evaluates all jobs. `tick` is called by one thread; `snapshot` may be read by any."""

    def __init__(
        self,
        specs: Sequence[JobSpec],
        source: SampleSource,
        alerting: FindingSink,
        clock: Clock,
        profiles: Sequence[UserProfile] = (),
        store: StateStore | None = None,
        prior_state: PriorState | None = None,
        diagnoses: Callable[[], Mapping[str, DiagnosisView]] | None = None,
        self_problems: SelfProblems | None = None,
        *,
        is_live: bool = True,
    ) -> None:
        """`profiles`: the user's own power profiles. `store`: keeps what is learned about GPUs across restarts.
        `prior_state`: the same from the head of a recording. `diagnoses`: the latest diagnosis of each job.
        `self_problems`: problems of this process, reported together with the findings. `is_live`: False for a log,
        whose pauses do not show that this process was stalled or lost its network."""
        self._source = source
        self._alerting = alerting
        self._clock = clock
        self._profiles = tuple(profiles)
        self._store = store
        self._diagnoses = diagnoses
        self._self_problems = self_problems
        prior = prior_state or PriorState()
        self._baselines = BaselineTable(prior.boards) if store is None else load_learned(store, clock.wall())
        self._next_save_seconds = clock.monotonic() + SAVE_LEARNED_EVERY_SECONDS
        self._pipelines = {
            spec.name: JobPipeline(
                spec, JobAssembler(spec), JobDetector(spec), JobLearner(spec, self._baselines, self._profiles)
            )
            for spec in specs
        }
        for job in prior.habits.keys() & self._pipelines.keys():
            self._pipelines[job].detector.restore_history(prior.habits[job])
        self._jobs_of_node: dict[str, tuple[str, ...]] = {}
        for spec in specs:
            for node in spec.nodes:
                self._jobs_of_node[node] = (*self._jobs_of_node.get(node, ()), spec.name)
        self._interval = min((spec.interval_seconds for spec in specs), default=1.0)
        self._network = NetworkLossDetector(self._interval)
        self._is_live = is_live
        self._last_samples: dict[str, NodeSample] = {}
        self._firing: dict[str, set[tuple[str, str, str]]] = {}  # job -> keys of its findings at the last evaluation
        self._ticks = 0
        self._last_tick_seconds: float | None = None
        self.snapshot = self._publish(source.links(), clock.monotonic(), clock.wall(), 0.0, ())

    def tick(self) -> Snapshot:
        """Take new samples, evaluate the jobs that are due, pass on their findings, publish. Cheap if none is due.

        An error while one job is evaluated is raised only after all other jobs were evaluated and reported.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        late = 0.0 if self._last_tick_seconds is None else max(0.0, now - self._last_tick_seconds - self._interval)
        self._last_tick_seconds = now
        # A node may belong to several jobs: each gets the sample.
        for sample in self._source.drain():
            self._last_samples[sample.node] = sample
            for job in self._jobs_of_node.get(sample.node, ()):
                self._pipelines[job].add_sample(sample, now)
        links = self._source.links()
        if self._is_live:
            self._network.update(links, now)
        network_loss = self._network.finding(links)
        if network_loss is None and self._network.is_paused(now):
            return self.snapshot
        due = [
            pipeline
            for pipeline in self._pipelines.values()
            if pipeline.is_due(links, now) and (network_loss is None or pipeline.all_nodes_answer(links))
        ]
        # A network loss is reported even if no job can be evaluated: that is when people need to know.
        if not due and network_loss is None:
            return self.snapshot
        findings = [] if network_loss is None else [network_loss]
        evaluated = {""}  # the watcher itself, whose findings have no job
        recoveries: dict[str, RecoveryEvidence] = {}
        delays: list[float] = []
        errors: list[Exception] = []
        for pipeline in due:
            try:
                job_sample = pipeline.assembler.assemble(links, now, wall)
                profile = self._user_profile(job_sample)
                job_findings = pipeline.evaluate(job_sample, profile, now, self._last_samples)
            except Exception as error:  # noqa: BLE001 - raised below: one job's bug must not leave the others unwatched
                pipeline.end_round(now)
                errors.append(error)
                continue
            evaluated.add(pipeline.spec.name)
            recoveries[pipeline.spec.name] = pipeline.recovery.update(job_sample)
            delays += self._detection_delays(pipeline.spec.name, job_findings, now)
            findings += job_findings
        if self._self_problems is not None:
            findings += self._self_problems.findings(now)
        self._alerting.observe(findings, frozenset(evaluated), now, wall, recoveries)
        self._save_learned(now)
        self.snapshot = self._publish(links, now, wall, late, tuple(delays))
        if errors:
            raise errors[0]
        return self.snapshot

    def prior_state(self) -> PriorState:
        """What has been learned so far, for the head of a recording."""
        histories = {name: pipeline.detector.history() for name, pipeline in self._pipelines.items()}
        return PriorState(self._baselines.values(), histories)

    def _save_learned(self, now: float) -> None:
        """At most every SAVE_LEARNED_EVERY_SECONDS, and only what changed. A full disk loses it, but no verdict."""
        if self._store is None or now < self._next_save_seconds:
            return
        # Also after an error: a full disk must not be retried at every tick.
        self._next_save_seconds = now + SAVE_LEARNED_EVERY_SECONDS
        changed = self._baselines.unsaved(MAX_ROWS_PER_SAVE)
        if not changed:
            return
        try:
            self._store.save_learned(changed)
        except StateStoreError as error:
            log.warning("learned GPU power baselines cannot be saved: %s", error)
            return
        self._baselines.mark_saved(changed)

    def _user_profile(self, sample: JobSample) -> PowerProfile | None:
        """The user's own profile for these GPUs, if one matches; None lets the classifier choose a shipped one."""
        return user_profile_for(self._profiles, next((r.gpu.name for r in sample.gpus if r.gpu.name), None))

    def _detection_delays(self, job: str, findings: Sequence[Finding], now: float) -> list[float]:
        """Seconds from the beginning of a condition to its first finding, for findings that are new in this tick."""
        before = self._firing.get(job, set())
        self._firing[job] = {finding.key for finding in findings}
        return [max(0.0, now - finding.since_seconds) for finding in findings if finding.key not in before]

    def _publish(
        self, links: Mapping[str, NodeLink], now: float, wall: float, late: float, delays: tuple[float, ...]
    ) -> Snapshot:
        self._ticks += 1
        return Snapshot(
            tick=self._ticks,
            seconds=now,
            wall_seconds=wall,
            tick_seconds=self._clock.monotonic() - now,
            late_seconds=late,
            jobs={name: pipeline.view for name, pipeline in self._pipelines.items() if pipeline.view is not None},
            nodes={
                node: NodeView(node, link, self._last_samples.get(node), self._jobs_of_node.get(node, ()))
                for node, link in links.items()
            },
            episodes=self._alerting.episodes(),
            deliveries=self._alerting.stats(),
            blind=self._network.since is not None,
            ticks_overrun=self._network.stalled_ticks,
            detection_delays_seconds=delays,
            diagnoses={} if self._diagnoses is None else self._diagnoses(),
        )


def load_learned(store: StateStore, wall_seconds: float) -> BaselineTable:
    """What an earlier process learned. Rows that cannot be read are logged and left out, to be learned again."""
    try:
        baselines, warnings = load_baselines(store.load_learned(), wall_seconds)
    except StateStoreError as error:
        log.warning("learned GPU power baselines cannot be read and will be learned again: %s", error)
        return BaselineTable()
    for warning in warnings[:MAX_WARNINGS]:
        log.warning("%s", warning)
    if len(warnings) > MAX_WARNINGS:
        log.warning("more learned GPU power baselines that cannot be read: %d", len(warnings) - MAX_WARNINGS)
    return baselines
