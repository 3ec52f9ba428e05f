"""One Snapshot as the body of /metrics.

The text is written by hand: prometheus_client takes 0.8 s of held interpreter lock for 96,000 series, and a scrape
must not stall the watcher. What costs is naming the series, so each board's label text is made once and kept.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from collectors.samples import CheckpointEntry, GpuSample, HostStatus
from watcher.judge.finding import JobState
from watcher.judge.job_sample import JobSample
from watcher.serve.metric_table import METRICS
from watcher.snapshot import EpisodeView, JobView, NodeView, Snapshot

GPU_METRICS: Final = tuple(metric for metric in METRICS.values() if metric.group == "gpu")
INFO: Final = "wattwatch_gpu_info"
BOARD_LABELS: Final = GPU_METRICS[0].labels

BoardKey = tuple[str, str, str, int | None]  # train_job, node, gpu, rank
Series = dict[str, list[str]]  # metric -> lines


class SnapshotText:
    """Renders snapshots. Keeps the label text of the boards it saw last; not for two threads at once."""

    def __init__(self, stale_after_seconds: float) -> None:
        """Boards of a job that was last judged longer ago than `stale_after_seconds` have no series."""
        self._stale_after = stale_after_seconds
        self._labels: dict[BoardKey, str] = {}

    def render(self, snapshot: Snapshot) -> bytes:
        """All families of groups "gpu" and "snapshot" in the text format 0.0.4."""
        lines: Series = {name: [] for name, metric in METRICS.items() if metric.group != "own"}
        fresh = [
            j for j in snapshot.jobs.values() if snapshot.wall_seconds - j.sample.wall_seconds <= self._stale_after
        ]
        self._boards(fresh, lines)
        for job in snapshot.jobs.values():
            job_lines(job, snapshot.wall_seconds, lines)
        episode_lines(snapshot.episodes, lines)
        for node in snapshot.nodes.values():
            node_lines(node, lines)
        watcher_lines(snapshot, lines)
        return "".join(METRICS[name].header + "".join(rows) for name, rows in lines.items() if rows).encode()

    def _boards(self, jobs: Sequence[JobView], lines: Series) -> None:
        known, self._labels = self._labels, {}
        boards: list[tuple[str, GpuSample]] = []
        for job in jobs:
            for board in job.sample.gpus:
                key = (job.name, board.node, board_label(board.gpu), board.rank)
                if key in self._labels:
                    continue  # two boards with nothing to tell them apart: one series, never two of one name
                text = known.get(key) or labels_text(zip(BOARD_LABELS, map(text_of, key), strict=True))
                self._labels[key] = text
                boards.append((text, board.gpu))
        lines[INFO] = [f"{INFO}{text[:-1]}{info_labels(gpu)} 1\n" for text, gpu in boards]
        for metric in GPU_METRICS:
            name, reads, divisor = metric.name, metric.reads, metric.divide_by
            values = [(text, getattr(gpu, reads)) for text, gpu in boards]
            if divisor == 1.0:
                lines[name] = [f"{name}{text} {value}\n" for text, value in values if value is not None]
            else:
                lines[name] = [f"{name}{text} {value / divisor}\n" for text, value in values if value is not None]


def board_label(gpu: GpuSample) -> str:
    """The driver's index, gaps and all; a board that never told one goes by its UUID or PCI id."""
    return gpu.key if gpu.index is None else str(gpu.index)


def info_labels(gpu: GpuSample) -> str:
    return f',uuid="{escaped(gpu.uuid or "")}",name="{escaped(gpu.name or "")}"}}'


def job_lines(job: JobView, wall_seconds: float, lines: Series) -> None:
    label = labels_text([("train_job", job.name)])
    for state in JobState:
        put(lines, "wattwatch_job_state", [("train_job", job.name), ("state", state.value)], float(job.state is state))
    checkpoint = newest_complete(job.sample)
    progress = job.sample.progress
    for name, value in (
        ("wattwatch_job_state_since_timestamp_seconds", job.state_since_wall_seconds),
        ("wattwatch_job_confidence_ratio", job.verdict.confidence),
        ("wattwatch_job_sample_age_seconds", max(0.0, wall_seconds - job.sample.wall_seconds)),
        ("wattwatch_job_step", progress.step),
        ("wattwatch_job_steps_planned", progress.total_steps),
        ("wattwatch_job_tokens_per_second", progress.tokens_per_second),
        ("wattwatch_job_loss", progress.loss),
        ("wattwatch_job_progress_age_seconds", progress.age_seconds),
        ("wattwatch_job_checkpoint_step", None if checkpoint is None else checkpoint.step),
        ("wattwatch_job_checkpoint_age_seconds", None if checkpoint is None else checkpoint.age_seconds),
        ("wattwatch_job_gpus", len(job.sample.gpus)),
        ("wattwatch_job_gpus_expected", job.sample.expected_gpus),
    ):
        if value is not None:
            lines[name].append(f"{name}{label} {number(value)}\n")
    for alert, seconds in job.wasted_gpu_seconds.items():
        put(lines, "wattwatch_job_wasted_gpu_seconds_total", [("train_job", job.name), ("alert", alert)], seconds)
    for alert, joules in job.wasted_joules.items():
        put(lines, "wattwatch_job_wasted_energy_joules_total", [("train_job", job.name), ("alert", alert)], joules)


def newest_complete(sample: JobSample) -> CheckpointEntry | None:
    """The newest complete checkpoint over the job's directories."""
    whole = [entry for listing in sample.checkpoints for entry in listing.entries if entry.complete]
    return max(whole, key=lambda e: (-1 if e.step is None else e.step, -(e.age_seconds or 0.0)), default=None)


def episode_lines(episodes: Iterable[EpisodeView], lines: Series) -> None:
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for episode in episodes:
        if episode.closed_wall_seconds is None:
            name = "wattwatch_alerts_suppressed" if episode.suppressed_by else "wattwatch_alerts_firing"
            counts[name, episode.alert, episode.severity.value, episode.job] += 1
    for (name, *values), count in counts.items():
        put(lines, name, zip(METRICS[name].labels, values, strict=True), count)


def node_lines(view: NodeView, lines: Series) -> None:
    label = labels_text([("node", view.node)])
    now = node_status(view)
    lines["wattwatch_node_status"] += [
        f'wattwatch_node_status{label[:-1]},status="{status.value}"}} {int(status is now)}\n' for status in HostStatus
    ]
    hung = [call.age_seconds for call in view.sample.hung_calls] if view.sample is not None else []
    answers = view.link.status is HostStatus.OK
    for name, value in (
        ("wattwatch_node_up", float(answers)),
        ("wattwatch_probe_age_seconds", view.link.last_line_age_seconds),
        ("wattwatch_node_hung_call_seconds", max(hung) if hung and answers else None),
        ("wattwatch_node_clock_skew_seconds", view.link.clock_skew_seconds),
        ("wattwatch_node_logins_total", view.link.logins),
        ("wattwatch_node_login_failures_total", view.link.failures),
        ("wattwatch_node_garbage_bytes_total", view.link.garbage_bytes),
    ):
        if value is not None:
            lines[name].append(f"{name}{label} {number(value)}\n")


def node_status(view: NodeView) -> HostStatus:
    """The link's trouble first; of a node that answers, what its last line said."""
    if view.link.status is not HostStatus.OK or view.sample is None:
        return view.link.status
    return view.sample.status


def watcher_lines(snapshot: Snapshot, lines: Series) -> None:
    for receiver, count in snapshot.deliveries.sent.items():
        put(lines, "wattwatch_notifications_total", [("receiver", receiver)], count)
    for (receiver, reason), count in snapshot.deliveries.failed.items():
        labels = [("receiver", receiver), ("reason", reason)]
        put(lines, "wattwatch_notification_failures_total", labels, count)
    for name, value in (
        ("wattwatch_outbox_messages", snapshot.deliveries.waiting),
        ("wattwatch_outbox_oldest_seconds", snapshot.deliveries.oldest_waiting_seconds),
        ("wattwatch_blind", float(snapshot.blind)),
        ("wattwatch_ticks_overrun_total", snapshot.ticks_overrun),
        ("wattwatch_tick_late_seconds", snapshot.late_seconds),
    ):
        put(lines, name, (), value)


def put(lines: Series, name: str, labels: Iterable[tuple[str, str]], value: float) -> None:
    lines[name].append(f"{name}{labels_text(labels)} {number(value)}\n")


def labels_text(labels: Iterable[tuple[str, str]]) -> str:
    """`{a="x",b="y"}`, or nothing where there are no labels."""
    pairs = ",".join(f'{name}="{escaped(value)}"' for name, value in labels)
    return "{" + pairs + "}" if pairs else ""


def escaped(value: str) -> str:
    """A label's value as the text format wants it. A name that is no Unicode text loses what cannot be written."""
    if value.isascii() and value.isprintable() and '"' not in value and "\\" not in value:
        return value
    clean = value.encode("utf-8", "replace").decode("utf-8")
    return clean.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def text_of(value: str | int | None) -> str:
    return "" if value is None else str(value)


def number(value: float) -> str:
    """As Go reads it."""
    if math.isfinite(value):
        return str(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
