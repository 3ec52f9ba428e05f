"""One run of the demo: the simulated cluster, the real service on it, the receiver of its messages, and the score.

Nothing here knows a scenario by its name. What was injected comes from the cluster's own report, and what was reported
from the messages as they arrived over HTTP.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.simulated.cluster import SimulatedCluster, describe_busy_machine
from wattwatch.collectors.simulated.driver import PhaseStarted
from wattwatch.collectors.simulated.scenario import Scenario
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service, ServiceStartError
from wattwatch.watcher.demo.configuration import INTERVAL_SECONDS, write_configuration
from wattwatch.watcher.demo.receiver import DemoReceiver, ReceivedAlert
from wattwatch.watcher.demo.score import DemoScore, score_run
from wattwatch.watcher.engine.snapshot import Snapshot

# Real time, from the start of the service until every node has sent a sample: 3 s on two idle cores. It only ends a
# demo that is stuck.
FIRST_SAMPLE_TIMEOUT_SECONDS: Final = 90.0
FINAL_DELIVERY_SECONDS: Final = 3.0  # real time, for messages that are on their way at the end
POLL_SECONDS: Final = 0.02  # real time


class DemoError(Exception):
    """The demo could not be run. The message says why and what to do."""


class DemoScreen(Protocol):
    """Shows a run while it lasts. Seconds are scenario time, from the beginning of the scenarios."""

    def watching(self, page: str, nodes: int) -> None: ...

    def injected(self, scenario: Scenario, phase: int, seconds: float) -> None: ...

    def alert_received(self, notice: ReceivedAlert, since_injection_seconds: float | None, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class DemoCost:
    """What the watcher used (with the demo itself, without the simulated nodes), and what the faults cost."""

    nodes: int
    seconds: float  # real time of watching
    first_alert_seconds: float | None  # real time, from the start of the service to the first alert on the screen
    cpu_seconds: float
    memory_bytes: int
    wasted_gpu_seconds: float  # scenario time


@dataclass(frozen=True, slots=True)
class DemoOutcome:
    score: DemoScore
    cost: DemoCost
    slack_messages: int
    notices: tuple[ReceivedAlert, ...]
    states: Mapping[str, Sequence[str]]
    too_slow: str  # "" if the machine kept up with the scenario clock; otherwise what was late
    left_behind: tuple[int, ...]  # pids of commands on nodes that outlived the watcher

    @property
    def good(self) -> bool:
        return self.score.good and not self.left_behind


def run_demo(scenarios: Sequence[Scenario], speed: float, listen: str, screen: DemoScreen) -> DemoOutcome:
    """Plays the scenarios side by side, each on its own nodes, under one watcher. Raises DemoError."""
    cluster = SimulatedCluster(scenarios, speed)
    with cluster:
        receiver = DemoReceiver(cluster.clock)
        try:
            service = Service(load_config(write_configuration(cluster, receiver.address, listen)), cluster.clock)
            run = DemoRun(cluster, service, receiver, screen)
            try:
                service.start()
            except ServiceStartError as error:
                raise DemoError(str(error)) from None
            try:
                screen.watching(f"{service.address}/", len(cluster.nodes))
                run.wait_for_first_samples()
                run.watch()
            finally:
                service.stop()
        finally:
            receiver.stop()
    return run.outcome()


class DemoRun:
    """The state of one run: what was shown so far, and what was observed."""

    def __init__(self, cluster: SimulatedCluster, service: Service, receiver: DemoReceiver, screen: DemoScreen) -> None:
        self._cluster = cluster
        self._clock = cluster.clock
        self._service = service
        self._receiver = receiver
        self._screen = screen
        self._scenarios = {scenario.name: scenario for scenario in cluster.scenarios}
        self._states: dict[str, list[str]] = {name: [] for name in self._scenarios}
        self._began_seconds = 0.0
        self._shown_phases = 0
        self._shown_notices = 0
        self._max_late_seconds = 0.0
        self._started = time.monotonic()
        self._cpu_seconds = time.process_time()
        self._seconds = 0.0
        self._first_alert_seconds: float | None = None
        self._last: Snapshot | None = None

    def wait_for_first_samples(self) -> None:
        """Waits until every node has sent a sample and every job has a verdict. Raises DemoError."""
        deadline = time.monotonic() + FIRST_SAMPLE_TIMEOUT_SECONDS
        while True:
            snapshot = self._service.snapshot
            unseen = [n for n, view in snapshot.nodes.items() if view.link.status is not HostStatus.OK]
            if not unseen and set(snapshot.jobs) >= set(self._scenarios):
                return
            if time.monotonic() > deadline:
                why = "; ".join(f"{name}: {snapshot.nodes[name].link.detail}" for name in unseen[:3])
                waited = f"within {FIRST_SAMPLE_TIMEOUT_SECONDS:.0f} s"
                busy = describe_busy_machine()
                problem = f"{len(unseen)} of {len(self._cluster.nodes)} simulated nodes sent no sample {waited} ({why})"
                raise DemoError(
                    f"{problem if unseen else f'not every job had a verdict {waited}'}. This machine "
                    + (f"is too busy ({busy})" if busy else "may be too slow")
                    + ": try a single scenario (--scenario deadlock) or a lower --speed."
                )
            time.sleep(POLL_SECONDS)

    def watch(self) -> None:
        """Starts the scenarios and follows them until the last one is over and its messages have been sent."""
        self._cluster.begin()
        self._began_seconds = self._clock.wall()
        end = self._began_seconds + max(scenario.duration_seconds for scenario in self._scenarios.values())
        while (now := self._clock.wall()) < end:
            self._update(now)
            time.sleep(POLL_SECONDS)
        deadline = time.monotonic() + FINAL_DELIVERY_SECONDS
        while self._service.snapshot.deliveries.waiting and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._update(self._clock.wall())
        self._seconds = time.monotonic() - self._started
        self._cpu_seconds = time.process_time() - self._cpu_seconds

    def _update(self, now: float) -> None:
        snapshot = self._last = self._service.snapshot
        self._max_late_seconds = max(self._max_late_seconds, snapshot.late_seconds)
        for name, view in snapshot.jobs.items():
            seen = self._states.get(name)
            warm = self._began_seconds + warm_up_seconds(self._scenarios[name])
            if seen is not None and now >= warm and view.state.value not in seen:
                seen.append(view.state.value)
        phases = self._cluster.phases()
        for began in phases[self._shown_phases :]:
            self._screen.injected(
                self._scenarios[began.scenario], began.phase, began.wall_seconds - self._began_seconds
            )
        self._shown_phases = len(phases)
        notices = self._receiver.notices()
        for notice in notices[self._shown_notices :]:
            since = self._since_injection(notice, phases)
            self._screen.alert_received(notice, since, notice.received_seconds - self._began_seconds)
            if self._first_alert_seconds is None:
                self._first_alert_seconds = time.monotonic() - self._started
        self._shown_notices = len(notices)

    def _since_injection(self, notice: ReceivedAlert, phases: Sequence[PhaseStarted]) -> float | None:
        """Seconds since the injection of the fault that this alert is expected for; None if it is not expected."""
        scenario = self._scenarios.get(notice.job)
        wanted = () if scenario is None else [e.phase for e in scenario.expected if e.alert == notice.alert]
        starts = [p.wall_seconds for p in phases if p.scenario == notice.job and p.phase in wanted]
        return notice.received_seconds - starts[0] if starts else None

    def outcome(self) -> DemoOutcome:
        """The result, to be called when the cluster has ended."""
        phases = self._cluster.phases()
        notices = self._receiver.notices()
        jobs = {} if self._last is None else self._last.jobs
        score = score_run(
            tuple(self._scenarios.values()), phases, notices, self._states, INTERVAL_SECONDS, self._clock.speed
        )
        return DemoOutcome(
            score=score,
            cost=DemoCost(
                nodes=len(self._cluster.nodes),
                seconds=self._seconds,
                first_alert_seconds=self._first_alert_seconds,
                cpu_seconds=self._cpu_seconds,
                memory_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                wasted_gpu_seconds=sum(sum(view.wasted_gpu_seconds.values()) for view in jobs.values()),
            ),
            slack_messages=self._receiver.slack_messages,
            notices=notices,
            states=self._states,
            too_slow=self._lateness(phases),
            left_behind=self._cluster.left_behind,
        )

    def _lateness(self, phases: Sequence[PhaseStarted]) -> str:
        """What was late by more than an interval: the delays of such a run say little about the watcher."""
        simulation = max([self._cluster.latest_seconds, *(phase.late_seconds for phase in phases)])
        late = [
            f"{who} was up to {seconds:.1f} s late"
            for who, seconds in (("the simulated cluster", simulation), ("the watcher", self._max_late_seconds))
            if seconds > INTERVAL_SECONDS
        ]
        if not late:
            return ""
        return f"{' and '.join(late)} ({'; '.join(filter(None, ['scenario time', describe_busy_machine()]))})"


def warm_up_seconds(scenario: Scenario) -> float:
    """When the events of a scenario begin; a scenario without events is treated like the others."""
    return scenario.phases[1].at_seconds if len(scenario.phases) > 1 else 40.0
