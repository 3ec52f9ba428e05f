"""What the page draws: paths of small SVG pictures, from numbers. One path for many bars keeps a large job small."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from wattwatch.collectors.samples import HostStatus
from wattwatch.watcher.common import formatting as words
from wattwatch.watcher.common.formatting import format_energy
from wattwatch.watcher.detection.model import JobState, RankGpu, Severity, Suspect
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.detection.wasted_time import total_kilowatt_hours
from wattwatch.watcher.diagnosis.report.ranks import BarLayout, bar_paths, format_range
from wattwatch.watcher.diagnosis.report.timeline import StateSegment, power_band, state_segments, thin_points
from wattwatch.watcher.engine.latest import LatestSnapshot
from wattwatch.watcher.engine.snapshot import DiagnosisStage, EpisodeView, JobView, NodeView, Snapshot
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
    """One bar a board, in the order of the job's ranks; nodes stand a little apart."""

    width: int
    bars: str  # path of the bars with a value
    marked: str  # path of those of suspects
    absent: str  # path of small marks where there is no reading
    top: str  # what the full height means, where it needs saying
    spread: str  # least and most, in words


@dataclass(frozen=True, slots=True)
class PowerHistory:
    """The last ten minutes: power between the lowest and the highest board, its median, and the states below."""

    band: str
    median: str
    segments: tuple[StateSegment, ...]
    top: str
    span: str  # how long ago it begins


def power_strip(boards: Sequence[RankGpu], suspects: Sequence[Suspect]) -> BarStrip:
    """Watts against the highest power limit of the job; against the highest reading where no limit is known."""
    watts = [board.gpu.power_watts for board in boards]
    top = power_axis_top(boards)
    return bar_strip(boards, watts, top, suspects, f"{top:,.0f} W", "W")


def utilization_strip(boards: Sequence[RankGpu], suspects: Sequence[Suspect]) -> BarStrip:
    return bar_strip(boards, [b.gpu.utilization_percent for b in boards], 100.0, suspects, "", "%")


def power_axis_top(boards: Sequence[RankGpu]) -> float:
    limits = [b.gpu.power_limit_watts for b in boards if b.gpu.power_limit_watts is not None]
    readings = [b.gpu.power_watts for b in boards if b.gpu.power_watts is not None]
    return max([*(limits or readings), *readings], default=1.0) or 1.0


def bar_strip(
    boards: Sequence[RankGpu],
    values: Sequence[float | None],
    top: float,
    suspects: Sequence[Suspect],
    top_words: str,
    unit: str,
) -> BarStrip:
    marked = [is_suspect(board, suspects) for board in boards]
    paths = bar_paths([board.node for board in boards], values, marked, top, STRIP_LAYOUT)
    known = [value for value in values if value is not None]
    spread = format_range(known, unit) if known else "no reading"
    return BarStrip(round(paths.width), paths.plain, paths.marked, paths.absent, top_words, spread)


def is_suspect(board: RankGpu, suspects: Sequence[Suspect]) -> bool:
    index, rank = board.gpu.index, board.rank
    return any(s.node == board.node and s.gpu in (None, index) and s.rank in (None, rank) for s in suspects)


def power_history(points: Sequence[TimelinePoint], boards: Sequence[RankGpu], now: float) -> PowerHistory | None:
    """None where there is less than two points to draw."""
    recent = [p for p in points if now - p.wall_seconds <= HISTORY_SECONDS]
    if len(recent) < 2:
        return None
    start, span = recent[0].wall_seconds, max(now - recent[0].wall_seconds, 1.0)
    highest = max((p.power_watts_high for p in recent if p.power_watts_high is not None), default=0.0)
    top = max(power_axis_top(boards), highest)

    def x_at(seconds: float) -> float:
        return (seconds - start) / span * HISTORY_WIDTH

    power = power_band(thin_points(recent, HISTORY_POINTS), x_at, top, HISTORY_HEIGHT)
    return PowerHistory(power.band, power.median, state_segments(recent, x_at, now), f"{top:,.0f} W", span_text(span))


def span_text(span: float) -> str:
    return f"{span / 60:.0f} min" if span >= 90 else f"{span:.0f} s"


# The page: the snapshot in words and small pictures, ready before any script runs. Templates escape everything.

SEVERITY_ORDER: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
URGENT_STATES: Final = {JobState.HUNG, JobState.CRASHED}
TABLE_GPUS_MAX: Final = 64  # more than this are listed only where they stand out; the API has them all
CLOSED_ALERTS_MAX: Final = 10
OUTBOX_LATE_SECONDS: Final = 60.0
REDRAW_SECONDS: Final = 0.5


@dataclass(frozen=True, slots=True)
class DiagnosisNote:
    """The latest diagnosis of a job, or that it is on its way."""

    head: str
    words: str
    report: str  # path; "" where there is none


@dataclass(frozen=True, slots=True)
class JobCard:
    """One job as the page shows it."""

    view: JobView
    age_seconds: float
    state_seconds: float
    step_age_seconds: float | None
    checkpoint: str
    checkpoint_age_seconds: float | None
    done: float | None  # share of the planned steps
    gpu_hours_lost: float
    energy_lost: str  # "" where nothing is known to be drawn for nothing
    power: BarStrip
    utilization: BarStrip
    history: PowerHistory | None
    listed: tuple[RankGpu, ...]
    unlisted: int
    suspects: tuple[str, ...]
    diagnosis: DiagnosisNote | None


@dataclass(frozen=True, slots=True)
class NodeCard:
    view: NodeView
    status: str
    detail: str
    age_seconds: float | None
    good: bool


class PageRenderer:
    """Renders from the newest snapshot; any thread may ask. What is asked for twice within a moment is drawn once."""

    def __init__(self, latest: LatestSnapshot) -> None:
        self._latest = latest
        self._lock = threading.Lock()
        self._drawn: tuple[Snapshot, float, str] | None = None
        self._templates = Environment(
            loader=PackageLoader("wattwatch.watcher.web", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            duration=words.format_duration,
            count=words.format_number,
            share=words.format_percent,
            size=words.format_bytes,
            clock_time=words.format_utc_time,
        )
        self._templates.globals["version"] = version("wattwatch")
        self._templates.tests["suspect"] = lambda board, card: is_suspect(board, card.view.verdict.suspects)

    def page(self) -> str:
        """The whole page."""
        return self._templates.get_template("page.html").render(live=self.live())

    def live(self) -> str:
        """The part that changes: the page's script asks for it at every tick."""
        with self._lock:
            snapshot, age = self._latest.snapshot, self._latest.age_seconds
            if self._drawn is not None and self._drawn[0] is snapshot and 0 <= age - self._drawn[1] < REDRAW_SECONDS:
                return self._drawn[2]
            text = self._templates.get_template("live.html").render(self._values(snapshot))
            self._drawn = (snapshot, age, text)
            return text

    def docs(self, openapi: dict[str, Any]) -> str:
        """The API's documentation, from its own description; nothing is loaded from elsewhere."""
        return self._templates.get_template("docs.html").render(api=openapi)

    def _values(self, snapshot: Snapshot) -> dict[str, object]:
        latest = self._latest
        cards = [
            job_card(view, latest.age_seconds, latest.wall_seconds, diagnosis_note(snapshot, view.name))
            for view in snapshot.jobs.values()
        ]
        nodes = [node_card(view, latest.age_seconds) for view in snapshot.nodes.values()]
        still_open = [episode for episode in snapshot.episodes if episode.closed_wall_seconds is None]
        return {
            "snapshot": snapshot,
            "now": latest.wall_seconds,
            "age_seconds": latest.age_seconds,
            "banners": page_banners(snapshot, latest),
            "jobs": sorted(cards, key=lambda card: (card.view.state not in URGENT_STATES, card.view.name)),
            "alerts": sorted((e for e in still_open if not e.suppressed_by), key=alert_sort_key),
            "quiet": sorted((e for e in still_open if e.suppressed_by), key=alert_sort_key),
            "closed": sorted(
                (e for e in snapshot.episodes if e.closed_wall_seconds is not None),
                key=lambda e: -(e.closed_wall_seconds or 0.0),
            )[:CLOSED_ALERTS_MAX],
            "reports": report_paths(snapshot),
            "nodes": sorted(nodes, key=lambda cell: (cell.good, cell.view.node)),
            "nodes_good": sum(cell.good for cell in nodes),
        }


def alert_sort_key(episode: EpisodeView) -> tuple[int, float]:
    return SEVERITY_ORDER[episode.severity], -episode.opened_wall_seconds


def report_paths(snapshot: Snapshot) -> dict[str, str]:
    """By the id of the episode; of each job the page of its latest diagnosis is served."""
    return {view.episode_id: report_path(view) for view in snapshot.diagnoses.values() if view.report}


def diagnosis_note(snapshot: Snapshot, job: str) -> DiagnosisNote | None:
    """Only while the episode that it explains is open: afterwards it stands at the closed alert."""
    view = snapshot.diagnoses.get(job)
    still_open = {episode.id for episode in snapshot.episodes if episode.closed_wall_seconds is None}
    if view is None or view.episode_id not in still_open:
        return None
    if view.diagnosis is not None:
        head = "Diagnosed:" if view.diagnosis.conclusive else "Diagnosed, not proved:"
        return DiagnosisNote(head, view.diagnosis.summary, report_path(view) if view.report else "")
    if view.stage is DiagnosisStage.RUNNING:
        return DiagnosisNote("Being looked into", f"since {words.format_utc_time(view.began_wall_seconds)}.", "")
    return DiagnosisNote("Not diagnosed:", f"{view.trouble}.", "")


def job_card(view: JobView, late_seconds: float, now: float, diagnosis: DiagnosisNote | None) -> JobCard:
    sample, progress = view.sample, view.sample.progress
    suspects = view.verdict.suspects
    few = len(sample.gpus) <= TABLE_GPUS_MAX
    listed = tuple(b for b in sample.gpus if few or is_suspect(b, suspects) or b.gpu.fault is not None)
    newest = newest_complete_checkpoint(sample)
    done = None
    if progress.step is not None and progress.total_steps:
        done = min(1.0, progress.step / progress.total_steps)
    return JobCard(
        view=view,
        age_seconds=max(0.0, now - sample.wall_seconds),
        state_seconds=max(0.0, now - view.state_since_wall_seconds),
        step_age_seconds=None if progress.age_seconds is None else progress.age_seconds + late_seconds,
        checkpoint=words.UNKNOWN_TEXT if newest is None else newest.name,
        checkpoint_age_seconds=None
        if newest is None or newest.age_seconds is None
        else newest.age_seconds + late_seconds,
        done=done,
        gpu_hours_lost=sum(view.wasted_gpu_seconds.values()) / 3600,
        energy_lost=format_energy(total_kilowatt_hours(view.wasted_joules)) if any(view.wasted_joules.values()) else "",
        power=power_strip(sample.gpus, suspects),
        utilization=utilization_strip(sample.gpus, suspects),
        history=power_history(view.timeline, sample.gpus, now),
        listed=listed,
        unlisted=len(sample.gpus) - len(listed),
        suspects=tuple(str(suspect) for suspect in suspects),
        diagnosis=diagnosis,
    )


def node_card(view: NodeView, late_seconds: float) -> NodeCard:
    status = node_status(view)
    age = view.link.last_line_age_seconds
    of_link = status is view.link.status or view.sample is None
    return NodeCard(
        view=view,
        status=status.value.replace("_", " "),
        detail=view.link.detail if of_link or view.sample is None else view.sample.detail,
        age_seconds=None if age is None else age + late_seconds,
        good=status is HostStatus.OK,
    )


def page_banners(snapshot: Snapshot, latest: LatestSnapshot) -> Sequence[str]:
    """What is wrong with the watcher itself: then nothing below can be taken at its word."""
    found = []
    if not latest.fresh:
        found.append(
            f"The watcher stands still: it last looked {words.format_duration(latest.age_seconds)} ago. "
            "What is shown below is old. Its log says why."
        )
    if snapshot.blind:
        found.append(
            "The watcher is blind: most nodes went silent together, so its own network is the likely cause. "
            "Nothing is concluded about any job until they answer again."
        )
    deliveries = snapshot.deliveries
    if deliveries.oldest_waiting_seconds > OUTBOX_LATE_SECONDS:
        failing = sorted({receiver for receiver, _ in deliveries.failed})
        found.append(
            f"People are not being told: messages wait to be delivered ({deliveries.waiting}), the oldest for "
            f"{words.format_duration(deliveries.oldest_waiting_seconds)}."
            + (f" Deliveries that failed so far: {', '.join(failing)}." if failing else "")
        )
    return found
