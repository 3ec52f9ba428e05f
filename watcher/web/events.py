"""The event stream (server-sent events): what changed, pushed to each open stream.

A client that reads too slowly loses its queued events and gets `resync` instead; nothing ever waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from wattwatch.watcher.engine.snapshot import Snapshot
from wattwatch.watcher.web.schemas import alert_answer, utc_datetime

QUEUE_EVENTS: Final = 128  # a client that is this far behind must read everything again
# Each stream costs a queue and a socket; a dashboard left open in a loop must not exhaust them.
MAX_STREAMS: Final = 200


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """`name` is tick, state, alert_opened, alert_closed or resync. `data` is serialized as JSON."""

    name: str
    data: dict[str, Any]
    id: str


class TooManyStreams(Exception):
    """MAX_STREAMS are open already."""


class EventHub:
    """Passes events to the open streams. Runs on the server's event loop; other threads may only call `offer`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: set[asyncio.Queue[StreamEvent | None]] = set()
        self._stopped = False
        self._last: Snapshot | None = None

    @property
    def streams(self) -> int:
        return len(self._queues)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def offer(self, snapshot: Snapshot) -> None:
        """Take a new snapshot. Any thread may call it; returns at once."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._publish, snapshot)

    def stop(self) -> None:
        """End every stream: an open one keeps the server from stopping (https://github.com/encode/uvicorn/issues/251)."""
        self._stopped = True
        for queue in self._queues:
            empty_queue(queue)
            queue.put_nowait(None)

    @contextmanager
    def subscribe(self) -> Iterator[asyncio.Queue[StreamEvent | None]]:
        """A queue of events; None marks its end. Raises TooManyStreams."""
        if len(self._queues) >= MAX_STREAMS:
            raise TooManyStreams
        queue: asyncio.Queue[StreamEvent | None] = asyncio.Queue(QUEUE_EVENTS)
        self._queues.add(queue)
        # A request may arrive after `stop` has ended the others.
        if self._stopped:
            queue.put_nowait(None)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def _publish(self, snapshot: Snapshot) -> None:
        before, self._last = self._last, snapshot
        # Building the events costs time on the event loop; without a stream nobody reads them.
        if not self._queues:
            return
        events = list(snapshot_events(before, snapshot))
        for queue in self._queues:
            # All or nothing: a client that gets only some events of a tick cannot know that others are missing.
            if queue.maxsize - queue.qsize() < len(events):
                empty_queue(queue)
                queue.put_nowait(StreamEvent("resync", {"tick": snapshot.tick}, str(snapshot.tick)))
            else:
                for event in events:
                    queue.put_nowait(event)


def empty_queue(queue: asyncio.Queue[StreamEvent | None]) -> None:
    while not queue.empty():
        queue.get_nowait()


async def read_queue(queue: asyncio.Queue[StreamEvent | None]) -> AsyncIterator[StreamEvent]:
    while (event := await queue.get()) is not None:
        yield event


def snapshot_events(before: Snapshot | None, now: Snapshot) -> Iterator[StreamEvent]:
    """What changed between two snapshots, and one tick event for the new one."""
    tick = str(now.tick)
    if before is not None:
        for name, job in now.jobs.items():
            was = before.jobs.get(name)
            if was is not None and was.state is not job.state:
                data = {
                    "job": name,
                    "from": was.state.value,
                    "to": job.state.value,
                    "since": utc_datetime(job.state_since_wall_seconds).isoformat(),
                    "reason": job.reason,
                }
                yield StreamEvent("state", data, tick)
        open_before = {e.id for e in before.episodes if e.closed_wall_seconds is None}
        for episode in now.episodes:
            if episode.closed_wall_seconds is None and episode.id not in open_before:
                yield StreamEvent("alert_opened", alert_answer(episode).model_dump(mode="json"), tick)
            if episode.closed_wall_seconds is not None and episode.id in open_before:
                yield StreamEvent("alert_closed", alert_answer(episode).model_dump(mode="json"), tick)
    # Last, so that a client that reads the API on `tick` has already seen what changed.
    yield StreamEvent(
        "tick",
        {
            "tick": now.tick,
            "time": utc_datetime(now.wall_seconds).isoformat(),
            "states": {name: job.state.value for name, job in now.jobs.items()},
            "open_alerts": sum(e.closed_wall_seconds is None for e in now.episodes),
            "blind": now.blind,
        },
        tick,
    )
