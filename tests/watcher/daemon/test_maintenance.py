"""Maintenance tasks: each run is counted, and so is each run that the scheduler drops."""

from __future__ import annotations

import threading
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from tests.tools import DEADLINE_SECONDS
from wattwatch.watcher.daemon.maintenance import MaintenanceScheduler, MaintenanceTask
from wattwatch.watcher.web.metrics import WatcherMetrics


def count(registry: CollectorRegistry, name: str, **labels: str) -> float:
    return registry.get_sample_value(f"wattwatch_slow_task_{name}_total", labels) or 0.0


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(DEADLINE_SECONDS / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError("the condition did not become true in time")


def fail() -> None:
    raise RuntimeError("the disk is gone")


def test_runs_and_errors_are_counted_and_an_error_stops_nothing() -> None:
    own = WatcherMetrics()
    tasks = MaintenanceScheduler(
        (MaintenanceTask("prune", 0.05, lambda: None), MaintenanceTask("disk", 0.05, fail)), own
    )
    assert count(own.registry, "failures", task="prune", reason="missed") == 0.0
    tasks.start()
    until(lambda: count(own.registry, "runs", task="prune") >= 2)
    until(lambda: count(own.registry, "failures", task="disk", reason="error") >= 2)
    tasks.stop()
    assert count(own.registry, "runs", task="disk") == 0.0


def test_a_run_is_skipped_while_the_previous_one_is_active_and_missed_if_it_would_start_too_late() -> None:
    own = WatcherMetrics()
    release = threading.Event()
    started = threading.Event()

    def work() -> None:
        started.set()
        release.wait(DEADLINE_SECONDS)

    tasks = MaintenanceScheduler(
        (MaintenanceTask("long", 0.05, work), MaintenanceTask("waiting", 0.1, lambda: None)), own
    )
    tasks.start()
    assert started.wait(DEADLINE_SECONDS)
    # A task with this interval may start 1 s late; by now its first run has waited longer behind the long one.
    until(lambda: count(own.registry, "failures", task="waiting", reason="skipped") >= 15)
    assert count(own.registry, "failures", task="long", reason="skipped") >= 1
    release.set()
    until(lambda: count(own.registry, "failures", task="waiting", reason="missed") >= 1)
    tasks.stop()
