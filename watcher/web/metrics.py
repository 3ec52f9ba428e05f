"""The body of /metrics: the table of metrics (metrics.toml), a snapshot as series, and the watcher's own counters.

The series of a snapshot are written by hand: for 96,000 of them prometheus_client holds the interpreter lock for 0.8 s,
and a scrape must not stall the watcher. Most of that cost is in the labels, so the label text of each GPU is built once
and kept. The watcher's own counters are few and use prometheus_client.
"""

from __future__ import annotations

import collections
import math
import operator
import platform
import threading
import tomllib
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from importlib.metadata import version
from typing import Final, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from wattwatch.collectors.samples import CheckpointEntry, GpuSample, HostStatus
from wattwatch.watcher.detection.model import JobSample, JobState
from wattwatch.watcher.engine.snapshot import EpisodeView, JobView, LatestSnapshot, NodeView, Snapshot

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
GZIP_LEVEL: Final = 1  # level 9 takes ten times as long and saves a tenth of the size
GZIP_WINDOW_BITS: Final = 31  # makes zlib write the gzip format instead of its own

MetricGroup = Literal["gpu", "job", "node", "snapshot", "own"]
MetricType = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric: a row of metrics.toml."""

    name: str
    group: MetricGroup
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str
    reads: str = ""  # attribute path from GpuSample, JobView or NodeView, for the groups "gpu", "job" and "node"
    divide_by: float = 1.0
    only_current: bool = False  # no series once the job's sample is too old to say anything about now
    buckets: tuple[float, ...] = ()

    @property
    def header(self) -> str:
        """The two comment lines before its series in the text format."""
        return f"# HELP {self.name} {self.help}\n# TYPE {self.name} {self.type}\n"


def read_metric_table() -> dict[str, MetricFamily]:
    """The rows of metrics.toml by name. Exporter, dashboards and alert rules take their names from here."""
    text = (resources.files("wattwatch.watcher.web") / "metrics.toml").read_text("utf-8")
    return {
        name: MetricFamily(
            name=name,
            group=row["group"],
            type=row["type"],
            unit=row["unit"],
            labels=tuple(row["labels"]),
            help=row["help"],
            reads=row.get("reads", ""),
            divide_by=float(row.get("divide_by", 1.0)),
            only_current=bool(row.get("only_current", False)),
            buckets=tuple(float(edge) for edge in row.get("buckets", ())),
        )
        for name, row in tomllib.loads(text).items()
    }


METRICS: Final = read_metric_table()


GPU_METRICS: Final = tuple(metric for metric in METRICS.values() if metric.group == "gpu")
# A metric and what gets its value from a JobView, or its name and what gets it from a NodeView.
JOB_READERS: Final = tuple((m, operator.attrgetter(m.reads)) for m in METRICS.values() if m.group == "job")
NODE_READERS: Final = tuple((m.name, operator.attrgetter(m.reads)) for m in METRICS.values() if m.group == "node")
GPU_INFO: Final = "wattwatch_gpu_info"
GPU_LABELS: Final = GPU_METRICS[0].labels
# Ages are counted up to the scrape. One text serves all scrapes for as long as its ages are off by no more than this.
MAX_AGE_ERROR_SECONDS: Final = 1.0

GpuSeriesKey = tuple[str, str, str, int | None]  # train_job, node, gpu, rank
SeriesLines = dict[str, list[str]]  # metric -> lines


class SnapshotMetrics:
    """Renders snapshots as text. Keeps the label text of the GPUs of the last one; not thread-safe."""

    def __init__(self, stale_after_seconds: float) -> None:
        """GPUs of a job that was last evaluated longer ago than `stale_after_seconds` get no series."""
        self._stale_after = stale_after_seconds
        self._labels: dict[GpuSeriesKey, str] = {}

    def render(self, snapshot: Snapshot, age_seconds: float = 0.0) -> bytes:
        """All metrics but the watcher's own (group "own"), in text format 0.0.4. `age_seconds`: of the snapshot."""
        lines: SeriesLines = {name: [] for name, metric in METRICS.items() if metric.group != "own"}
        ages = {job.name: snapshot.seconds - job.evaluated_seconds + age_seconds for job in snapshot.jobs.values()}
        self._add_gpu_series([job for job in snapshot.jobs.values() if ages[job.name] <= self._stale_after], lines)
        for job in snapshot.jobs.values():
            add_job_series(job, ages[job.name], lines, stale=ages[job.name] > self._stale_after)
        add_alert_series(snapshot.episodes, lines)
        for node in snapshot.nodes.values():
            add_node_series(node, age_seconds, lines, stale=age_seconds > self._stale_after)
        add_watcher_series(snapshot, lines)
        return "".join(METRICS[name].header + "".join(rows) for name, rows in lines.items() if rows).encode()

    def _add_gpu_series(self, jobs: Sequence[JobView], lines: SeriesLines) -> None:
        # Keep only the labels of GPUs that are still there, or the cache would grow with every replaced GPU.
        known, self._labels = self._labels, {}
        gpus: list[tuple[str, GpuSample]] = []
        for job in jobs:
            for rank_gpu in job.sample.gpus:
                key = (job.name, rank_gpu.node, gpu_label(rank_gpu.gpu), rank_gpu.rank)
                if key in self._labels:
                    continue  # two GPUs that nothing distinguishes: a duplicate series would fail the whole scrape
                text = known.get(key) or format_labels(zip(GPU_LABELS, map(label_value, key), strict=True))
                self._labels[key] = text
                gpus.append((text, rank_gpu.gpu))
        lines[GPU_INFO] = [f"{GPU_INFO}{text[:-1]}{gpu_info_labels(gpu)} 1\n" for text, gpu in gpus]
        # One list per metric: the text format wants all series of a metric together.
        for metric in GPU_METRICS:
            name, reads, divisor = metric.name, metric.reads, metric.divide_by
            values = [(text, getattr(gpu, reads)) for text, gpu in gpus]
            if divisor == 1.0:
                lines[name] = [f"{name}{text} {value}\n" for text, value in values if value is not None]
            else:
                lines[name] = [f"{name}{text} {value / divisor}\n" for text, value in values if value is not None]


def gpu_label(gpu: GpuSample) -> str:
    """The driver's index; if a GPU has never reported one, its UUID or PCI bus id."""
    return gpu.key if gpu.index is None else str(gpu.index)


def gpu_info_labels(gpu: GpuSample) -> str:
    return f',uuid="{escape_label_value(gpu.uuid or "")}",name="{escape_label_value(gpu.name or "")}"}}'


def add_job_series(job: JobView, age_seconds: float, lines: SeriesLines, *, stale: bool) -> None:
    """`age_seconds`: since the job was evaluated. `stale`: too long ago for readings to be current."""
    label = format_labels([("train_job", job.name)])
    for state in JobState:
        add_series(
            lines, "wattwatch_job_state", [("train_job", job.name), ("state", state.value)], float(job.state is state)
        )
    checkpoint = newest_complete_checkpoint(job.sample)
    step_age = job.sample.progress.age_seconds
    checkpoint_age = None if checkpoint is None else checkpoint.age_seconds
    for name, value in (
        *((metric.name, read(job)) for metric, read in JOB_READERS if not (stale and metric.only_current)),
        ("wattwatch_job_sample_age_seconds", age_seconds),
        ("wattwatch_job_progress_age_seconds", None if step_age is None else step_age + age_seconds),
        ("wattwatch_job_checkpoint_step", None if checkpoint is None else checkpoint.step),
        ("wattwatch_job_checkpoint_age_seconds", None if checkpoint_age is None else checkpoint_age + age_seconds),
        ("wattwatch_job_gpus", None if stale else len(job.sample.gpus)),
        (
            "wattwatch_job_progress_readable",
            None if stale or not job.sample.progress.sources else float(job.sample.progress.readable),
        ),
    ):
        if value is not None:
            lines[name].append(f"{name}{label} {format_metric_value(value)}\n")
    for alert, seconds in job.wasted_gpu_seconds.items():
        add_series(
            lines, "wattwatch_job_wasted_gpu_seconds_total", [("train_job", job.name), ("alert", alert)], seconds
        )
    for alert, joules in job.wasted_joules.items():
        add_series(
            lines, "wattwatch_job_wasted_energy_joules_total", [("train_job", job.name), ("alert", alert)], joules
        )


def newest_complete_checkpoint(sample: JobSample) -> CheckpointEntry | None:
    """The newest complete checkpoint in any of the job's checkpoint directories, with its age at the evaluation. An
    entry's own age is that at the time of the listing, which may be old while a file system hangs."""
    # By step, because a copied directory has the time of the copy; by age only among equal or unknown steps.
    whole = [
        entry if entry.age_seconds is None else replace(entry, age_seconds=entry.age_seconds + listing.age_seconds)
        for listing in sample.checkpoints
        for entry in listing.entries
        if entry.complete
    ]
    return max(whole, key=lambda e: (-1 if e.step is None else e.step, -(e.age_seconds or 0.0)), default=None)


def add_alert_series(episodes: Iterable[EpisodeView], lines: SeriesLines) -> None:
    counts: collections.Counter[tuple[str, str, str, str]] = collections.Counter()
    for episode in episodes:
        if episode.closed_wall_seconds is None:
            name = "wattwatch_alerts_suppressed" if episode.suppressed_by else "wattwatch_alerts_firing"
            counts[name, episode.alert, episode.severity.value, episode.job] += 1
            if episode.absent_since_wall_seconds is not None:
                counts["wattwatch_alerts_clearing", episode.alert, episode.severity.value, episode.job] += 1
    for (name, *values), count in counts.items():
        add_series(lines, name, zip(METRICS[name].labels, values, strict=True), count)


def add_node_series(view: NodeView, age_seconds: float, lines: SeriesLines, *, stale: bool) -> None:
    """`age_seconds`: of the snapshot. `stale`: too old to say what the state of the node is now."""
    label = format_labels([("node", view.node)])
    last_line = view.link.last_line_age_seconds
    if last_line is not None:
        lines["wattwatch_probe_age_seconds"].append(f"wattwatch_probe_age_seconds{label} {last_line + age_seconds}\n")
    if stale:
        return
    now = node_status(view)
    lines["wattwatch_node_status"] += [
        f'wattwatch_node_status{label[:-1]},status="{status.value}"}} {int(status is now)}\n' for status in HostStatus
    ]
    hung = [call.age_seconds for call in view.sample.hung_calls] if view.sample is not None else []
    answers = view.link.status is HostStatus.OK
    for name, value in (
        *((name, read(view)) for name, read in NODE_READERS),
        ("wattwatch_node_up", float(answers)),
        ("wattwatch_node_hung_call_seconds", max(hung) + age_seconds if hung and answers else None),
    ):
        if value is not None:
            lines[name].append(f"{name}{label} {format_metric_value(value)}\n")


def node_status(view: NodeView) -> HostStatus:
    """A connection problem first; for a node that answers, the status in its last line."""
    if view.link.status is not HostStatus.OK or view.sample is None:
        return view.link.status
    return view.sample.status


def add_watcher_series(snapshot: Snapshot, lines: SeriesLines) -> None:
    for receiver, count in snapshot.deliveries.sent.items():
        add_series(lines, "wattwatch_notifications_total", [("receiver", receiver)], count)
    for (receiver, reason), count in snapshot.deliveries.failed.items():
        labels = [("receiver", receiver), ("reason", reason)]
        add_series(lines, "wattwatch_notification_failures_total", labels, count)
    for name, value in (
        ("wattwatch_blind", float(snapshot.blind)),
        ("wattwatch_ticks_overrun_total", snapshot.ticks_overrun),
        ("wattwatch_tick_late_seconds", snapshot.late_seconds),
    ):
        add_series(lines, name, (), value)


def add_series(lines: SeriesLines, name: str, labels: Iterable[tuple[str, str]], value: float) -> None:
    lines[name].append(f"{name}{format_labels(labels)} {format_metric_value(value)}\n")


def format_labels(labels: Iterable[tuple[str, str]]) -> str:
    """`{a="x",b="y"}`, or nothing without labels."""
    pairs = ",".join(f'{name}="{escape_label_value(value)}"' for name, value in labels)
    return "{" + pairs + "}" if pairs else ""


def escape_label_value(value: str) -> str:
    """A label value, escaped for the text format. Bytes that were not valid UTF-8 are replaced."""
    # The common case, without a copy.
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return value
    clean = value.encode("utf-8", "replace").decode("utf-8")
    return clean.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def label_value(value: str | int | None) -> str:
    return "" if value is None else str(value)


def format_metric_value(value: float) -> str:
    """A number as Prometheus (Go) parses it."""
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class WatcherMetrics:
    """The metrics of the group "own". Any thread may increment a counter."""

    def __init__(self) -> None:
        # prometheus_client would add a *_created series for each counter, which nobody reads.
        disable_created_metrics()  # type: ignore[no-untyped-call]  # not annotated in the library
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # process_*: memory, CPU, descriptors
        self.detection_delay = self._histogram("wattwatch_detection_delay_seconds")
        self.tick_duration = self._histogram("wattwatch_tick_duration_seconds")
        self.snapshot_age = self._gauge("wattwatch_snapshot_age_seconds")
        # Of the moment of the scrape: messages are delivered between ticks, and after the engine has stopped.
        self.outbox_messages = self._gauge("wattwatch_outbox_messages")
        self.outbox_oldest = self._gauge("wattwatch_outbox_oldest_seconds")
        self.engine_failures = self._counter("wattwatch_engine_failures_total")
        self.slow_task_runs = self._counter("wattwatch_slow_task_runs_total")
        self.slow_task_failures = self._counter("wattwatch_slow_task_failures_total")
        self.event_streams = self._gauge("wattwatch_event_streams")
        self._gauge("wattwatch_threads").set_function(threading.active_count)
        self._gauge("wattwatch_build_info").labels(version("wattwatch"), platform.python_version()).set(1)

    def observe(self, snapshot: Snapshot) -> None:
        """Count one tick. Called once for each snapshot, on the engine's thread."""
        self.tick_duration.observe(snapshot.tick_seconds)
        for delay in snapshot.detection_delays_seconds:
            self.detection_delay.observe(delay)

    def _histogram(self, name: str) -> Histogram:
        return Histogram(name, METRICS[name].help, registry=self.registry, buckets=METRICS[name].buckets)

    def _gauge(self, name: str) -> Gauge:
        return Gauge(name, METRICS[name].help, METRICS[name].labels, registry=self.registry)

    def _counter(self, name: str) -> Counter:
        return Counter(name, METRICS[name].help, METRICS[name].labels, registry=self.registry)


class MetricsExporter:
    """Builds the body of /metrics. The part of a snapshot is rendered once, by the first scrape; the rest each time."""

    def __init__(self, latest: LatestSnapshot, metrics: WatcherMetrics) -> None:
        self._latest = latest
        self._metrics = metrics
        self._snapshot_metrics = SnapshotMetrics(latest.stale_limit_seconds)
        self._lock = threading.Lock()
        self._rendered: Snapshot | None = None
        self._rendered_age = 0.0
        self._plain = b""
        self._compressed = b""
        self._compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW_BITS)

    def render(self, compressed: bool) -> bytes:
        """The text, or the same compressed with gzip. Any thread may call it; concurrent scrapes share the work."""
        self._metrics.snapshot_age.set(self._latest.age_seconds)
        deliveries = self._latest.deliveries()
        self._metrics.outbox_messages.set(deliveries.waiting)
        self._metrics.outbox_oldest.set(deliveries.oldest_waiting_seconds)
        own = generate_latest(self._metrics.registry)
        with self._lock:
            snapshot, age = self._latest.snapshot, self._latest.snapshot_age_seconds
            if snapshot is not self._rendered or age - self._rendered_age > MAX_AGE_ERROR_SECONDS:
                self._plain, self._compressed = self._snapshot_metrics.render(snapshot, age), b""
                self._rendered, self._rendered_age = snapshot, age
            return self._compress(own) if compressed else self._plain + own

    def _compress(self, own: bytes) -> bytes:
        """The whole body as one gzip stream: not every client reads a second one appended to it.

        The compressor is kept in its state after the snapshot's part; each scrape continues from a copy of it.
        """
        if not self._compressed:
            self._compressor = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_WINDOW_BITS)
            self._compressed = self._compressor.compress(self._plain) + self._compressor.flush(zlib.Z_SYNC_FLUSH)
        compressor = self._compressor.copy()
        return self._compressed + compressor.compress(own) + compressor.flush()
