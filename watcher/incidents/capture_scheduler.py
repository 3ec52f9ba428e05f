"""What the kernels of a job's nodes have said lately: the kernel says a thing once, and a hang shows minutes later."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from wattwatch.watcher.detection.model import AlertName, JobSample
from wattwatch.watcher.diagnosis.live_evidence import NodeKernelEvent, collect_live_evidence
from wattwatch.watcher.diagnosis.model import Diagnosis
from wattwatch.watcher.engine.snapshot import DiagnosisStage, DiagnosisView, EpisodeView, JobView, Snapshot
from wattwatch.watcher.incidents.investigation import InvestigationResult, Investigator, capture_directory_name

KERNEL_EVENT_SECONDS: Final = 900.0  # what was said within this time before is evidence
MAX_KERNEL_EVENTS: Final = 200  # a job


@dataclass(slots=True)
class KernelEventHistory:
    """By job. Times are the watcher's monotonic seconds."""

    _lines: dict[str, dict[tuple[str, str], tuple[float, NodeKernelEvent]]] = field(default_factory=dict)

    def add(self, sample: JobSample, now: float) -> None:
        lines = self._lines.setdefault(sample.job, {})
        for node in sample.nodes:
            for event in node.kernel_events:
                lines.setdefault((node.node, event.text), (now, NodeKernelEvent(node.node, event, event.age_seconds)))
        for key in [key for key, (heard, _) in lines.items() if now - heard > KERNEL_EVENT_SECONDS]:
            del lines[key]
        while len(lines) > MAX_KERNEL_EVENTS:
            del lines[next(iter(lines))]

    def events(self, job: str, now: float) -> tuple[NodeKernelEvent, ...]:
        """Those that were written within KERNEL_SECONDS; where the node does not tell when, heard within them."""
        found = []
        for heard, event in self._lines.get(job, {}).values():
            age = None if event.age_seconds is None else event.age_seconds + now - heard
            if (now - heard if age is None else age) <= KERNEL_EVENT_SECONDS:
                found.append(replace(event, age_seconds=age))
        return tuple(found)


# A hung job is looked into at once, while its evidence lives: one capture and one diagnosis an episode.
#
# Told after each tick, like `incidents.py`. Each inquiry runs in a thread of its own, so that no file system or node that
# hangs with the job holds the engine up; its result is taken at a later tick. torch's watchdog ends a hung job after some
# ten minutes, and all evidence with it: a suspicion is enough to begin. Where that proved nothing and the hang is
# confirmed later, it is looked into once more, and never a third time.
#
# Bounds: AT_ONCE_MOST together, one a job, AN_HOUR_MOST a job and hour, and as many captures kept as recordings are.

CAPTURE_ALERTS: Final = frozenset({AlertName.JOB_HUNG.value, AlertName.CHECKPOINT_STALLED.value})
MAX_CONCURRENT_CAPTURES: Final = 2
MAX_CAPTURES_PER_HOUR: Final = 6
MAX_CAPTURES_PER_EPISODE: Final = 2  # an episode
HOUR_SECONDS: Final = 3600.0

log = logging.getLogger("wattwatch.diagnosing")


class SchedulerClock(Protocol):
    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


@dataclass(slots=True)
class EpisodeInvestigation:
    """One episode that is, or was, looked into."""

    episode: EpisodeView
    view: JobView  # the job as it was last seen in the episode
    captures: int = 0
    running: bool = False
    began_confirmed: bool = False  # whether the hang was confirmed when the latest capture began
    result: InvestigationResult | None = None

    def needs_capture(self) -> bool:
        """The first; or a second, where the first was of a suspicion and proved nothing."""
        if self.running or self.captures >= MAX_CAPTURES_PER_EPISODE:
            return False
        if self.captures == 0:
            return True
        proved = self.result is not None and self.result.diagnosis is not None and self.result.diagnosis.conclusive
        return self.episode.confirmed and not self.began_confirmed and not proved


class CaptureScheduler:
    """`look` and `stop` are called by the engine's thread, `views` by any."""

    def __init__(
        self,
        directory: Path,
        jobs: Mapping[str, bool],
        inquiry: Investigator,
        tell: Callable[[str, Diagnosis], None],
        clock: SchedulerClock,
    ) -> None:
        """`directory`: where the recordings of incidents lie; `jobs`: each with whether it may be looked into; `tell`
        is given the id of an open episode and its diagnosis, on the engine's thread."""
        self._directory = directory
        self._inquiry, self._tell, self._clock = inquiry, tell, clock
        self._jobs = {job for job, allowed in jobs.items() if allowed}
        self._views = {job: DiagnosisView(job, DiagnosisStage.OFF) for job, allowed in jobs.items() if not allowed}
        self._cases: dict[str, EpisodeInvestigation] = {}  # by the id of the episode
        self._begun: dict[str, deque[float]] = {}  # by job, when captures began
        self._kernel = KernelEventHistory()
        self._results: queue.SimpleQueue[tuple[str, InvestigationResult]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def views(self) -> Mapping[str, DiagnosisView]:
        """The latest of each job that was looked into, and those that must not be."""
        return self._views

    def look(self, snapshot: Snapshot) -> None:
        """Take what has come, and begin what is due."""
        now = self._clock.monotonic()
        for view in snapshot.jobs.values():
            self._kernel.add(view.sample, now)
        self._take_results()
        still_open = {each.id: each for each in snapshot.episodes if each.closed_wall_seconds is None}
        for episode in still_open.values():
            if episode.alert in CAPTURE_ALERTS and episode.job in self._jobs and episode.job in snapshot.jobs:
                self._follow(episode, snapshot.jobs[episode.job], now)
        ended = {each.id: each for each in snapshot.episodes if each.closed_wall_seconds is not None}
        for identifier in [each for each in self._cases if each not in still_open]:
            self._close(identifier, ended.get(identifier))

    def stop(self, timeout_seconds: float = 0.5) -> None:
        """A capture that is under way ends with the process: the evidence it has written stays."""
        for thread in self._threads:
            thread.join(timeout_seconds / max(1, len(self._threads)))

    def _follow(self, episode: EpisodeView, view: JobView, now: float) -> None:
        """Only what the detector sees now: an episode may be open from before a restart, and its job at work."""
        if all(finding.alert.value != episode.alert for finding in view.findings):
            return
        case = self._cases.setdefault(episode.id, EpisodeInvestigation(episode, view))
        case.episode, case.view = episode, view
        if case.needs_capture() and self._may_begin(episode.job, now):
            self._begin(case, now)

    def _may_begin(self, job: str, now: float) -> bool:
        running = [case.episode.job for case in self._cases.values() if case.running]
        begun = self._begun.setdefault(job, deque())
        while begun and now - begun[0] > HOUR_SECONDS:
            begun.popleft()
        return len(running) < MAX_CONCURRENT_CAPTURES and job not in running and len(begun) < MAX_CAPTURES_PER_HOUR

    def _begin(self, case: EpisodeInvestigation, now: float) -> None:
        wall, job = self._clock.wall(), case.episode.job
        view = case.view
        seen = collect_live_evidence(
            view.sample, view.verdict, view.findings, view.state, self._kernel.events(job, now)
        )
        directory = self._directory / capture_directory_name(job, case.episode.alert, wall, case.captures)
        case.captures += 1
        case.running, case.began_confirmed = True, case.episode.confirmed
        self._begun[job].append(now)
        before = self._views.get(job)
        self._show(
            DiagnosisView(
                job,
                DiagnosisStage.RUNNING,
                case.episode.id,
                case.episode.alert,
                wall,
                diagnosis=None if before is None or before.episode_id != case.episode.id else before.diagnosis,
                directory=str(directory),
            )
        )
        log.info("%s of %s: looking into it, in %s", case.episode.alert, job, directory)
        episode = case.episode
        self._start(
            lambda: self._results.put((episode.id, self._inquiry.run(episode, view, seen, directory))),
            f"diagnosis of {job}",
        )

    def _start(self, work: Callable[[], object], name: str) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take_results(self) -> None:
        while not self._results.empty():
            identifier, result = self._results.get()
            case = self._cases.get(identifier)
            if case is None:
                continue
            case.running, case.result = False, result
            self._show_result(case, result)
            if result.diagnosis is not None:
                log.info("%s of %s: %s", case.episode.alert, case.episode.job, result.diagnosis.summary)
                self._tell(identifier, result.diagnosis)
            else:
                log.warning("%s of %s is not diagnosed: %s", case.episode.alert, case.episode.job, result.trouble)

    def _show_result(self, case: EpisodeInvestigation, result: InvestigationResult) -> None:
        view = self._views[case.episode.job]
        if view.episode_id == case.episode.id:
            self._show(
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

    def _show(self, view: DiagnosisView) -> None:
        self._views = {**self._views, view.job: view}

    def _close(self, identifier: str, ended: EpisodeView | None) -> None:
        """The episode is over: its report is drawn once more, with how long it lasted and what it cost in the end."""
        case = self._cases[identifier]
        if case.running:
            return  # its result is worth waiting for
        del self._cases[identifier]
        result = case.result
        if ended is not None and result is not None and result.diagnosis is not None:
            self._start(lambda: self._inquiry.write_report(case.view, ended, result), f"report of {ended.job}")
