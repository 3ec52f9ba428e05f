"""The page: the snapshot in words and small pictures, ready before any script runs. Templates escape everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from collectors.samples import HostStatus
from watcher.cost import kilowatt_hours
from watcher.judge.finding import JobState, Severity
from watcher.judge.job_sample import RankGpu
from watcher.quantities import energy
from watcher.serve import words
from watcher.serve.diagnosis_answers import report_path
from watcher.serve.drawing import History, Strip, history, is_suspect, power_strip, utilization_strip
from watcher.serve.latest import Latest
from watcher.serve.metrics import newest_complete, node_status
from watcher.snapshot import DiagnosisStage, EpisodeView, JobView, NodeView, Snapshot

SEVERITY_ORDER: Final = {Severity.CRITICAL: 0, Severity.WARNING: 1, Severity.INFO: 2}
URGENT_STATES: Final = {JobState.HUNG, JobState.CRASHED}
TABLE_BOARDS: Final = 64  # more than this are listed only where they stand out; the API has them all
CLOSED_ALERTS: Final = 10
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
    power: Strip
    utilization: Strip
    history: History | None
    listed: tuple[RankGpu, ...]
    unlisted: int
    suspects: tuple[str, ...]
    diagnosis: DiagnosisNote | None


@dataclass(frozen=True, slots=True)
class NodeCell:
    view: NodeView
    status: str
    detail: str
    age_seconds: float | None
    good: bool


class PageRenderer:
    """Renders from the newest snapshot; any thread may ask. What is asked for twice within a moment is drawn once."""

    def __init__(self, latest: Latest) -> None:
        self._latest = latest
        self._lock = threading.Lock()
        self._drawn: tuple[Snapshot, float, str] | None = None
        self._templates = Environment(
            loader=PackageLoader("watcher.serve", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters.update(
            duration=words.duration, count=words.count, share=words.share, size=words.size, clock_time=words.clock_time
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
        nodes = [node_cell(view, latest.age_seconds) for view in snapshot.nodes.values()]
        still_open = [episode for episode in snapshot.episodes if episode.closed_wall_seconds is None]
        return {
            "snapshot": snapshot,
            "now": latest.wall_seconds,
            "age_seconds": latest.age_seconds,
            "banners": banners(snapshot, latest),
            "jobs": sorted(cards, key=lambda card: (card.view.state not in URGENT_STATES, card.view.name)),
            "alerts": sorted((e for e in still_open if not e.suppressed_by), key=urgency),
            "quiet": sorted((e for e in still_open if e.suppressed_by), key=urgency),
            "closed": sorted(
                (e for e in snapshot.episodes if e.closed_wall_seconds is not None),
                key=lambda e: -(e.closed_wall_seconds or 0.0),
            )[:CLOSED_ALERTS],
            "reports": report_paths(snapshot),
            "nodes": sorted(nodes, key=lambda cell: (cell.good, cell.view.node)),
            "nodes_good": sum(cell.good for cell in nodes),
        }


def urgency(episode: EpisodeView) -> tuple[int, float]:
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
        return DiagnosisNote("Being looked into", f"since {words.clock_time(view.began_wall_seconds)}.", "")
    return DiagnosisNote("Not diagnosed:", f"{view.trouble}.", "")


def job_card(view: JobView, late_seconds: float, now: float, diagnosis: DiagnosisNote | None) -> JobCard:
    sample, progress = view.sample, view.sample.progress
    suspects = view.verdict.suspects
    few = len(sample.gpus) <= TABLE_BOARDS
    listed = tuple(b for b in sample.gpus if few or is_suspect(b, suspects) or b.gpu.fault is not None)
    newest = newest_complete(sample)
    done = None
    if progress.step is not None and progress.total_steps:
        done = min(1.0, progress.step / progress.total_steps)
    return JobCard(
        view=view,
        age_seconds=max(0.0, now - sample.wall_seconds),
        state_seconds=max(0.0, now - view.state_since_wall_seconds),
        step_age_seconds=None if progress.age_seconds is None else progress.age_seconds + late_seconds,
        checkpoint=words.UNKNOWN if newest is None else newest.name,
        checkpoint_age_seconds=None
        if newest is None or newest.age_seconds is None
        else newest.age_seconds + late_seconds,
        done=done,
        gpu_hours_lost=sum(view.wasted_gpu_seconds.values()) / 3600,
        energy_lost=energy(kilowatt_hours(view.wasted_joules)) if any(view.wasted_joules.values()) else "",
        power=power_strip(sample.gpus, suspects),
        utilization=utilization_strip(sample.gpus, suspects),
        history=history(view.timeline, sample.gpus, now),
        listed=listed,
        unlisted=len(sample.gpus) - len(listed),
        suspects=tuple(str(suspect) for suspect in suspects),
        diagnosis=diagnosis,
    )


def node_cell(view: NodeView, late_seconds: float) -> NodeCell:
    status = node_status(view)
    age = view.link.last_line_age_seconds
    of_link = status is view.link.status or view.sample is None
    return NodeCell(
        view=view,
        status=status.value.replace("_", " "),
        detail=view.link.detail if of_link or view.sample is None else view.sample.detail,
        age_seconds=None if age is None else age + late_seconds,
        good=status is HostStatus.OK,
    )


def banners(snapshot: Snapshot, latest: Latest) -> Sequence[str]:
    """What is wrong with the watcher itself: then nothing below can be taken at its word."""
    found = []
    if not latest.fresh:
        found.append(
            f"The watcher stands still: it last looked {words.duration(latest.age_seconds)} ago. "
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
            f"{words.duration(deliveries.oldest_waiting_seconds)}."
            + (f" Deliveries that failed so far: {', '.join(failing)}." if failing else "")
        )
    return found
