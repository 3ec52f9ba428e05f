"""What may take its time: pruning, and looking at the disk. APScheduler, because nothing here is urgent.

A run that comes too late, or whose forerunner still works, is dropped by the scheduler without a word
(apscheduler#423): each such run is counted and exported.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from apscheduler.events import EVENT_JOB_ERROR, EVENT_JOB_EXECUTED, EVENT_JOB_MAX_INSTANCES, EVENT_JOB_MISSED
from apscheduler.schedulers.background import BackgroundScheduler

from wattwatch.watcher.web.metrics import WatcherMetrics

log = logging.getLogger("wattwatch.slow_tasks")

FAILURE_REASONS: Final = {EVENT_JOB_MISSED: "missed", EVENT_JOB_MAX_INSTANCES: "skipped", EVENT_JOB_ERROR: "error"}


@dataclass(frozen=True, slots=True)
class MaintenanceTask:
    """Called every `every_seconds` of real time, first after that long; up to half of it late."""

    name: str
    every_seconds: float
    call: Callable[[], None]


class MaintenanceScheduler:
    """Runs the tasks, one thread for all of them."""

    def __init__(self, tasks: tuple[MaintenanceTask, ...], own: WatcherMetrics) -> None:
        self._own = own
        self._scheduler = BackgroundScheduler(
            daemon=True,
            executors={"default": {"type": "threadpool", "max_workers": 1}},
            timezone="UTC",  # no calendar here, and a machine without a time zone is no reason to fail
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
            own.slow_task_runs.labels(task.name)
            for reason in FAILURE_REASONS.values():
                own.slow_task_failures.labels(task.name, reason)
        self._scheduler.add_listener(self._note, EVENT_JOB_EXECUTED | sum(FAILURE_REASONS))

    def start(self) -> None:
        self._scheduler.start()

    def stop(self) -> None:
        """Does not wait for a task that runs: each is safe to leave."""
        if self._scheduler.running:
            self._scheduler.shutdown(wait=False)

    def _note(self, event: Any) -> None:
        """`event.exception` is there for errors; the scheduler logs those with their place in the code itself."""
        if event.code == EVENT_JOB_EXECUTED:
            self._own.slow_task_runs.labels(event.job_id).inc()
            return
        reason = FAILURE_REASONS[event.code]
        self._own.slow_task_failures.labels(event.job_id, reason).inc()
        log.warning("task %s did not run: %s", event.job_id, reason)
