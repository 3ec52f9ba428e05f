"""Decides when a hung job is captured and diagnosed, and publishes the results.

A hang is captured at once, while its evidence exists: torch's watchdog aborts a hung job after about ten minutes, and
stacks, flight records and processes are gone with it. A suspicion is therefore enough to start. If that capture proved
nothing and the hang is confirmed later, there is a second capture, and never a third.

`update` is called after each tick of the engine. Each investigation runs in a thread of its own, because a file system
or a node that hangs together with the job must not block the engine; its result is picked up at a later tick.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.watcher.detection.alerts import ALERT_KINDS
from wattwatch.watcher.detection.model import JobSample
from wattwatch.watcher.diagnosis.live_evidence import NodeKernelEvent, collect_live_evidence
from wattwatch.watcher.diagnosis.model import Diagnosis
from wattwatch.watcher.engine.snapshot import DiagnosisStage, DiagnosisView, EpisodeView, JobView, Snapshot
from wattwatch.watcher.incidents.investigation import InvestigationResult, Investigator, capture_directory_name

CAPTURE_ALERTS: Final = frozenset(kind.name.value for kind in ALERT_KINDS.values() if kind.captures_evidence)
# Limits on the load that captures put on nodes and on the watcher's host; chosen.
MAX_CONCURRENT_CAPTURES: Final = 2
MAX_CAPTURES_PER_HOUR: Final = 6  # for each job
MAX_CAPTURES_PER_EPISODE: Final = 2
HOUR_SECONDS: Final = 3600.0

# The kernel logs an event once, and the hang that it causes is detected minutes later.
KERNEL_EVENT_SECONDS: Final = 900.0
MAX_KERNEL_EVENTS: Final = 200  # for each job

log = logging.getLogger("wattwatch.incidents")


@dataclass(slots=True)
class EpisodeInvestigation:
    """The captures of one episode."""

    episode: EpisodeView
    view: JobView  # the latest view of the job during the episode
    captures: int = 0
    running: bool = False
    began_confirmed: bool = False  # whether the hang was confirmed when the latest capture began
    result: InvestigationResult | None = None

    def needs_capture(self) -> bool:
        """True for the first capture; for a second one if the first was of a suspicion and proved nothing."""
        if self.running or self.captures >= MAX_CAPTURES_PER_EPISODE:
            return False
        if self.captures == 0:
            return True
        proved = self.result is not None and self.result.diagnosis is not None and self.result.diagnosis.conclusive
        return self.episode.confirmed and not self.began_confirmed and not proved


@dataclass(slots=True)
class KernelEventHistory:
    """Recent kernel log lines of the nodes of each job. Times are monotonic seconds of the watcher."""

    _lines: dict[str, dict[tuple[str, str], tuple[float, NodeKernelEvent]]] = field(default_factory=dict)

    def add(self, sample: JobSample, now: float) -> None:
        lines = self._lines.setdefault(sample.job, {})
        for node in sample.nodes:
            for event in node.kernel_events:
                lines.setdefault((node.node, event.text), (now, NodeKernelEvent(node.node, event, event.age_seconds)))
        for key in [key for key, (received, _) in lines.items() if now - received > KERNEL_EVENT_SECONDS]:
            del lines[key]
        while len(lines) > MAX_KERNEL_EVENTS:
            del lines[next(iter(lines))]

    def events(self, job: str, now: float) -> tuple[NodeKernelEvent, ...]:
        """Events not older than KERNEL_EVENT_SECONDS, by the time of the node; else by the time they were received."""
        found = []
        for received, event in self._lines.get(job, {}).values():
            age = None if event.age_seconds is None else event.age_seconds + now - received
            if (now - received if age is None else age) <= KERNEL_EVENT_SECONDS:
                found.append(replace(event, age_seconds=age))
        return tuple(found)


class CaptureScheduler:
    """`update` and `stop` are called from the engine's thread; `views` from any thread."""

    def __init__(
        self,
        directory: Path,
        jobs: Mapping[str, bool],
        investigator: Investigator,
        on_diagnosis: Callable[[str, Diagnosis], None],
        clock: Clock,
    ) -> None:
        """`directory`: where captures are stored, beside the recordings of incidents. `jobs`: every job, and whether
        its configuration allows captures. `on_diagnosis` is called from `update`, with the id of the open episode."""
        self._directory = directory
        self._investigator, self._on_diagnosis, self._clock = investigator, on_diagnosis, clock
        self._jobs = {job for job, allowed in jobs.items() if allowed}
        self._views = {job: DiagnosisView(job, DiagnosisStage.OFF) for job, allowed in jobs.items() if not allowed}
        self._investigations: dict[str, EpisodeInvestigation] = {}  # by episode id
        self._started: dict[str, deque[float]] = {}  # by job, when its captures began
        self._kernel_events = KernelEventHistory()
        self._results: queue.SimpleQueue[tuple[str, InvestigationResult]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def views(self) -> Mapping[str, DiagnosisView]:
        """The latest diagnosis of each job that was captured, and an entry for each job that must not be."""
        return self._views

    def update(self, snapshot: Snapshot) -> None:
        """Picks up results and starts the captures that are due."""
        now = self._clock.monotonic()
        for view in snapshot.jobs.values():
            self._kernel_events.add(view.sample, now)
        self._take_results()
        still_open = {each.id: each for each in snapshot.episodes if each.closed_wall_seconds is None}
        for episode in still_open.values():
            if episode.alert in CAPTURE_ALERTS and episode.job in self._jobs and episode.job in snapshot.jobs:
                self._follow(episode, snapshot.jobs[episode.job], now)
        closed = {each.id: each for each in snapshot.episodes if each.closed_wall_seconds is not None}
        for episode_id in [each for each in self._investigations if each not in still_open]:
            self._close(episode_id, closed.get(episode_id))

    def stop(self, timeout_seconds: float = 0.5) -> None:
        """A capture in progress ends with the process; the files that it has written stay."""
        for thread in self._threads:
            thread.join(timeout_seconds / max(1, len(self._threads)))

    def _follow(self, episode: EpisodeView, view: JobView, now: float) -> None:
        # After a restart of the watcher an episode may still be open although its job works again: capture only what
        # the detector reports now.
        if all(finding.alert.value != episode.alert for finding in view.findings):
            return
        investigation = self._investigations.setdefault(episode.id, EpisodeInvestigation(episode, view))
        investigation.episode, investigation.view = episode, view
        if investigation.needs_capture() and self._may_start(episode.job, now):
            self._start_investigation(investigation, now)

    def _may_start(self, job: str, now: float) -> bool:
        running = [each.episode.job for each in self._investigations.values() if each.running]
        started = self._started.setdefault(job, deque())
        while started and now - started[0] > HOUR_SECONDS:
            started.popleft()
        return len(running) < MAX_CONCURRENT_CAPTURES and job not in running and len(started) < MAX_CAPTURES_PER_HOUR

    def _start_investigation(self, investigation: EpisodeInvestigation, now: float) -> None:
        episode, view = investigation.episode, investigation.view
        wall, job = self._clock.wall(), episode.job
        events = self._kernel_events.events(job, now)
        live = collect_live_evidence(view.sample, view.verdict, view.findings, view.state, events)
        directory = self._directory / capture_directory_name(job, episode.alert, wall, investigation.captures)
        investigation.captures += 1
        investigation.running, investigation.began_confirmed = True, episode.confirmed
        self._started[job].append(now)
        before = self._views.get(job)
        self._publish(
            DiagnosisView(
                job,
                DiagnosisStage.RUNNING,
                episode.id,
                episode.alert,
                wall,
                diagnosis=None if before is None or before.episode_id != episode.id else before.diagnosis,
                directory=str(directory),
            )
        )
        log.info("%s of job %s: saving evidence to %s", episode.alert, job, directory)
        self._start_thread(
            lambda: self._results.put((episode.id, self._investigator.run(episode, view, live, directory))),
            f"diagnosis of {job}",
        )

    def _start_thread(self, work: Callable[[], object], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take_results(self) -> None:
        while not self._results.empty():
            episode_id, result = self._results.get()
            investigation = self._investigations.get(episode_id)
            if investigation is None:
                continue
            investigation.running, investigation.result = False, result
            episode = investigation.episode
            self._publish_result(investigation, result)
            if result.diagnosis is not None:
                log.info("%s of %s: %s", episode.alert, episode.job, result.diagnosis.summary)
                self._on_diagnosis(episode_id, result.diagnosis)
            else:
                log.warning("%s of job %s: no diagnosis: %s", episode.alert, episode.job, result.trouble)

    def _publish_result(self, investigation: EpisodeInvestigation, result: InvestigationResult) -> None:
        view = self._views[investigation.episode.job]
        if view.episode_id == investigation.episode.id:
            self._publish(
                replace(
                    view,
                    stage=DiagnosisStage.DONE if result.diagnosis is not None else DiagnosisStage.FAILED,
                    ended_wall_seconds=result.ended_wall_seconds,
                    diagnosis=result.diagnosis or view.diagnosis,
                    trouble=result.trouble,
                    directory=str(result.directory),
                    report=view.report if result.report is None else str(result.report),
                )
            )

    def _publish(self, view: DiagnosisView) -> None:
        # A new dictionary each time: readers in other threads hold the old one.
        self._views = {**self._views, view.job: view}

    def _close(self, episode_id: str, closed: EpisodeView | None) -> None:
        """Writes the report of a closed episode once more, with its duration and its final cost."""
        investigation = self._investigations[episode_id]
        if investigation.running:
            return  # close when its result has come
        del self._investigations[episode_id]
        result = investigation.result
        if closed is not None and result is not None and result.diagnosis is not None:
            self._start_thread(
                lambda: self._investigator.write_report(investigation.view, closed, result), f"report of {closed.job}"
            )
