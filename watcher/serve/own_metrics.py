"""The watcher's counters of itself, kept by prometheus_client, and the whole body of /metrics."""

from __future__ import annotations

import platform
import threading
import zlib
from importlib.metadata import version
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from watcher.serve.latest import Latest
from watcher.serve.metric_table import METRICS
from watcher.serve.metrics import SnapshotText
from watcher.snapshot import Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
GZIP_LEVEL: Final = 1  # 9 takes ten times as long and saves a tenth
GZIP_WINDOW: Final = 31  # zlib's way to say: the gzip format


class OwnMetrics:
    """Families of group "own". Counters may be raised from any thread."""

    def __init__(self) -> None:
        # A series that says when another was made tells nothing here and doubles the list.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library left this one untyped
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_*: memory, CPU, descriptors
        self.detection_delay = self._histogram("wattwatch_detection_delay_seconds")
        self.tick_duration = self._histogram("wattwatch_tick_duration_seconds")
        self.snapshot_age = self._gauge("wattwatch_snapshot_age_seconds")
        self.engine_failures = self._counter("wattwatch_engine_failures_total")
        self.slow_task_runs = self._counter("wattwatch_slow_task_runs_total")
        self.slow_task_failures = self._counter("wattwatch_slow_task_failures_total")
        self.event_streams = self._gauge("wattwatch_event_streams")
        self._gauge("wattwatch_threads").set_function(threading.active_count)
        self._gauge("wattwatch_build_info").labels(version("wattwatch"), platform.python_version()).set(1)

    def note(self, snapshot: Snapshot) -> None:
        """Count what this one tick says. Called once for each snapshot, by the engine's thread."""
        self.tick_duration.observe(snapshot.tick_seconds)
        for delay in snapshot.detection_delays_seconds:
            self.detection_delay.observe(delay)

    def _histogram(self, name: str) -> Histogram:
        return Histogram(name, METRICS[name].help, registry=self.registry, buckets=METRICS[name].buckets)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, METRICS[name].help, METRICS[name].labels, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        return Counter(name, METRICS[name].help, METRICS[name].labels, registry=self.registry)


class MetricsBody:
    """The body of /metrics: a snapshot's part is written once, by the first who asks; the watcher's own each time."""

    def __init__(self, latest: Latest, own: OwnMetrics, stale_after_seconds: float) -> None:
        self._latest = latest
        self._own = own
        self._text = SnapshotText(stale_after_seconds)
        self._lock = threading.Lock()
        self._written: Snapshot | None = None
        self._plain = b""
        self._packed = b""
        self._packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)

    def render(self, packed: bool) -> bytes:
        """The text, or the same as gzip. From any thread; two scrapes at once share the work."""
        self._own.snapshot_age.set(self._latest.age_seconds)
        own = generate_latest(self._own.registry)
        with self._lock:
            snapshot = self._latest.snapshot
            if snapshot is not self._written:
                self._plain, self._packed, self._written = self._text.render(snapshot), b"", snapshot
            return self._pack(own) if packed else self._plain + own

    def _pack(self, own: bytes) -> bytes:
        """One gzip stream, as not every client reads a second one; the packer stands where the snapshot's part ends."""
        if not self._packed:
            self._packer = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW)
            self._packed = self._packer.compress(self._plain) + self._packer.flush(zlib.Z_SYNC_FLUSH)
        packer = self._packer.copy()
        return self._packed + packer.compress(own) + packer.flush()
