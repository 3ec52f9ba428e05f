"""How the daemon looks into a hung job: over the fleet's own connections, with what the configuration allows."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.alerting.episode import EpisodeDiagnosis
from wattwatch.watcher.common.state_store import StateStore, StateStoreError
from wattwatch.watcher.config.settings import Config, probe_request_for
from wattwatch.watcher.daemon.maintenance import MaintenanceScheduler, MaintenanceTask
from wattwatch.watcher.daemon.preflight import preflight_problems, read_token, ssh_settings, to_user_profile
from wattwatch.watcher.daemon.systemd import SystemdNotifier
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.diagnosis.capture.collector import capture_evidence, plan_capture
from wattwatch.watcher.diagnosis.model import Diagnosis
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.latest import LatestSnapshot
from wattwatch.watcher.engine.own_trouble import SelfProblems, SelfProblemSink
from wattwatch.watcher.engine.snapshot import JobView, Snapshot
from wattwatch.watcher.incidents.capture_scheduler import CaptureScheduler
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisProcesses
from wattwatch.watcher.incidents.investigation import Investigator, render_report
from wattwatch.watcher.incidents.recorder import IncidentRecorder
from wattwatch.watcher.recordings.format import RecordingWriter
from wattwatch.watcher.web.app import create_app
from wattwatch.watcher.web.events import EventHub
from wattwatch.watcher.web.metrics import WatcherMetrics
from wattwatch.watcher.web.server import ListenError, WebServer, open_listener


def create_capture_scheduler(
    config: Config,
    specs: Sequence[JobSpec],
    fleet: Fleet,
    teller: AlertManager,
    clock: Clock,
    concluding: DiagnosisProcesses,
    incidents: Path,
) -> CaptureScheduler:
    """`incidents`: where the recordings of incidents lie."""
    by_name = {spec.name: spec for spec in specs}
    settings = {job.name: job.capture_settings for job in config.jobs}

    def ask(view: JobView, directory: Path) -> None:
        plan = plan_capture(by_name[view.name], view.sample, settings[view.name])
        capture_evidence(plan, fleet.channels, directory, clock)

    def tell(episode_id: str, diagnosis: Diagnosis) -> None:
        teller.add_diagnosis(episode_id, EpisodeDiagnosis(diagnosis.summary, diagnosis.conclusive, diagnosis.advice))

    allowed = {job.name: job.capture for job in config.jobs}
    return CaptureScheduler(
        incidents, allowed, Investigator(ask, concluding.diagnose, render_report, clock.wall), tell, clock
    )


# The daemon: store, teller, fleet, engine and web server, started in this order and stopped in the other.
#
# Threads: the fleet's own, the teller's, one that turns the engine, one with the event loop of the web server, one for
# slow tasks. They meet at the frozen snapshot only. The main thread waits for signals and speaks to systemd.

log = logging.getLogger("wattwatch.service")

STATE_FILE: Final = "state.db"
INCIDENTS_DIRECTORY: Final = "incidents"
# The lines of one round arrive together: a pause this long after the first lets one tick take them all.
GATHER_SECONDS: Final = 0.02
# With nothing new, the engine looks this often: a silent node and a round with stragglers are noticed by time alone.
IDLE_TICK_INTERVALS: Final = 0.125
ENGINE_PROBLEM_HOLD_SECONDS: Final = 120.0
# Closed episodes are kept this long.
RETENTION_SECONDS: Final = 30 * 86400.0
PRUNE_EVERY_SECONDS: Final = 3600.0
DISK_EVERY_SECONDS: Final = 60.0
DISK_MIN_FREE_BYTES: Final = 100_000_000
STATUS_EVERY_SECONDS: Final = 5.0
STARTUP_POLL_SECONDS: Final = 0.1
STOP_SECONDS: Final = 5.0  # real: after this the process ends, whatever still holds it
SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


class ServiceStartError(Exception):
    """The service does not start; `problems` says why, a sentence each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class Service:
    """One watcher. `start` and `stop` for use within a process; `run` is the daemon's main thread."""

    def __init__(self, config: Config, clock: Clock | None = None, record: Path | None = None) -> None:
        """`record`: a file that is written anew with all that the nodes say, for `wattwatch replay`."""
        self._config = config
        self._record = record
        self._recorder: RecordingWriter | None = None
        self._clock = clock or Clock()
        self._specs = tuple(job.spec(config.watcher.interval) for job in config.jobs)
        self._interval = config.watcher.interval
        self._own = WatcherMetrics()
        self._trouble = SelfProblems()
        self._hub = EventHub()
        self._stopping = threading.Event()
        self._failure_kinds: set[str] = set()
        self._undo = ExitStack()
        self._engine_thread = threading.Thread(target=self._watch, name="engine", daemon=True)
        self.address = ""  # http://host:port once started

    @property
    def snapshot(self) -> Snapshot:
        """What is known now; after `start`."""
        return self._latest.snapshot

    def start(self) -> None:
        """Everything, or nothing: raises CannotServe, and what was begun is undone."""
        problems = preflight_problems(self._config)
        if problems:
            raise ServiceStartError(problems)
        try:
            self._start()
        except (ListenError, StateStoreError, OSError, ValueError) as error:
            self._undo.close()
            raise ServiceStartError([str(error)]) from error
        except BaseException:
            self._undo.close()
            raise

    def _start(self) -> None:
        section, undo = self._config.watcher, self._undo
        listener = open_listener(section.listen_host, section.listen_port)
        undo.callback(listener.close)
        self.address = f"http://{url_host(section.listen_host)}:{listener.getsockname()[1]}"
        self._store = StateStore(section.state_directory / STATE_FILE)
        undo.callback(self._store.close)
        self._teller = AlertManager(
            self._store,
            self._config.receivers,
            self._config.routes,
            self._clock,
            jobs=[spec.name for spec in self._specs],
            reminder_seconds=section.reminder,
            external_url=section.external_url,
        )
        if self._record is not None:
            self._recorder = RecordingWriter(self._record, self._specs)
            undo.callback(self._recorder.close)
        self._incidents = IncidentRecorder(section.state_directory / INCIDENTS_DIRECTORY, self._specs)
        self._incidents.start()
        undo.callback(self._incidents.stop)
        nodes = sorted({node for spec in self._specs for node in spec.nodes})
        self._fleet = Fleet(
            {node: probe_request_for(self._specs, node) for node in nodes},
            ssh_settings(self._config.ssh),
            self._clock,
            self._hear,
        )
        incidents = section.state_directory / INCIDENTS_DIRECTORY
        self._concluding = DiagnosisProcesses()
        self._diagnosing = create_capture_scheduler(
            self._config, self._specs, self._fleet, self._teller, self._clock, self._concluding, incidents
        )
        self._engine = Engine(
            self._specs,
            self._fleet,
            SelfProblemSink(self._teller, self._trouble),
            self._clock,
            tuple(to_user_profile(profile) for profile in self._config.profiles),
            self._store,
            diagnoses=self._diagnosing,
        )
        if self._recorder is not None:
            self._recorder.known(self._engine.known())
        self._latest = LatestSnapshot(self._engine.snapshot, self._clock, self._interval, self._incidents.newest)
        self._web = WebServer(create_app(self._latest, self._own, self._hub, read_token(section)), listener, self._hub)
        self._slow_tasks = MaintenanceScheduler(
            (
                MaintenanceTask("prune", PRUNE_EVERY_SECONDS, self._prune),
                MaintenanceTask("disk", DISK_EVERY_SECONDS, self._look_at_disk),
            ),
            self._own,
        )
        # From here on in reverse: who hears last is told to stop first.
        undo.callback(self._web.join, 2.5)
        undo.callback(self._teller.stop, self._seconds(1.0))
        undo.callback(self._fleet.stop, self._seconds(1.5))
        undo.callback(self._diagnosing.stop)
        undo.callback(self._concluding.stop)
        undo.callback(self._join_engine, 1.0)
        undo.callback(self._slow_tasks.stop)
        undo.callback(self._web.begin_stop)
        undo.callback(self._stopping.set)
        self._teller.start()
        self._fleet.start()
        self._engine_thread.start()
        self._web.start()
        self._slow_tasks.start()
        for note in self._fleet.notes:
            log.warning("%s", note)

    def stop(self) -> None:
        """End everything within STOP_SECONDS; open episodes and undelivered messages are on disk for the next start."""
        self._undo.close()

    def run(self, systemd: SystemdNotifier) -> int:
        """Serve until SIGTERM or SIGINT. The exit code: 0, or 1 where the web server died."""
        # Blocked, and taken by sigtimedwait: a handler that sets an event may find the event's lock held by ourselves.
        # Threads inherit the mask, so this comes before any is started.
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        self.start()
        log.info("serving %d jobs on %d nodes at %s", len(self._specs), len(self._fleet.links()), self.address)
        code = self._wait_for_signal(systemd)
        systemd.stopping()
        exit_after(STOP_SECONDS - 0.3)
        self.stop()
        return code

    def _wait_for_signal(self, systemd: SystemdNotifier) -> int:
        """Tell systemd how it goes while it goes: its watchdog hears only of an engine and a loop that both move."""
        period = min(STATUS_EVERY_SECONDS, (systemd.watchdog_seconds or 4 * STATUS_EVERY_SECONDS) / 4)
        ready = False
        rounds = beats = 0
        while True:
            taken = signal.sigtimedwait(SIGNALS, period if ready else STARTUP_POLL_SECONDS)
            if taken is not None:
                log.info("stopping on %s", signal.Signals(taken.si_signo).name)
                return 0
            if ready and not self._web.running:
                log.error("the web server has ended by itself: stopping, so that a service manager starts all anew")
                return 1
            if not ready and self._web.running and self._latest.rounds:
                systemd.ready(self.status())
                ready = True
            elif ready and self._latest.rounds > rounds and self._web.beats > beats:
                systemd.alive(self.status())
                rounds, beats = self._latest.rounds, self._web.beats

    def status(self) -> str:
        """One line for people who look at the unit."""
        snapshot = self._latest.snapshot
        answering = sum(view.link.status.value == "ok" for view in snapshot.nodes.values())
        still_open = sum(e.closed_wall_seconds is None and not e.suppressed_by for e in snapshot.episodes)
        return (
            f"{len(self._specs)} jobs, {answering} of {len(snapshot.nodes)} nodes answer, "
            f"{still_open} open alerts, {snapshot.deliveries.waiting} messages wait"
            + (", BLIND" if snapshot.blind else "")
        )

    def _seconds(self, real_seconds: float) -> float:
        """Real seconds as the clock counts them."""
        return real_seconds * self._clock.speed

    def _hear(self, node: str, received_seconds: float, line: bytes) -> None:
        """Each line as it comes, on the fleet's reader thread."""
        if self._recorder is not None:
            self._recorder.line(node, received_seconds, line)
        self._incidents.add_line(node, received_seconds, line)

    # The engine's thread

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._fleet.wait(self._interval * IDLE_TICK_INTERVALS)
            if not self._clock.wait(self._stopping, GATHER_SECONDS):
                self._look()

    def _look(self) -> None:
        before = self._latest.snapshot
        if self._recorder is not None:
            self._recorder.links(self._fleet.links(), self._clock.monotonic())
        try:
            snapshot = self._engine.tick()
            self._latest.came_round(snapshot)
        except Exception as error:  # noqa: BLE001 - a bug must not end the watch
            self._engine_failed(error)
            if self._engine.snapshot is not before:  # one job failed; the others were judged
                self._latest.came_round(self._engine.snapshot)
            return
        if snapshot is not before:
            told = {name: view.findings for name, view in snapshot.jobs.items()}
            now = self._clock.monotonic()
            self._incidents.update(self._fleet.links(), told, now, self._clock.wall(), self._engine.known)
            try:
                self._diagnosing.update(snapshot)
            except Exception as error:  # noqa: BLE001 - as above
                self._engine_failed(error)
            self._log_episodes(before, snapshot)
        if snapshot is not before and self._teller.save_error is not None:
            self._note_trouble("store", "The watcher cannot save its state.", self._teller.save_error, "Free disk space.")

    def _log_episodes(self, before: Snapshot, now: Snapshot) -> None:
        """One line for each alert that opens, is raised or closes: for whoever looks at the terminal or the journal."""
        known = {e.id: e for e in before.episodes}
        for episode in now.episodes:
            last = known.get(episode.id)
            closed = episode.closed_wall_seconds is not None
            changed = (
                last is None or last.severity is not episode.severity or (last.closed_wall_seconds is None) == closed
            )
            if not episode.suppressed_by and changed and not (closed and last is None):
                log.info("%s %s %s", "closed" if closed else episode.severity.value, episode.alert, episode.summary)

    def _engine_failed(self, error: Exception) -> None:
        """A bug, in one tick: logged once, counted each time, and told. The next tick is tried as if nothing was."""
        kind = failure_kind(error)
        self._own.engine_failures.labels(kind).inc()
        if kind not in self._failure_kinds:
            self._failure_kinds.add(kind)
            log.error("a tick failed; further ones of this kind are only counted", exc_info=error)
        self._note_trouble(
            "engine",
            "The watcher failed to judge: an error inside it.",
            f"{kind}: {str(error)[:200]}",
            "Jobs may go unjudged: please report it with the log of the service.",
        )
        now = self._clock.monotonic()
        try:
            self._teller.observe(self._trouble.findings(now), frozenset(), now, self._clock.wall())
        except Exception as second:  # noqa: BLE001 - as above
            # Telling is what fails: the counter, the page and the watchdog are left to say so.
            self._own.engine_failures.labels(failure_kind(second)).inc()

    def _note_trouble(self, scope: str, summary: str, evidence: str, advice: str) -> None:
        self._trouble.note(scope, summary, evidence, advice, self._clock.monotonic(), ENGINE_PROBLEM_HOLD_SECONDS)

    def _join_engine(self, real_seconds: float) -> None:
        if self._engine_thread.is_alive():
            self._engine_thread.join(real_seconds)

    # Slow tasks

    def _prune(self) -> None:
        self._store.prune(self._clock.wall() - RETENTION_SECONDS)

    def _look_at_disk(self) -> None:
        if self._recorder is not None and self._recorder.error is not None:
            hold = self._seconds(3 * DISK_EVERY_SECONDS)
            words = (self._recorder.error, "Free disk space and start the watcher again to record.")
            self._trouble.note("recording", "The recording has stopped.", *words, self._clock.monotonic(), hold)
        if self._incidents.error is not None:
            hold = self._seconds(3 * DISK_EVERY_SECONDS)
            summary = "An incident is not recorded."
            self._trouble.note(
                "incidents", summary, self._incidents.error, "Free disk space.", self._clock.monotonic(), hold
            )
        directory = self._config.watcher.state_directory
        free = shutil.disk_usage(directory).free
        if free < DISK_MIN_FREE_BYTES:
            evidence = f"{directory}: {free / 1e6:.0f} MB free, fewer than {DISK_MIN_FREE_BYTES / 1e6:.0f} MB"
            hold = self._seconds(3 * DISK_EVERY_SECONDS)
            summary = "The disk with the watcher's state is nearly full: open episodes may not survive a restart."
            self._trouble.note("disk", summary, evidence, "Free disk space.", self._clock.monotonic(), hold)


def failure_kind(error: Exception) -> str:
    """An error's class and where it was raised: as many kinds as there are bugs, not as there are values."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    where = "" if place is None else f" in {place.tb_frame.f_code.co_name}"
    return f"{type(error).__name__}{where}"


def url_host(host: str) -> str:
    """A host as it stands in a URL; an address that means "all" is reached by this machine's own."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"[{host}]" if ":" in host else host


def exit_after(seconds: float) -> None:
    """A stop that hangs must not outlive its promise: systemd would kill us later and less kindly."""

    def end() -> None:
        names = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
        log.error("stopping took longer than %.1f s (threads left: %s): ending here", seconds, names)
        os._exit(1)

    guard = threading.Timer(seconds, end)
    guard.daemon = True
    guard.start()
