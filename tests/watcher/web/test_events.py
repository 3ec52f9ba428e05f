"""The event stream: what is pushed, to whom, and how it ends."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.watcher.web import sample_snapshots as handmade
from tests.watcher.web.served_app import make_app, served
from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.engine.snapshot import Snapshot
from wattwatch.watcher.web.events import MAX_STREAMS, QUEUE_EVENTS, EventHub, TooManyStreams, snapshot_events


def later(snapshot: Snapshot, **fields: Any) -> Snapshot:
    return replace(snapshot, tick=snapshot.tick + 1, wall_seconds=snapshot.wall_seconds + 1.0, **fields)


def test_a_change_of_state_and_of_alerts_is_an_event_each() -> None:
    before = handmade.cluster()
    hung = before.jobs["finetune-evenfix"]
    jobs = {**before.jobs, "finetune-evenfix": replace(hung, state=JobState.COMPUTING, reason="Steps advance again.")}
    first, *rest = before.episodes
    now = later(before, jobs=jobs, episodes=(replace(first, closed_wall_seconds=handmade.NOW), *rest))
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


def test_the_first_snapshot_is_news_of_nothing_but_itself() -> None:
    assert [event.name for event in snapshot_events(None, handmade.cluster())] == ["tick"]


def test_a_listener_that_does_not_listen_is_told_to_read_anew_and_costs_no_more() -> None:
    async def follow() -> list[str]:
        hub = EventHub()
        hub.open(asyncio.get_running_loop())
        names = []
        with hub.subscribe() as queue:
            snapshot = handmade.cluster()
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


def test_streams_are_bounded() -> None:
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


def test_a_stream_begins_with_where_it_stands_and_goes_on_with_what_happens() -> None:
    desk = make_app(handmade.cluster())
    with (
        served(desk.app) as address,
        httpx.stream("GET", f"{address}/api/v1/events", timeout=30) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert read_event(lines) == ("resync", {"tick": 412})
        desk.latest.came_round(later(desk.latest.snapshot))
        assert read_event(lines)[1]["tick"] == 413
        desk.latest.came_round(desk.latest.snapshot)  # looked again, and there was nothing new
        desk.latest.came_round(later(desk.latest.snapshot))
        assert read_event(lines)[1]["tick"] == 414
        assert b"wattwatch_event_streams 1.0" in httpx.get(f"{address}/metrics").content


def test_a_stream_ends_when_the_hub_stops() -> None:
    desk = make_app(handmade.cluster())
    with (
        served(desk.app) as address,
        httpx.stream("GET", f"{address}/api/v1/events", timeout=30) as answer,
    ):
        lines = answer.iter_lines()
        read_event(lines)
        loop = desk.hub._loop
        assert loop is not None
        loop.call_soon_threadsafe(desk.hub.stop)
        assert [line for line in lines if line.startswith("event")] == []
