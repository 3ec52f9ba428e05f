"""One tick, composed: samples -> job samples -> verdicts -> findings -> episodes -> snapshot.

The engine owns no thread, socket or file. It asks a NodeSource for what came, judges each job whose round of samples
is in, hands the findings to whoever tells people, and publishes a frozen Snapshot for everybody else. Live, replay,
demo and tests run this same code with other sources and clocks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.common.state_store import StateStoreError
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
from wattwatch.watcher.engine.self_monitoring import NetworkLossDetector
from wattwatch.watcher.engine.snapshot import DeliveryStats, DiagnosisView, EpisodeView, JobView, NodeView, Snapshot

# A round is judged when every answering node has spoken, or this share of the interval after its first line.
ROUND_GRACE_INTERVALS: Final = 0.25
SAVE_LEARNED_EVERY_SECONDS: Final = 60.0
MAX_ROWS_PER_SAVE: Final = 2000  # rows at once, some 30 ms: a tick must not wait for thousands of boards
MAX_WARNINGS: Final = 5

log = logging.getLogger("wattwatch.engine")


class SampleSource(Protocol):
    """Where samples come from: the SSH fleet, a recording, a log."""

    def drain(self) -> list[NodeSample]: ...

    def links(self) -> Mapping[str, NodeLink]: ...


class FindingSink(Protocol):
    """Who is told. Jobs that were not judged in this tick keep their episodes: no news is not good news."""

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, RecoveryEvidence],
    ) -> None: ...

    def episodes(self) -> tuple[EpisodeView, ...]: ...

    def stats(self) -> DeliveryStats: ...


class LearnedStore(Protocol):
    """Where what was learned of boards outlives a restart. Raises StoreError."""

    def load_learned(self) -> Mapping[str, bytes]: ...

    def save_learned(self, rows: Mapping[str, bytes | None]) -> None: ...


class DiagnosisProvider(Protocol):
    """What is known of who holds which job up."""

    def views(self) -> Mapping[str, DiagnosisView]: ...


class EngineClock(Protocol):
    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


@dataclass(slots=True)
class JobPipeline:
    """What the engine keeps of one job between ticks."""

    spec: JobSpec
    assembler: JobAssembler
    detector: JobDetector
    learner: JobLearner
    timeline: Timeline = field(default_factory=Timeline)
    spoke: set[str] = field(default_factory=set)  # nodes heard since the job was last judged
    first_heard_seconds: float | None = None
    judged_seconds: float | None = None
    witnessing: RecoveryTracker = field(default_factory=RecoveryTracker)
    view: JobView | None = None

    def hear(self, sample: NodeSample, now: float) -> None:
        self.assembler.add(sample)
        self.spoke.add(sample.node)
        if self.first_heard_seconds is None:
            self.first_heard_seconds = now

    def is_due(self, links: Mapping[str, NodeLink], now: float) -> bool:
        """The round is in, or waited long enough for its stragglers; a silent job is looked at once an interval."""
        if self.first_heard_seconds is not None:
            answering = {n for n in self.spec.nodes if n in links and links[n].status is HostStatus.OK}
            grace = ROUND_GRACE_INTERVALS * self.spec.interval_seconds
            return self.spoke >= answering or now - self.first_heard_seconds >= grace
        return self.judged_seconds is None or now - self.judged_seconds >= self.spec.interval_seconds

    def is_in_sight(self, links: Mapping[str, NodeLink]) -> bool:
        """All of its nodes answer: it can be judged although others are out of sight."""
        return all(node in links and links[node].status is HostStatus.OK for node in self.spec.nodes)

    def skip(self, now: float) -> None:
        """This round is over for the job, judged or not."""
        self.spoke.clear()
        self.first_heard_seconds = None
        self.judged_seconds = now

    def judge(
        self, sample: JobSample, profile: PowerProfile | None, now: float, said: Mapping[str, NodeSample]
    ) -> tuple[Finding, ...]:
        """Classify, detect, learn, and renew the view. `said`: the last word of every node."""
        verdict = classify(sample, profile, learned=self.learner.learned(sample))
        findings = self.detector.observe(verdict, sample, now)
        self.learner.update(sample, verdict, findings, self.detector.state, now, said)
        if self.learner.power_limits_changed:
            self.detector.power_limits_changed()
        self.skip(now)
        self.timeline.add(timeline_point(sample, self.detector.state))
        self.view = JobView(
            name=self.spec.name,
            state=self.detector.state,
            state_since_wall_seconds=sample.wall_seconds - (now - self.detector.state_since),
            reason=self.detector.reason,
            sample=sample,
            verdict=verdict,
            findings=findings,
            wasted_gpu_seconds=dict(self.detector.wasted_gpu_seconds),
            timeline=self.timeline.points(),
            wasted_joules=dict(self.detector.wasted_joules),
        )
        return findings


class Engine:
    """Judges all jobs. `tick` is called by one thread; `snapshot` may be read by any."""

    def __init__(
        self,
        specs: Sequence[JobSpec],
        source: SampleSource,
        telling: FindingSink,
        clock: EngineClock,
        profiles: Sequence[UserProfile] = (),
        memory: LearnedStore | None = None,
        known: PriorState | None = None,
        diagnoses: DiagnosisProvider | None = None,
    ) -> None:
        """`profiles`: the user's own; `memory`: what was learned is read from it and kept in it; `known`: what a
        recording brings of it."""
        self._source = source
        self._telling = telling
        self._clock = clock
        self._profiles = tuple(profiles)
        self._memory = memory
        self._diagnoses = diagnoses
        known = known or PriorState()
        self._knowledge = BaselineTable(known.boards) if memory is None else load_learned(memory, clock.wall())
        self._keep_from = clock.monotonic() + SAVE_LEARNED_EVERY_SECONDS
        self._desks = {
            spec.name: JobPipeline(
                spec, JobAssembler(spec), JobDetector(spec), JobLearner(spec, self._knowledge, self._profiles)
            )
            for spec in specs
        }
        for job in known.habits.keys() & self._desks.keys():
            self._desks[job].detector.restore_history(known.habits[job])
        self._jobs_of_node: dict[str, tuple[str, ...]] = {}
        for spec in specs:
            for node in spec.nodes:
                self._jobs_of_node[node] = (*self._jobs_of_node.get(node, ()), spec.name)
        self._interval = min((spec.interval_seconds for spec in specs), default=1.0)
        self._blindness = NetworkLossDetector(self._interval)
        self._last_samples: dict[str, NodeSample] = {}
        self._open: dict[str, set[tuple[str, str, str]]] = {}  # job -> keys of its findings at the last look
        self._ticks = 0
        self._last_tick_seconds: float | None = None
        self.snapshot = self._publish(source.links(), clock.monotonic(), clock.wall(), 0.0, ())

    def tick(self) -> Snapshot:
        """Take what came, judge what is due, tell, publish. Cheap when nothing is due.

        An error while one job is judged is raised when the others have been judged and told.
        """
        now, wall = self._clock.monotonic(), self._clock.wall()
        late = 0.0 if self._last_tick_seconds is None else max(0.0, now - self._last_tick_seconds - self._interval)
        self._last_tick_seconds = now
        for sample in self._source.drain():
            self._last_samples[sample.node] = sample
            for job in self._jobs_of_node.get(sample.node, ()):
                self._desks[job].hear(sample, now)
        links = self._source.links()
        self._blindness.look(links, now)
        blind = self._blindness.finding(links)
        if blind is None and self._blindness.settling(now):
            return self.snapshot
        due = [d for d in self._desks.values() if d.is_due(links, now) and (blind is None or d.is_in_sight(links))]
        if not due and blind is None:
            return self.snapshot
        findings = [] if blind is None else [blind]
        judged = {""}
        witnesses: dict[str, RecoveryEvidence] = {}
        delays: list[float] = []
        failures: list[Exception] = []
        for desk in due:
            try:
                job_sample = desk.assembler.assemble(links, now, wall)
                found = desk.judge(job_sample, self._profile_of(job_sample), now, self._last_samples)
            except Exception as error:  # noqa: BLE001 - raised below: one job's trouble must not leave the others unjudged
                desk.skip(now)
                failures.append(error)
                continue
            judged.add(desk.spec.name)
            witnesses[desk.spec.name] = desk.witnessing.update(job_sample)
            delays += self._delays(desk.spec.name, found, now)
            findings += found
        self._telling.observe(findings, frozenset(judged), now, wall, witnesses)
        self._keep_learned(now)
        self.snapshot = self._publish(links, now, wall, late, tuple(delays))
        if failures:
            raise failures[0]
        return self.snapshot

    def known(self) -> PriorState:
        """What is learned by now: for the head of a recording."""
        habits = {name: desk.detector.history() for name, desk in self._desks.items()}
        return PriorState(self._knowledge.values(), habits)

    def _keep_learned(self, now: float) -> None:
        """At most once in a while, and only what changed. A full disk costs what was learned, and no verdict."""
        if self._memory is None or now < self._keep_from:
            return
        self._keep_from = now + SAVE_LEARNED_EVERY_SECONDS
        changed = self._knowledge.unsaved(MAX_ROWS_PER_SAVE)
        if not changed:
            return
        try:
            self._memory.save_learned(changed)
        except StateStoreError as error:
            log.warning("what was learned of boards is not kept: %s", error)
            return
        self._knowledge.kept(changed)

    def _profile_of(self, sample: JobSample) -> PowerProfile | None:
        """The user's own profile for this board, if one matches; else the judge picks from the shipped ones."""
        return user_profile_for(self._profiles, next((r.gpu.name for r in sample.gpus if r.gpu.name), None))

    def _delays(self, job: str, findings: Sequence[Finding], now: float) -> list[float]:
        """Seconds from the condition to the first time it is said, for the findings that are new in this tick."""
        before = self._open.get(job, set())
        self._open[job] = {finding.key for finding in findings}
        return [max(0.0, now - finding.since_seconds) for finding in findings if finding.key not in before]

    def _publish(
        self, links: Mapping[str, NodeLink], now: float, wall: float, late: float, delays: tuple[float, ...]
    ) -> Snapshot:
        self._ticks += 1
        return Snapshot(
            tick=self._ticks,
            wall_seconds=wall,
            tick_seconds=self._clock.monotonic() - now,
            late_seconds=late,
            jobs={name: desk.view for name, desk in self._desks.items() if desk.view is not None},
            nodes={
                node: NodeView(node, link, self._last_samples.get(node), self._jobs_of_node.get(node, ()))
                for node, link in links.items()
            },
            episodes=self._telling.episodes(),
            deliveries=self._telling.stats(),
            blind=self._blindness.since is not None,
            ticks_overrun=self._blindness.starved_looks,
            detection_delays_seconds=delays,
            diagnoses={} if self._diagnoses is None else self._diagnoses.views(),
        )


def load_learned(memory: LearnedStore, wall_seconds: float) -> BaselineTable:
    """What was learned before; rows that are no values are named in the log and left out."""
    try:
        knowledge, warnings = load_baselines(memory.load_learned(), wall_seconds)
    except StateStoreError as error:
        log.warning("what was learned of boards cannot be read, and is learned anew: %s", error)
        return BaselineTable()
    for warning in warnings[:MAX_WARNINGS]:
        log.warning("%s", warning)
    if len(warnings) > MAX_WARNINGS:
        log.warning("%d more learned values cannot be read", len(warnings) - MAX_WARNINGS)
    return knowledge
