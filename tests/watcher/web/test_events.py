"""The event stream: what is pushed, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.web import sample_snapshots as samples
from tests.watcher.web.served_app import make_app, served
from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.engine.snapshot import Snapshot
from wattwatch.watcher.web.events import MAX_STREAMS, QUEUE_EVENTS, EventHub, TooManyStreams, snapshot_events


def later(snapshot: Snapshot, **fields: Any) -> Snapshot:
    return replace(snapshot, tick=snapshot.tick + 1, wall_seconds=snapshot.wall_seconds + 1.0, **fields)


def test_each_change_of_a_state_or_an_alert_is_one_event() -> None:
    before = samples.cluster()
    hung = before.jobs["finetune-evenfix"]
    jobs = {**before.jobs, "finetune-evenfix": replace(hung, state=JobState.COMPUTING, reason="Steps advance again.")}
    first, *rest = before.episodes
    now = later(before, jobs=jobs, episodes=(replace(first, closed_wall_seconds=samples.NOW), *rest))
    state, closed, tick = snapshot_events(before, now)
    assert (state.name, state.data["from"], state.data["to"]) == ("state", "hung", "computing")
    assert (closed.name, closed.data["alert"]) == ("alert_closed", "JobHung")
    assert tick.data == {
        "tick": 413,
        "time": "2026-08-20T10:15:01+00:00",
        "states": {name: view.state.value for name, view in jobs.items()},
        "open_alerts": 4,
        "blind": False,
    }
    assert [event.name for event in snapshot_events(later(before, episodes=()), later(before))][:-1] == [
        "alert_opened"
    ] * 5


def test_the_first_snapshot_is_only_a_tick() -> None:
    assert [event.name for event in snapshot_events(None, samples.cluster())] == ["tick"]


def test_a_client_that_does_not_read_gets_resync_and_its_queue_stays_bounded() -> None:
    async def follow() -> list[str]:
        hub = EventHub()
        hub.open(asyncio.get_running_loop())
        names = []
        with hub.subscribe() as queue:
            snapshot = samples.cluster()
            for _ in range(QUEUE_EVENTS + 5):
                snapshot = later(snapshot)
                hub.offer(snapshot)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert queue.qsize() <= QUEUE_EVENTS
            while not queue.empty():
                event = queue.get_nowait()
                assert event is not None
                names.append(event.name)
        return names

    assert asyncio.run(follow()) == ["resync", *["tick"] * 4]


def test_the_number_of_streams_is_bounded() -> None:
    async def fill() -> None:
        hub = EventHub()
        streams = [hub.subscribe() for _ in range(MAX_STREAMS)]
        for stream in streams:
            stream.__enter__()
        with pytest.raises(TooManyStreams), hub.subscribe():
            pass
        streams[0].__exit__(None, None, None)
        with hub.subscribe():
            assert hub.streams == MAX_STREAMS

    asyncio.run(fill())


def read_event(lines: Any) -> tuple[str, Any]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        if line.startswith("data: "):
            return name, json.loads(line.removeprefix("data: "))
    raise AssertionError("the stream has ended")


def test_a_stream_starts_with_the_current_tick_and_continues_with_changes() -> None:
    app = make_app(samples.cluster())
    with (
        served(app.app) as address,
        httpx.stream("GET", f"{address}/api/v1/events", timeout=DEADLINE_SECONDS) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert read_event(lines) == ("resync", {"tick": 412})
        app.latest.publish(later(app.latest.snapshot))
        assert read_event(lines)[1]["tick"] == 413
        app.latest.publish(app.latest.snapshot)  # another tick without anything new
        app.latest.publish(later(app.latest.snapshot))
        assert read_event(lines)[1]["tick"] == 414
        assert b"wattwatch_event_streams 1.0" in httpx.get(f"{address}/metrics").content


def test_a_stream_ends_when_the_hub_stops() -> None:
    app = make_app(samples.cluster())
    with (
        served(app.app) as address,
        httpx.stream("GET", f"{address}/api/v1/events", timeout=DEADLINE_SECONDS) as answer,
    ):
        lines = answer.iter_lines()
        read_event(lines)
        loop = app.hub._loop
        assert loop is not None
        loop.call_soon_threadsafe(app.hub.stop)
        assert [line for line in lines if line.startswith("event")] == []
