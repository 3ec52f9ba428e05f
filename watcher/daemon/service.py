"""The daemon behind `wattwatch serve`: everything that it runs is created in `Service._start`, in this order.

1. The web server's socket, so that a port in use fails first.
2. The state store (SQLite) and the alert manager, which loads the open episodes and the undelivered messages.
3. The incident recorder, and the recording of `--record`.
4. The fleet: one SSH connection and one probe per node.
5. The capture scheduler, which gathers evidence of a hung job and diagnoses it in a separate process.
6. The engine, the web server, and the maintenance tasks.

Threads: those of the fleet (SSH connections, logins), one per receiver, one that ticks the engine, one with the web
server's event loop, one for maintenance, one that writes incident recordings, and one per capture of a hung job. Job
data crosses between them only as the frozen snapshot; the store, the alert manager and the counters have locks of
their own. The main thread waits for signals and notifies systemd. `stop` undoes the start in reverse order.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.ssh.fleet import Fleet
from wattwatch.watcher.alerting.alert_manager import AlertManager
from wattwatch.watcher.alerting.episode import EpisodeDiagnosis
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.common.state_store import StateStore, StateStoreError
from wattwatch.watcher.config.settings import Config, probe_request_for
from wattwatch.watcher.daemon.maintenance import MaintenanceScheduler, MaintenanceTask
from wattwatch.watcher.daemon.preflight import preflight_problems, read_token, ssh_settings, to_user_profile
from wattwatch.watcher.daemon.systemd import SystemdNotifier
from wattwatch.watcher.diagnosis.capture.collector import capture_evidence, plan_capture
from wattwatch.watcher.diagnosis.model import Diagnosis
from wattwatch.watcher.engine.engine import Engine
from wattwatch.watcher.engine.self_monitoring import SelfProblems
from wattwatch.watcher.engine.snapshot import JobView, LatestSnapshot, Snapshot
from wattwatch.watcher.incidents.capture_scheduler import CaptureScheduler
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisProcesses
from wattwatch.watcher.incidents.investigation import Investigator, render_report
from wattwatch.watcher.incidents.recorder import IncidentRecorder
from wattwatch.watcher.recordings.format import RecordingWriter
from wattwatch.watcher.web.app import create_app
from wattwatch.watcher.web.events import EventHub
from wattwatch.watcher.web.metrics import WatcherMetrics
from wattwatch.watcher.web.server import ListenError, WebServer, open_listener

log = logging.getLogger("wattwatch.service")

STATE_FILE: Final = "state.db"
INCIDENTS_DIRECTORY: Final = "incidents"
# The lines of one round arrive together. A pause this long after the first lets one tick take them all.
GATHER_SECONDS: Final = 0.02
# Without new lines, the engine still ticks this often: only time shows that a node is silent or a round incomplete.
IDLE_TICK_INTERVALS: Final = 0.125
# An error in the engine stays reported for this long after its last occurrence, so that it is one episode.
ENGINE_PROBLEM_HOLD_SECONDS: Final = 120.0
# How long closed episodes are kept.
RETENTION_SECONDS: Final = 30 * 86400.0
PRUNE_EVERY_SECONDS: Final = 3600.0
DISK_EVERY_SECONDS: Final = 60.0
DISK_MIN_FREE_BYTES: Final = 100_000_000
STATUS_EVERY_SECONDS: Final = 5.0
STARTUP_POLL_SECONDS: Final = 0.1
# Real seconds, whatever the clock's speed: after this the process exits even if a thread still runs.
STOP_SECONDS: Final = 5.0
SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT})


class ServiceStartError(Exception):
    """The service cannot start; `problems` says why, one sentence each."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("; ".join(problems))


class Service:
    """One watcher. `start` and `stop` are for use within a process; `run` is the daemon's main thread."""

    def __init__(self, config: Config, clock: Clock | None = None, record: Path | None = None) -> None:
        """`record`: a file that is overwritten with everything the nodes send, for `wattwatch replay`."""
        self._config = config
        self._record = record
        self._recording: RecordingWriter | None = None
        self._clock = clock or Clock()
        self._specs = tuple(job.spec(config.watcher.interval) for job in config.jobs)
        self._interval = config.watcher.interval
        self._metrics = WatcherMetrics()
        self._problems = SelfProblems()
        self._hub = EventHub()
        self._stopping = threading.Event()
        self._logged_failures: set[str] = set()
        self._undo = ExitStack()
        self._engine_thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)
        self.address = ""  # http://host:port once started

    @property
    def snapshot(self) -> Snapshot:
        """What is known now; only after `start`."""
        return self._latest.snapshot

    def start(self) -> None:
        """Start everything or nothing: raises ServiceStartError, with whatever was started stopped again."""
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
        self._alerts = AlertManager(
            self._store,
            self._config.receivers,
            self._config.routes,
            self._clock,
            jobs=[spec.name for spec in self._specs],
            reminder_seconds=section.reminder,
            external_url=section.external_url,
        )
        if self._record is not None:
            self._recording = RecordingWriter(self._record, self._specs)
            undo.callback(self._recording.close)
        self._incidents = IncidentRecorder(section.state_directory / INCIDENTS_DIRECTORY, self._specs)
        self._incidents.start()  # before the fleet: its reader thread hands over every line
        undo.callback(self._incidents.stop)
        nodes = sorted({node for spec in self._specs for node in spec.nodes})
        self._fleet = Fleet(
            {node: probe_request_for(self._specs, node) for node in nodes},
            ssh_settings(self._config.ssh),
            self._clock,
            self._on_line,
        )
        self._diagnosis_processes = DiagnosisProcesses()
        self._captures = self._create_capture_scheduler()
        self._engine = Engine(
            self._specs,
            self._fleet,
            self._alerts,
            self._clock,
            tuple(to_user_profile(profile) for profile in self._config.profiles),
            self._store,
            diagnoses=self._captures.views,
            self_problems=self._problems,
        )
        if self._recording is not None:
            self._recording.write_prior_state(self._engine.prior_state())
        self._latest = LatestSnapshot(
            self._engine.snapshot, self._clock, self._interval, self._incidents.newest, self._alerts.stats
        )
        self._web = WebServer(
            create_app(self._latest, self._metrics, self._hub, read_token(section)), listener, self._hub
        )
        self._maintenance = MaintenanceScheduler(
            (
                MaintenanceTask("prune", PRUNE_EVERY_SECONDS, self._prune),
                MaintenanceTask("disk", DISK_EVERY_SECONDS, self._check_disk),
            ),
            self._metrics,
        )
        # Stopped in reverse order: first whatever produces work, then whatever takes it.
        undo.callback(self._web.join, 2.5)
        undo.callback(self._alerts.stop, self._to_clock_seconds(1.0))
        undo.callback(self._fleet.stop, self._to_clock_seconds(1.5))
        undo.callback(self._captures.stop)
        undo.callback(self._diagnosis_processes.stop)
        undo.callback(self._join_engine, 1.0)
        undo.callback(self._maintenance.stop)
        undo.callback(self._web.begin_stop)
        undo.callback(self._stopping.set)
        self._alerts.start()
        self._fleet.start()
        self._engine_thread.start()
        self._web.start()
        self._maintenance.start()
        for note in self._fleet.notes:
            log.warning("%s", note)

    def _create_capture_scheduler(self) -> CaptureScheduler:
        """Captures use the fleet's own SSH connections, and only what the job's configuration allows."""
        specs = {spec.name: spec for spec in self._specs}
        settings = {job.name: job.capture_settings for job in self._config.jobs}
        allowed = {job.name: job.capture for job in self._config.jobs}

        def capture(view: JobView, directory: Path) -> None:
            plan = plan_capture(specs[view.name], view.sample, settings[view.name])
            capture_evidence(plan, self._fleet.channels, directory, self._clock)

        def report_diagnosis(episode_id: str, diagnosis: Diagnosis) -> None:
            summary = EpisodeDiagnosis(diagnosis.summary, diagnosis.conclusive, diagnosis.advice)
            self._alerts.add_diagnosis(episode_id, summary)

        investigator = Investigator(capture, self._diagnosis_processes.diagnose, render_report, self._clock.wall)
        directory = self._config.watcher.state_directory / INCIDENTS_DIRECTORY
        return CaptureScheduler(directory, allowed, investigator, report_diagnosis, self._clock)

    def stop(self) -> None:
        """Stop everything. Open episodes and undelivered messages stay on disk for the next start."""
        self._undo.close()

    def run(self, systemd: SystemdNotifier) -> int:
        """Serve until SIGTERM or SIGINT. Returns the exit code: 0, or 1 if the web server died.

        A stop that takes too long ends the process with code 1: systemd must not wait for a hung file system.
        """
        # The signals are blocked and taken by sigtimedwait. A handler that sets a threading.Event can deadlock, if it
        # interrupts this thread while it holds the event's lock. Threads inherit the mask, so block before any starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.start()
        except BaseException:
            # A caller that goes on must not have them blocked: every process it starts would ignore SIGTERM.
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            raise
        jobs, nodes = format_count(len(self._specs), "job"), format_count(len(self._fleet.links()), "node")
        log.info("serving %s on %s at %s", jobs, nodes, self.address)
        code = self._wait_for_signal(systemd)
        systemd.stopping()
        exit_after(STOP_SECONDS - 0.3)
        self.stop()
        return code

    def _wait_for_signal(self, systemd: SystemdNotifier) -> int:
        """Wait, and keep systemd informed: its watchdog is fed only while both the engine and the event loop run."""
        period = min(STATUS_EVERY_SECONDS, (systemd.watchdog_seconds or 4 * STATUS_EVERY_SECONDS) / 4)
        ready = False
        ticks = heartbeats = 0
        while True:
            taken = signal.sigtimedwait(SIGNALS, period if ready else STARTUP_POLL_SECONDS)
            if taken is not None:
                log.info("stopping on %s", signal.Signals(taken.si_signo).name)
                return 0
            if ready and not self._web.running:
                log.error(
                    "the web server has stopped unexpectedly: exiting so that the service manager restarts the watcher"
                )
                return 1
            if not ready and self._web.running and self._latest.ticks:
                systemd.ready(self.status())
                ready = True
            elif ready and self._latest.ticks > ticks and self._web.heartbeats > heartbeats:
                systemd.watchdog(self.status())
                ticks, heartbeats = self._latest.ticks, self._web.heartbeats

    def status(self) -> str:
        """One line for `systemctl status`."""
        snapshot = self._latest.snapshot
        answering = sum(view.link.status.value == "ok" for view in snapshot.nodes.values())
        open_alerts = sum(e.closed_wall_seconds is None and not e.suppressed_by for e in snapshot.episodes)
        return (
            f"{format_count(len(self._specs), 'job')}, {answering} of {format_count(len(snapshot.nodes), 'node')} "
            f"answering, {format_count(open_alerts, 'open alert')}, "
            f"{format_count(self._latest.deliveries().waiting, 'undelivered message')}"
            + (", MOST NODES LOST" if snapshot.blind else "")
        )

    def _to_clock_seconds(self, real_seconds: float) -> float:
        return real_seconds * self._clock.speed

    def _on_line(self, node: str, received_seconds: float, line: bytes) -> None:
        """Record a probe's line. Called on the fleet's reader thread."""
        if self._recording is not None:
            self._recording.write_line(node, received_seconds, line)
        self._incidents.add_line(node, received_seconds, line)

    # The engine's thread

    def _run_engine(self) -> None:
        while not self._stopping.is_set():
            self._fleet.wait(self._interval * IDLE_TICK_INTERVALS)
            if not self._clock.wait(self._stopping, GATHER_SECONDS):
                self._tick()

    def _tick(self) -> None:
        """One tick of the engine, then what follows from its snapshot: recording, captures, log lines."""
        before = self._latest.snapshot
        if self._recording is not None:
            self._recording.write_links(self._fleet.links(), self._clock.monotonic())
        try:
            snapshot = self._engine.tick()
            self._latest.publish(snapshot)
        except Exception as error:  # noqa: BLE001 - a bug in one tick must not end the watch
            self._on_engine_error(error)
            if self._engine.snapshot is not before:  # one job failed; the others were evaluated
                self._latest.publish(self._engine.snapshot)
            return
        if snapshot is before:
            return
        findings = {name: view.findings for name, view in snapshot.jobs.items()}
        now, wall = self._clock.monotonic(), self._clock.wall()
        self._incidents.update(self._fleet.links(), findings, now, wall, self._engine.prior_state)
        try:
            self._captures.update(snapshot)
        except Exception as error:  # noqa: BLE001 - as above
            self._on_engine_error(error)
        self._log_episodes(before, snapshot)
        if self._alerts.save_error is not None:
            self._report_problem(
                "store", "The watcher cannot save its state.", self._alerts.save_error, "Free disk space."
            )

    def _log_episodes(self, before: Snapshot, now: Snapshot) -> None:
        """One line for each alert that opens, changes its severity or closes: for the terminal or the journal.

        Inhibited alerts are left out, and so are those that closed before this process started.
        """
        known = {e.id: e for e in before.episodes}
        for episode in now.episodes:
            last = known.get(episode.id)
            closed = episode.closed_wall_seconds is not None
            changed = (
                last is None or last.severity is not episode.severity or (last.closed_wall_seconds is None) == closed
            )
            if not episode.suppressed_by and changed and not (closed and last is None):
                log.info("%s %s %s", "closed" if closed else episode.severity.value, episode.alert, episode.summary)

    def _on_engine_error(self, error: Exception) -> None:
        """A bug in one tick: logged the first time, always counted, and reported as an alert. The next tick follows."""
        kind = failure_kind(error)
        self._metrics.engine_failures.labels(kind).inc()
        if kind not in self._logged_failures:
            self._logged_failures.add(kind)
            log.error(
                "the watcher failed to evaluate a job; further failures of this kind are not logged", exc_info=error
            )
        self._report_problem(
            "engine",
            "The watcher failed to evaluate a job because of an internal error.",
            f"{kind}: {str(error)[:200]}",
            "Some jobs may not be watched. Please report this bug and attach the log of the service.",
        )
        now = self._clock.monotonic()
        try:
            # The engine has not reported anything in this tick, so report the error from here.
            self._alerts.observe(self._problems.findings(now), frozenset(), now, self._clock.wall())
        except Exception as second:  # noqa: BLE001 - as above
            # Alerting itself fails. The counter, the page and the watchdog still show it.
            self._metrics.engine_failures.labels(failure_kind(second)).inc()

    def _report_problem(self, scope: str, summary: str, evidence: str, advice: str) -> None:
        now = self._clock.monotonic()
        self._problems.report(scope, summary, evidence, advice, now, ENGINE_PROBLEM_HOLD_SECONDS)

    def _join_engine(self, real_seconds: float) -> None:
        if self._engine_thread.is_alive():
            self._engine_thread.join(real_seconds)

    # Maintenance tasks, on the scheduler's thread

    def _prune(self) -> None:
        self._store.prune(self._clock.wall() - RETENTION_SECONDS)

    def _check_disk(self) -> None:
        now = self._clock.monotonic()
        hold = self._to_clock_seconds(3 * DISK_EVERY_SECONDS)
        if self._recording is not None and self._recording.error is not None:
            advice = "Free disk space, then restart the watcher to start recording again."
            self._problems.report(
                "recording", "The watcher has stopped recording (--record).", self._recording.error, advice, now, hold
            )
        if self._incidents.error is not None:
            summary = "An incident is not being recorded."
            self._problems.report("incidents", summary, self._incidents.error, "Free disk space.", now, hold)
        directory = self._config.watcher.state_directory
        free = shutil.disk_usage(directory).free
        if free < DISK_MIN_FREE_BYTES:
            summary = "The disk with the watcher's state is nearly full: open alerts may not survive a restart."
            evidence = f"{directory}: {free / 1e6:.0f} MB free; the minimum is {DISK_MIN_FREE_BYTES / 1e6:.0f} MB"
            self._problems.report("disk", summary, evidence, "Free disk space.", now, hold)


def failure_kind(error: Exception) -> str:
    """An error's class and the function that raised it: as many kinds as there are bugs, not as there are values."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    where = "" if frame is None else f" in {frame.tb_frame.f_code.co_name}"
    return f"{type(error).__name__}{where}"


def url_host(host: str) -> str:
    """A host as written in a URL. An address that means "all interfaces" is reached through loopback."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1" if host == "0.0.0.0" else "::1"
    return f"[{host}]" if ":" in host else host


def exit_after(seconds: float) -> None:
    """Exit the process if stopping hangs: systemd would kill it later, with SIGKILL."""

    def end() -> None:
        names = ", ".join(thread.name for thread in threading.enumerate() if not thread.daemon)
        log.error("the shutdown took longer than %.1f s (threads still running: %s): exiting now", seconds, names)
        os._exit(1)

    # os._exit, because sys.exit in a thread ends only that thread, and atexit handlers may hang as well.
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
