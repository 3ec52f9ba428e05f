"""A served snapshot: the real application on a real loopback port, with a clock that the test moves."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from tests.tools import DEADLINE_SECONDS
from tests.watcher.web.sample_snapshots import MONOTONIC_NOW, NOW
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.engine.snapshot import LatestSnapshot, Snapshot
from wattwatch.watcher.web.app import create_app
from wattwatch.watcher.web.events import EventHub
from wattwatch.watcher.web.metrics import WatcherMetrics


class ManualSnapshotClock(Clock):
    """A clock that moves when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.wall_step = 0.0  # by how much somebody has set the wall clock

    def monotonic(self) -> float:
        return MONOTONIC_NOW + self.seconds

    def wall(self) -> float:
        return NOW + self.seconds + self.wall_step


@dataclass(frozen=True, slots=True)
class ServedApp:
    """The components of a served application."""

    time: ManualSnapshotClock
    latest: LatestSnapshot
    own: WatcherMetrics
    hub: EventHub
    app: FastAPI


def make_app(snapshot: Snapshot, token: str | None = None, ticked: bool = True) -> ServedApp:
    time = ManualSnapshotClock()
    latest = LatestSnapshot(snapshot, time, 1.0)
    own, hub = WatcherMetrics(), EventHub()
    app = create_app(latest, own, hub, token)
    if ticked:
        latest.publish(snapshot)
        own.observe(snapshot)
    return ServedApp(time, latest, own, hub, app)


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The application on a free loopback port, as http://127.0.0.1:PORT."""
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive()
