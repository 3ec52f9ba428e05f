"""The whole path on the simulated cluster: node, probe, SSH, sample, verdict, finding, message, receiver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx

from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.simulated.cluster import SimulatedCluster
from wattwatch.collectors.simulated.scenario import Scenario, get_scenario
from wattwatch.watcher.alerting.episode import NotifyReason
from wattwatch.watcher.config.settings import load_config
from wattwatch.watcher.daemon.service import Service
from wattwatch.watcher.demo.configuration import write_configuration
from wattwatch.watcher.demo.receiver import DemoReceiver, ReceivedAlert
from wattwatch.watcher.demo.runner import run_demo
from wattwatch.watcher.engine.snapshot import DiagnosisStage, Snapshot

FOUND = {NotifyReason.DIAGNOSED.value, NotifyReason.DIAGNOSIS_INCONCLUSIVE.value}


def shortened(name: str, fault_seconds: float, duration_seconds: float) -> Scenario:
    """The scenario with its one fault earlier and its end sooner."""
    scenario = get_scenario(name)
    healthy, fault = scenario.phases
    phases = (healthy, replace(fault, at_seconds=fault_seconds))
    return replace(scenario, phases=phases, duration_seconds=duration_seconds)


class Record:
    """A screen that keeps what was shown, in its order."""

    def __init__(self) -> None:
        self.page = ""
        self.events: list[str] = []

    def watching(self, page: str, nodes: int) -> None:
        self.page = page
        self.events.append(f"watching {nodes} nodes")

    def injected(self, scenario: Scenario, phase: int, seconds: float) -> None:
        if scenario.phases[phase].injects:
            self.events.append(f"injected {scenario.name}")

    def alert_received(self, notice: ReceivedAlert, since_injection_seconds: float | None, seconds: float) -> None:
        if notice.annotations["reason"] in FOUND:
            return  # that a hang was looked into may be a message of its own, or stand in the one that confirms it
        self.events.append(f"told {notice.job} {notice.alert} {notice.severity}")


def test_two_faults_at_once_are_both_reported_and_nothing_else_is() -> None:
    screen = Record()
    scenarios = [shortened("deadlock", 20.0, 90.0), shortened("crash", 30.0, 90.0)]
    outcome = run_demo(scenarios, speed=5.0, listen="127.0.0.1:0", screen=screen)
    assert outcome.score.problems == ()
    assert outcome.left_behind == ()
    assert outcome.good
    assert screen.events[0] == "watching 4 nodes"
    # In this order for each job; how the two interleave depends on the speed of the machine.
    of_job = {name: [event for event in screen.events[1:] if name in event.split()] for name in ("deadlock", "crash")}
    assert of_job == {
        "deadlock": ["injected deadlock", "told deadlock JobHung warning", "told deadlock JobHung critical"],
        "crash": ["injected crash", "told crash JobCrashed critical"],
    }
    assert len(screen.events) == 6
    assert outcome.slack_messages == len(outcome.notices)
    (crashed,) = [notice for notice in outcome.notices if notice.job == "crash"]
    assert crashed.annotations["suspects"] == "rank 5 on crash-2 GPU 1"


def test_the_deadlock_is_reported_before_the_fourth_round_after_it() -> None:
    """Of the first round after the injection, a part of each GPU's mean power lies before it; the next two show
    the deadlock alone. The alert must be there before another one is judged, however long that takes."""
    scenario = shortened("deadlock", 12.0, 60.0)
    judged: list[Snapshot] = []  # every one until the alert
    with SimulatedCluster([scenario], speed=2.0) as cluster:
        receiver = DemoReceiver(cluster.clock)
        service = Service(load_config(write_configuration(cluster, receiver.address, "127.0.0.1:0")), cluster.clock)
        service.start()
        tick = service._engine.tick

        def tick_and_keep() -> Snapshot:
            snapshot = tick()
            if not (judged and judged[-1].episodes):
                judged.append(snapshot)
            return snapshot

        try:
            assert eventually(lambda: all_seen(service.snapshot, scenario))
            service._engine.tick = tick_and_keep  # type: ignore[method-assign]  # its seam
            cluster.begin()
            injected = cluster.wait_for_phase("deadlock", 1, DEADLINE_SECONDS).wall_seconds
            assert eventually(lambda: receiver.notices() != ())
        finally:
            service.stop()
            receiver.stop()
    (notice,) = receiver.notices()[:1]
    assert (notice.alert, notice.annotations["suspects"]) == ("JobHung", "rank 3 on deadlock-1 GPU 3")
    rounds = {number for snapshot in judged if (number := round_after(snapshot, injected)) is not None}
    assert 2 <= len(rounds) <= 3


def test_a_hang_is_captured_at_once_and_its_diagnosis_is_served_and_kept() -> None:
    scenario = shortened("deadlock", 12.0, 120.0)
    with SimulatedCluster([scenario], speed=3.0) as cluster:
        receiver = DemoReceiver(cluster.clock)
        service = Service(load_config(write_configuration(cluster, receiver.address, "127.0.0.1:0")), cluster.clock)
        service.start()
        try:
            assert eventually(lambda: all_seen(service.snapshot, scenario))
            cluster.begin()
            assert eventually(lambda: stage_of(service.snapshot) in (DiagnosisStage.DONE, DiagnosisStage.FAILED))
            view = service.snapshot.diagnoses["deadlock"]
            path = f"{service.address}/api/v1/jobs/deadlock/diagnosis"
            document = httpx.get(path, trust_env=False).json()
            report = httpx.get(f"{path}/report", trust_env=False).text
            kept = {file.name for file in Path(view.directory).iterdir()}
        finally:
            service.stop()
            receiver.stop()
    assert view.trouble == ""
    assert (document["culprits"], document["alert"]) == ([3], "JobHung")
    assert document["who"][0]["node"] == "deadlock-1"
    assert "rank 3" in report
    assert {"manifest.json", "seen.json", "diagnosis.json", "report.html"} <= kept
    assert {f"node-deadlock-{number}.processes.json" for number in (1, 2)} <= kept


def stage_of(snapshot: Snapshot) -> DiagnosisStage | None:
    view = snapshot.diagnoses.get("deadlock")
    return None if view is None else view.stage


def round_after(snapshot: Snapshot, injected_wall_seconds: float) -> tuple[int, ...] | None:
    """Which round was judged, if every node took its sample after the injection."""
    view = snapshot.jobs["deadlock"]
    samples = [snapshot.nodes[state.node].sample for state in view.sample.nodes]
    if any(sample is None or sample.wall_seconds <= injected_wall_seconds for sample in samples):
        return None
    return tuple(state.sequence or 0 for state in view.sample.nodes) if view.sample.complete else None


def all_seen(snapshot: Snapshot, scenario: Scenario) -> bool:
    view = snapshot.jobs.get(scenario.name)
    return view is not None and view.sample.complete


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
