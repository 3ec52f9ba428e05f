"""What was learned of boards, through the engine and over a restart of the watcher."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.watcher.engine.test_engine import FakeNodes, ManualEngineClock, RecordingSink, working
from wattwatch.collectors.samples import GpuSample
from wattwatch.watcher.common.state_store import StateStore, StateStoreError
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.engine.engine import SAVE_LEARNED_EVERY_SECONDS, Engine
from wattwatch.watcher.recordings.inputs import GpuLog, read_input_file
from wattwatch.watcher.recordings.replay import replay

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "timeseries"
SPEC = JobSpec("single", ("c",))


def empty(watts: float = 165.0) -> tuple[GpuSample, ...]:
    return tuple(replace(gpu, power_watts=watts, utilization_percent=0.0, memory_used_bytes=8e6) for gpu in working())


def starting(watts: float = 250.0) -> tuple[GpuSample, ...]:
    return tuple(replace(gpu, power_watts=watts, utilization_percent=0.0) for gpu in working())


class Keeping(StateStore):
    """A store in memory that counts its writes, and may be full."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}
        self.writes: list[int] = []
        self.full = False

    def load_learned(self) -> dict[str, bytes]:
        return self.rows

    def save_learned(self, rows: Mapping[str, bytes | None]) -> None:
        if self.full:
            raise StateStoreError("state.db: database or disk is full")
        self.writes.append(len(rows))
        for key, content in rows.items():
            if content is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = content


class Watch:
    def __init__(self, store: StateStore, time: ManualEngineClock | None = None) -> None:
        self.time = ManualEngineClock() if time is None else time
        self.nodes = FakeNodes(self.time, SPEC.nodes)
        self.engine = Engine([SPEC], self.nodes, RecordingSink(), self.time, store=store)

    def play(self, seconds: int, gpus: tuple[GpuSample, ...]) -> None:
        for _ in range(seconds):
            self.time.now += 1.0
            self.nodes.send("c", gpus=gpus)
            self.engine.tick()

    def start_and_work(self) -> None:
        self.play(80, empty())
        self.play(60, starting())
        self.play(90, working())

    @property
    def why(self) -> str:
        view = self.engine.snapshot.jobs["single"]
        assert view.verdict is not None
        return view.verdict.why


def test_it_is_written_rarely_and_only_what_changed() -> None:
    store = Keeping()
    watch = Watch(store)
    watch.start_and_work()
    assert store.writes == [8, 8]  # idle floors, then those with a context
    watch.play(3 * int(SAVE_LEARNED_EVERY_SECONDS), working())
    assert store.writes == [8, 8]


def test_a_watcher_that_starts_again_knows_what_it_knew(tmp_path: Path) -> None:
    store = StateStore(tmp_path / "state.db")
    watch = Watch(store)
    watch.start_and_work()
    store.close()
    store = StateStore(tmp_path / "state.db")
    again = Watch(store, watch.time)
    again.play(5, working(260.0))
    assert "GPUs that only wait draw up to 285 W, learned on this host from 55 samples per GPU at start-up" in again.why
    store.close()


def test_garbage_in_the_table_is_ignored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    StateStore(tmp_path / "state.db").close()
    other = sqlite3.connect(tmp_path / "state.db")
    other.executemany("INSERT INTO learned VALUES (?, ?)", [(f"row {i}", b"\x00garbage") for i in range(20)])
    other.commit()
    other.close()
    store = StateStore(tmp_path / "state.db")
    with caplog.at_level(logging.WARNING):
        watch = Watch(store)
    assert len(caplog.records) == 6
    assert "cannot be read, so it is being learned again" in caplog.text
    watch.play(int(SAVE_LEARNED_EVERY_SECONDS) + 5, working())
    assert "draw up to 235 W according to profile b300" in watch.why
    assert store.load_learned() == {}
    store.close()


def test_a_full_disk_costs_no_verdict(caplog: pytest.LogCaptureFixture) -> None:
    store = Keeping()
    store.full = True
    watch = Watch(store)
    watch.start_and_work()
    assert "learned GPU power baselines cannot be saved" in caplog.text
    assert watch.engine.snapshot.jobs["single"].verdict is not None
    store.full = False
    watch.play(int(SAVE_LEARNED_EVERY_SECONDS) + 5, working())
    assert store.writes == [16]


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the public logs are not laid beside this checkout")
@pytest.mark.parametrize("path", sorted(CORPUS.glob("*.csv")), ids=lambda path: path.stem)
def test_public_logs_raise_no_hang_no_crash_and_no_fault(path: Path) -> None:
    source = read_input_file(path)
    assert isinstance(source, GpuLog)
    result = replay(path.name, source)
    assert {e.alert for e in result.episodes} & {"JobHung", "JobCrashed", "GpuFault"} == set()
