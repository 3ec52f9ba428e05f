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

from collectors.samples import HostStatus, NodeSample
from collectors.ssh.link import NodeLink
from watcher.blindness import Blindness
from watcher.judge.assemble import JobAssembler
from watcher.judge.classify import classify
from watcher.judge.detect import Detector
from watcher.judge.finding import Finding
from watcher.judge.job_sample import JobSample, JobSpec
from watcher.judge.learned import Knowledge, read_rows
from watcher.judge.learner import JobLearner
from watcher.judge.own_profiles import OwnProfile, own_profile
from watcher.judge.profiles import Profile
from watcher.known_before import KnownBefore
from watcher.snapshot import DeliveryStats, DiagnosisView, EpisodeView, JobView, NodeView, Snapshot
from watcher.store import StoreError
from watcher.timeline import Timeline, point_of
from watcher.witness import Witness, Witnessing

# A round is judged when every answering node has spoken, or this share of the interval after its first line.
ROUND_GRACE_INTERVALS: Final = 0.25
KEEP_EVERY_SECONDS: Final = 60.0
MOST_KEPT: Final = 2000  # rows at once, some 30 ms: a tick must not wait for thousands of boards
MOST_WARNINGS: Final = 5

log = logging.getLogger("wattwatch.engine")


class NodeSource(Protocol):
    """Where samples come from: the SSH fleet, a recording, a log."""

    def drain(self) -> list[NodeSample]: ...

    def links(self) -> Mapping[str, NodeLink]: ...


class Telling(Protocol):
    """Who is told. Jobs that were not judged in this tick keep their episodes: no news is not good news."""

    def observe(
        self,
        findings: Sequence[Finding],
        judged_jobs: frozenset[str],
        now: float,
        wall: float,
        witnesses: Mapping[str, Witness],
    ) -> None: ...

    def episodes(self) -> tuple[EpisodeView, ...]: ...

    def stats(self) -> DeliveryStats: ...


class Memory(Protocol):
    """Where what was learned of boards outlives a restart. Raises StoreError."""

    def learned_rows(self) -> Mapping[str, bytes]: ...

    def keep_learned(self, rows: Mapping[str, bytes | None]) -> None: ...


class Diagnoses(Protocol):
    """What is known of who holds which job up."""

    def views(self) -> Mapping[str, DiagnosisView]: ...


class Time(Protocol):
    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


@dataclass(slots=True)
class JobDesk:
    """What the engine keeps of one job between ticks."""

    spec: JobSpec
    assembler: JobAssembler
    detector: Detector
    learner: JobLearner
    timeline: Timeline = field(default_factory=Timeline)
    spoke: set[str] = field(default_factory=set)  # nodes heard since the job was last judged
    first_heard_seconds: float | None = None
    judged_seconds: float | None = None
    witnessing: Witnessing = field(default_factory=Witnessing)
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
        self, sample: JobSample, profile: Profile | None, now: float, said: Mapping[str, NodeSample]
    ) -> tuple[Finding, ...]:
        """Classify, detect, learn, and renew the view. `said`: the last word of every node."""
        verdict = classify(sample, profile, learned=self.learner.learned(sample))
        findings = self.detector.observe(verdict, sample, now)
        self.learner.look(sample, verdict, findings, self.detector.state, now, said)
        if self.learner.limits_moved:
            self.detector.limits_moved()
        self.skip(now)
        self.timeline.add(point_of(sample, self.detector.state))
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
        source: NodeSource,
        telling: Telling,
        clock: Time,
        profiles: Sequence[OwnProfile] = (),
        memory: Memory | None = None,
        known: KnownBefore | None = None,
        diagnoses: Diagnoses | None = None,
    ) -> None:
        """`profiles`: the user's own; `memory`: what was learned is read from it and kept in it; `known`: what a
        recording brings of it."""
        self._source = source
        self._telling = telling
        self._clock = clock
        self._profiles = tuple(profiles)
        self._memory = memory
        self._diagnoses = diagnoses
        known = known or KnownBefore()
        self._knowledge = Knowledge(known.boards) if memory is None else remembered(memory, clock.wall())
        self._keep_from = clock.monotonic() + KEEP_EVERY_SECONDS
        self._desks = {
            spec.name: JobDesk(
                spec, JobAssembler(spec), Detector(spec), JobLearner(spec, self._knowledge, self._profiles)
            )
            for spec in specs
        }
        for job in known.habits.keys() & self._desks.keys():
            self._desks[job].detector.take_up(known.habits[job])
        self._jobs_of_node: dict[str, tuple[str, ...]] = {}
        for spec in specs:
            for node in spec.nodes:
                self._jobs_of_node[node] = (*self._jobs_of_node.get(node, ()), spec.name)
        self._interval = min((spec.interval_seconds for spec in specs), default=1.0)
        self._blindness = Blindness(self._interval)
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
        witnesses: dict[str, Witness] = {}
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
            witnesses[desk.spec.name] = desk.witnessing.look(job_sample)
            delays += self._delays(desk.spec.name, found, now)
            findings += found
        self._telling.observe(findings, frozenset(judged), now, wall, witnesses)
        self._keep_learned(now)
        self.snapshot = self._publish(links, now, wall, late, tuple(delays))
        if failures:
            raise failures[0]
        return self.snapshot

    def known(self) -> KnownBefore:
        """What is learned by now: for the head of a recording."""
        habits = {name: desk.detector.habits() for name, desk in self._desks.items()}
        return KnownBefore(self._knowledge.values(), habits)

    def _keep_learned(self, now: float) -> None:
        """At most once in a while, and only what changed. A full disk costs what was learned, and no verdict."""
        if self._memory is None or now < self._keep_from:
            return
        self._keep_from = now + KEEP_EVERY_SECONDS
        changed = self._knowledge.unkept(MOST_KEPT)
        if not changed:
            return
        try:
            self._memory.keep_learned(changed)
        except StoreError as error:
            log.warning("what was learned of boards is not kept: %s", error)
            return
        self._knowledge.kept(changed)

    def _profile_of(self, sample: JobSample) -> Profile | None:
        """The user's own profile for this board, if one matches; else the judge picks from the shipped ones."""
        return own_profile(self._profiles, next((r.gpu.name for r in sample.gpus if r.gpu.name), None))

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


def remembered(memory: Memory, wall_seconds: float) -> Knowledge:
    """What was learned before; rows that are no values are named in the log and left out."""
    try:
        knowledge, warnings = read_rows(memory.learned_rows(), wall_seconds)
    except StoreError as error:
        log.warning("what was learned of boards cannot be read, and is learned anew: %s", error)
        return Knowledge()
    for warning in warnings[:MOST_WARNINGS]:
        log.warning("%s", warning)
    if len(warnings) > MOST_WARNINGS:
        log.warning("%d more learned values cannot be read", len(warnings) - MOST_WARNINGS)
    return knowledge
