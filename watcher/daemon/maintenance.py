"""Tasks that are not urgent: pruning the state store and checking the disk, on APScheduler.

APScheduler silently drops a run that starts too late or while the previous one still runs
(https://github.com/agronholm/apscheduler/issues/423), so each dropped run is counted and exported as a metric.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from wattwatch.watcher.web.metrics import WatcherMetrics

log = logging.getLogger("wattwatch.maintenance")

FAILURE_REASONS: Final = {EVENT_JOB_MISSED: "missed", EVENT_JOB_MAX_INSTANCES: "skipped", EVENT_JOB_ERROR: "error"}


@dataclass(frozen=True, slots=True)
class MaintenanceTask:
    """Called every `every_seconds` of real time, first after that long. A run may start up to half of it late."""

    name: str
    every_seconds: float
    call: Callable[[], None]


class MaintenanceScheduler:
    """Runs the tasks on one thread."""

    def __init__(self, tasks: tuple[MaintenanceTask, ...], metrics: WatcherMetrics) -> None:
        self._metrics = metrics
        self._scheduler = BackgroundScheduler(
            daemon=True,
            executors={"default": {"type": "threadpool", "max_workers": 1}},
            timezone="UTC",  # only intervals here, and a machine without a time zone must not fail
        )
        for task in tasks:
            self._scheduler.add_job(
                task.call,
                "interval",
                seconds=task.every_seconds,
                id=task.name,
                coalesce=True,
                max_instances=1,
                misfire_grace_time=max(1, int(task.every_seconds / 2)),
            )
            metrics.slow_task_runs.labels(task.name)
            for reason in FAILURE_REASONS.values():
                metrics.slow_task_failures.labels(task.name, reason)
        self._scheduler.add_listener(self._count, EVENT_JOB_EXECUTED | sum(FAILURE_REASONS))

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        """Does not wait for a running task: each can be interrupted safely."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _count(self, event: Any) -> None:
        """Count a run. The scheduler itself logs an error with its traceback."""
        if event.code == EVENT_JOB_EXECUTED:
            self._metrics.slow_task_runs.labels(event.job_id).inc()
            return
        reason = FAILURE_REASONS[event.code]
        self._metrics.slow_task_failures.labels(event.job_id, reason).inc()
        log.warning("maintenance task %s did not complete: %s", event.job_id, reason)
