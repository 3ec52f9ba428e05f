"""The page: the snapshot as text and small SVG pictures, complete before any script runs.

The templates escape everything: job names and evidence come from configuration and log files. One SVG path for many
bars keeps the page of a large job small.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from wattwatch.collectors.samples import GpuSample, HostStatus
from wattwatch.watcher.common import formatting
from wattwatch.watcher.common.formatting import describe_unseen, format_count, format_energy
from wattwatch.watcher.detection.model import JobSample, JobState, RankGpu, Severity, Suspect, UnseenGpu
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.detection.wasted_time import total_kilowatt_hours
from wattwatch.watcher.diagnosis.report.ranks import BarLayout, bar_paths, format_range
from wattwatch.watcher.diagnosis.report.timeline import StateSegment, power_band, state_segments
from wattwatch.watcher.engine.snapshot import (
    DiagnosisStage,
    EpisodeView,
    JobView,
    LatestSnapshot,
    NodeView,
    Snapshot,
)
from wattwatch.watcher.web.metrics import newest_complete_checkpoint, node_status
from wattwatch.watcher.web.schemas import report_path

STRIP_HEIGHT: Final = 40
STRIP_LAYOUT: Final = BarLayout(bar_width=8, pitch=10, node_gap=6, height=STRIP_HEIGHT)
HISTORY_WIDTH: Final = 600
HISTORY_HEIGHT: Final = 60
HISTORY_SECONDS: Final = 600.0
HISTORY_POINTS: Final = 150


@dataclass(frozen=True, slots=True)
class BarStrip:
    """One bar per GPU, in rank order, with a gap between nodes."""

    width: int
    bars: str  # path of the bars with a value
    marked: str  # path of the bars of suspects
    absent: str  # path of small marks for GPUs without a reading
    top: str  # what the full height means; "" if obvious
    spread: str  # lowest and highest, as text


@dataclass(frozen=True, slots=True)
class PowerHistory:
    """The last ten minutes: the band between the lowest and the highest GPU, the median, and the job's states."""

    band: str
    median: str
    segments: tuple[StateSegment, ...]
    top: str
    span: str  # the time it covers


def power_strip(gpus: Sequence[RankGpu], suspects: Sequence[Suspect]) -> BarStrip:
    """Watts, scaled to the highest power limit in the job, or to the highest reading if no limit is known."""
    watts = [gpu.gpu.power_watts for gpu in gpus]
    top = power_axis_top(gpus)
    return bar_strip(gpus, watts, top, suspects, f"{top:,.0f} W", "W")


def utilization_strip(gpus: Sequence[RankGpu], suspects: Sequence[Suspect]) -> BarStrip:
    return bar_strip(gpus, [b.gpu.utilization_percent for b in gpus], 100.0, suspects, "", "%")


def gpus_to_draw(sample: JobSample) -> tuple[RankGpu, ...]:
    """All GPUs of the job in the order of nodes and indexes, those without a reading included."""
    place = {node.node: i for i, node in enumerate(sample.nodes)}
    unseen = (
        RankGpu(gpu.node, gpu.rank, GpuSample(index=gpu.index, pci_bus_id=gpu.pci_bus_id)) for gpu in sample.unseen
    )
    return tuple(
        sorted(
            (*sample.gpus, *unseen),
            key=lambda each: (place.get(each.node, 0), each.gpu.index is None, each.gpu.index or 0),
        )
    )


def power_axis_top(gpus: Sequence[RankGpu]) -> float:
    limits = [b.gpu.power_limit_watts for b in gpus if b.gpu.power_limit_watts is not None]
    readings = [b.gpu.power_watts for b in gpus if b.gpu.power_watts is not None]
    return max([*(limits or readings), *readings], default=1.0) or 1.0


def bar_strip(
    gpus: Sequence[RankGpu],
    values: Sequence[float | None],
    top: float,
    suspects: Sequence[Suspect],
    top_text: str,
    unit: str,
) -> BarStrip:
    marked = [is_suspect(gpu, suspects) for gpu in gpus]
    paths = bar_paths([gpu.node for gpu in gpus], values, marked, top, STRIP_LAYOUT)
    known = [value for value in values if value is not None]
    spread = format_range(known, unit) if known else "no reading"
    return BarStrip(round(paths.width), paths.plain, paths.marked, paths.absent, top_text, spread)


def is_suspect(gpu: RankGpu, suspects: Sequence[Suspect]) -> bool:
    index, rank = gpu.gpu.index, gpu.rank
    return any(s.node == gpu.node and s.gpu in (None, index) and s.rank in (None, rank) for s in suspects)


def power_history(points: Sequence[TimelinePoint], gpus: Sequence[RankGpu], now: float) -> PowerHistory | None:
    """None if there are fewer than two points to draw."""
    recent = [p for p in points if now - p.wall_seconds <= HISTORY_SECONDS]
    if len(recent) < 2:
        return None
    start, span = recent[0].wall_seconds, max(now - recent[0].wall_seconds, 1.0)
    highest = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0)
    top = max(power_axis_top(gpus), highest)

    def x_at(seconds: float) -> float:
        return (seconds - start) / span * HISTORY_WIDTH

    power = power_band(recent, HISTORY_POINTS, x_at, top, HISTORY_HEIGHT)
    return PowerHistory(power.band, power.median, state_segments(recent, x_at), f"{top:,.0f} W", span_text(span))


def span_text(span: float) -> str:
    return f"{span / 60:.0f} min" if span >= 90 else f"{span:.0f} s"


SEVERITY_ORDER: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
URGENT_STATES: Final = {JobState.HUNG, JobState.CRASHED}
TABLE_GPUS_MAX: Final = 64  # of a larger job only outliers are listed; the API has all GPUs
CLOSED_ALERTS_MAX: Final = 10
OUTBOX_LATE_SECONDS: Final = 60.0  # undelivered for longer: people do not know of the alert
REDRAW_SECONDS: Final = 0.5  # requests within this time share one rendering


@dataclass(frozen=True, slots=True)
class DiagnosisNote:
    """The latest diagnosis of a job, or the progress of its capture."""

    heading: str
    text: str
    report: str  # path; "" if there is none


@dataclass(frozen=True, slots=True)
class JobCard:
    """One job as the page shows it."""

    view: JobView
    age_seconds: float
    stale: bool  # evaluated too long ago for anything on the card to be current
    state_seconds: float
    step_age_seconds: float | None
    tokens_per_second: float | None  # now
    last_tokens_per_second: float | None  # as the job last reported it, where that is not current
    last_tokens_age_seconds: float | None
    checkpoint: str
    checkpoint_age_seconds: float | None
    done: float | None  # fraction of the planned steps
    gpu_hours_lost: float
    energy_lost: str  # "" if no wasted energy was measured
    power: BarStrip
    utilization: BarStrip
    extent: str  # "8 of 16 GPUs"; those that are not seen are drawn as small marks
    unseen: tuple[str, ...]  # who is not seen, and why
    unseen_rows: tuple[UnseenGpu, ...]  # for the table
    history: PowerHistory | None
    listed: tuple[RankGpu, ...]
    unlisted: int
    suspects: tuple[str, ...]
    diagnosis: DiagnosisNote | None


@dataclass(frozen=True, slots=True)
class NodeCard:
    """One node as the page shows it."""

    view: NodeView
    status: str
    detail: str
    age_seconds: float | None
    ok: bool


class PageRenderer:
    """Renders the newest snapshot. Any thread may call it; requests within a moment share one rendering."""

    def __init__(self, latest: LatestSnapshot) -> None:
        self._latest = latest
        self._lock = threading.Lock()
        self._rendered: tuple[Snapshot, float, str] | None = None
        self._templates = Environment(
            loader=PackageLoader("wattwatch.watcher.web", "templates"),
            autoescape=True,
            undefined=StrictUndefined,  # a typo in a template is an error, not an empty cell
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            duration=formatting.format_duration,
            count=formatting.format_number,
            share=formatting.format_percent,
            size=formatting.format_bytes,
            clock_time=formatting.format_utc_time,
            capitalized=formatting.capitalize_first,
        )
        self._templates.globals["version"] = version("wattwatch")
        self._templates.tests["suspect"] = lambda gpu, card: is_suspect(gpu, card.view.verdict.suspects)

    def page(self) -> str:
        """The whole page."""
        return self._templates.get_template("page.html").render(live=self.live())

    def live(self) -> str:
        """The part that changes: the page's script requests it at every tick."""
        with self._lock:
            snapshot, age = self._latest.snapshot, self._latest.snapshot_age_seconds
            # The age matters too: the page counts ages up to the time of the response.
            if (
                self._rendered is not None
                and self._rendered[0] is snapshot
                and 0 <= age - self._rendered[1] < REDRAW_SECONDS
            ):
                return self._rendered[2]
            text = self._templates.get_template("live.html").render(self._values(snapshot))
            self._rendered = (snapshot, age, text)
            return text

    def docs(self, openapi: dict[str, Any]) -> str:
        """The API's documentation, from its OpenAPI document; loads nothing from other hosts."""
        return self._templates.get_template("docs.html").render(api=openapi)

    def _values(self, snapshot: Snapshot) -> dict[str, object]:
        latest = self._latest
        cards = [
            job_card(
                view,
                latest.job_age_seconds(view),
                diagnosis_note(snapshot, view.name),
                stale_limit_seconds=latest.stale_limit_seconds,
            )
            for view in snapshot.jobs.values()
        ]
        nodes = [node_card(view, latest.snapshot_age_seconds) for view in snapshot.nodes.values()]
        open_episodes = [episode for episode in snapshot.episodes if episode.closed_wall_seconds is None]
        return {
            "snapshot": snapshot,
            # Times in the snapshot are of its clock: if the wall clock was set since, they are dated by the old one.
            "now": snapshot.wall_seconds + latest.snapshot_age_seconds,
            "age_seconds": latest.snapshot_age_seconds,
            "undelivered": latest.deliveries().waiting,
            "banners": page_banners(snapshot, latest),
            # Hung and crashed jobs first: on a phone only the first card is visible.
            "jobs": sorted(cards, key=lambda card: (card.view.state not in URGENT_STATES, card.view.name)),
            "alerts": sorted((e for e in open_episodes if not e.suppressed_by), key=alert_sort_key),
            "inhibited": sorted((e for e in open_episodes if e.suppressed_by), key=alert_sort_key),
            "closed": sorted(
                (e for e in snapshot.episodes if e.closed_wall_seconds is not None),
                key=lambda e: -(e.closed_wall_seconds or 0.0),
            )[:CLOSED_ALERTS_MAX],
            "reports": report_paths(snapshot),
            # Nodes with a problem first.
            "nodes": sorted(nodes, key=lambda card: (card.ok, card.view.node)),
            "nodes_ok": sum(card.ok for card in nodes),
        }


def alert_sort_key(episode: EpisodeView) -> tuple[int, float]:
    return SEVERITY_ORDER[episode.severity], -episode.opened_wall_seconds


def report_paths(snapshot: Snapshot) -> dict[str, str]:
    """URL paths by episode id. Only the report of the latest diagnosis of each job is served."""
    return {view.episode_id: report_path(view) for view in snapshot.diagnoses.values() if view.report}


def diagnosis_note(snapshot: Snapshot, job: str) -> DiagnosisNote | None:
    """None unless the episode that it belongs to is open; afterwards it is shown with the closed alert."""
    view = snapshot.diagnoses.get(job)
    open_episodes = {episode.id for episode in snapshot.episodes if episode.closed_wall_seconds is None}
    if view is None or view.episode_id not in open_episodes:
        return None
    if view.diagnosis is not None:
        heading = "Diagnosis:" if view.diagnosis.conclusive else "Diagnosis (not conclusive):"
        return DiagnosisNote(heading, view.diagnosis.summary, report_path(view) if view.report else "")
    if view.stage is DiagnosisStage.RUNNING:
        return DiagnosisNote("Capturing evidence", f"since {formatting.format_utc_time(view.began_wall_seconds)}.", "")
    return DiagnosisNote("No diagnosis:", f"{view.trouble}.", "")


def job_card(
    view: JobView, age_seconds: float, diagnosis: DiagnosisNote | None, *, stale_limit_seconds: float
) -> JobCard:
    """`age_seconds`: since the job was evaluated, added to every age of that time."""
    sample, progress, throughput = view.sample, view.sample.progress, view.throughput
    now, stale = sample.wall_seconds + age_seconds, age_seconds > stale_limit_seconds
    current = throughput.is_current and not stale
    reported_age = throughput.reported_age_seconds
    suspects = view.verdict.suspects
    # A faulty GPU is always listed: it may have no reading at all, so that nothing else on the page shows it.
    list_all = len(sample.gpus) <= TABLE_GPUS_MAX
    listed = tuple(b for b in sample.gpus if list_all or is_suspect(b, suspects) or b.gpu.fault is not None)
    drawn = gpus_to_draw(sample)
    newest = newest_complete_checkpoint(sample)
    done = None
    if progress.step is not None and progress.total_steps:
        done = min(1.0, progress.step / progress.total_steps)
    return JobCard(
        view=view,
        age_seconds=age_seconds,
        stale=stale,
        state_seconds=view.evaluated_seconds - view.state_since_seconds + age_seconds,
        step_age_seconds=None if progress.age_seconds is None else progress.age_seconds + age_seconds,
        tokens_per_second=None if stale else throughput.tokens_per_second,
        last_tokens_per_second=None if current else throughput.reported,
        last_tokens_age_seconds=None if reported_age is None else reported_age + age_seconds,
        checkpoint=formatting.UNKNOWN_TEXT if newest is None else newest.name,
        checkpoint_age_seconds=None
        if newest is None or newest.age_seconds is None
        else newest.age_seconds + age_seconds,
        done=done,
        gpu_hours_lost=sum(view.wasted_gpu_seconds.values()) / 3600,
        energy_lost=format_energy(total_kilowatt_hours(view.wasted_joules)) if any(view.wasted_joules.values()) else "",
        power=power_strip(drawn, suspects),
        utilization=utilization_strip(drawn, suspects),
        extent=f"{len(sample.gpus)} of {format_count(len(drawn), 'GPU')}"
        if sample.unseen
        else format_count(len(drawn), "GPU"),
        unseen=tuple(describe_unseen((gpu.node, gpu.rank, gpu.reason) for gpu in sample.unseen)),
        unseen_rows=sample.unseen[:TABLE_GPUS_MAX],
        history=power_history(view.timeline, sample.gpus, now),
        listed=listed,
        unlisted=len(sample.gpus) - len(listed),
        suspects=tuple(str(suspect) for suspect in suspects),
        diagnosis=diagnosis,
    )


def node_card(view: NodeView, late_seconds: float) -> NodeCard:
    status = node_status(view)
    age = view.link.last_line_age_seconds
    from_link = status is view.link.status or view.sample is None
    return NodeCard(
        view=view,
        status=status.value.replace("_", " "),
        detail=view.link.detail if from_link or view.sample is None else view.sample.detail,
        age_seconds=None if age is None else age + late_seconds,
        ok=status is HostStatus.OK,
    )


def page_banners(snapshot: Snapshot, latest: LatestSnapshot) -> Sequence[str]:
    """Problems of the watcher itself, which make everything below them on the page unreliable."""
    found = []
    if not latest.is_fresh:
        found.append(
            f"The watcher has stopped: its last update was {formatting.format_duration(latest.age_seconds)} ago. "
            "Everything below is out of date. The watcher's log says why."
        )
    if snapshot.blind:
        found.append(
            "The watcher lost contact with most nodes at the same time; its own network is the likely cause. "
            "Jobs on these nodes are not evaluated until the nodes answer again."
        )
    deliveries = latest.deliveries()
    if deliveries.oldest_waiting_seconds > OUTBOX_LATE_SECONDS:
        failing = sorted({receiver for receiver, _ in deliveries.failed})
        found.append(
            f"Alert messages are not being delivered. Undelivered messages: {deliveries.waiting}. The oldest has been "
            f"waiting for {formatting.format_duration(deliveries.oldest_waiting_seconds)}."
            + (f" Receivers with failed deliveries: {', '.join(failing)}." if failing else "")
        )
    for receiver, reason in sorted(deliveries.given_up.items()):
        found.append(
            f"The last alert message to receiver {receiver} was not delivered and will not be retried: {reason}."
        )
    return found
