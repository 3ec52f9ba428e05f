"""An incident on one page: HTML that is complete in itself, for reading, printing and passing on. Pure.

Nothing is loaded and nothing runs; every word of the job, its nodes and its files is escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from importlib.metadata import version
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from wattwatch.watcher.common.formatting import (
    MEMBER_STATE_TEXT,
    agree_with_count,
    capitalize_first,
    format_count,
    format_duration,
    format_energy,
    format_hours,
    format_ranks,
    group_by_rank,
    replace_unprintable,
)
from wattwatch.watcher.detection.timeline import TimelinePoint
from wattwatch.watcher.diagnosis.model import (
    Diagnosis,
    DiagnosisVerdict,
    HangCause,
    LiveEvidence,
    RankStacks,
    StackFrame,
)
from wattwatch.watcher.diagnosis.report.ranks import draw_rank_chart
from wattwatch.watcher.diagnosis.report.timeline import draw_timeline
from wattwatch.watcher.diagnosis.serialization import (
    culprits_first,
    group_document,
    wait_documents,
    waits_at_shared_slot,
)
from wattwatch.watcher.diagnosis.stacks.activity import group_by_activity, rank_activities
from wattwatch.watcher.diagnosis.stacks.python_stacks import displayed_frames
from wattwatch.watcher.diagnosis.stacks.user_code import is_library

STYLE: Final = (resources.files("wattwatch.watcher.diagnosis.report") / "templates" / "report.css").read_text("utf-8")
_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
REPORT_SECURITY_POLICY: Final = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"

MAX_GROUPS: Final = 8
MAX_ROWS: Final = 10  # of a group, and of who waits for whom
MAX_FRAMES: Final = 10
MAX_FILES: Final = 60
MAX_STACKS: Final = 4

VERDICT_TEXT: Final = {
    DiagnosisVerdict.DESYNC: "ranks are in different collectives",
    DiagnosisVerdict.MISMATCH: "one collective with other sizes or types",
    DiagnosisVerdict.NEVER_ARRIVED: "ranks that never arrived",
    DiagnosisVerdict.NO_DESYNC: "all ranks in the same collective",
    DiagnosisVerdict.UNKNOWN: "not known",
}
CAUSE_TEXT: Final = {
    HangCause.GPU: "a GPU",
    HangCause.RANK: "a rank's process",
    HangCause.HOST: "a host",
    HangCause.STORAGE: "storage",
    HangCause.NETWORK: "the network",
    HangCause.DATA: "the data",
    HangCause.PROGRAM: "the program",
    HangCause.UNKNOWN: "not known",
}


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    name: str
    bytes: int
    sha256: str
    about: str = ""  # where it came from


@dataclass(frozen=True, slots=True)
class IncidentReport:
    """What the page is drawn from. Wall seconds are Unix time; what is not known is None or empty."""

    job: str
    diagnosis: Diagnosis
    seen: LiveEvidence | None = None
    alert: str = ""
    summary: str = ""  # of the alert
    facts: tuple[str, ...] = ()  # the alert's evidence
    opened_wall_seconds: float | None = None
    closed_wall_seconds: float | None = None
    diagnosed_wall_seconds: float | None = None
    timeline: tuple[TimelinePoint, ...] = ()
    stacks: tuple[RankStacks, ...] = ()  # of all ranks that gave them
    files: tuple[EvidenceFile, ...] = ()
    directory: str = ""
    gpu_hours_lost: float = 0.0
    kilowatt_hours_lost: float = 0.0


@dataclass(frozen=True, slots=True)
class StackView:
    title: str
    note: str
    frames: tuple[tuple[StackFrame, bool], ...]  # and whether it is of the job's own code
    more: int


def render_incident_report(incident: IncidentReport) -> str:
    """The whole page as text; encode it as UTF-8."""
    diagnosis, reading = incident.diagnosis, incident.diagnosis.reading
    culprits = frozenset(culprit.rank for culprit in diagnosis.culprits)
    waited = [] if reading is None else wait_documents(reading.waits)
    waits = culprits_first(waited or waits_at_shared_slot(diagnosis, culprits), culprits)
    groups = [] if reading is None else [group_document(group) for group in reading.groups]
    ranks = () if incident.seen is None else incident.seen.ranks
    values: Mapping[str, Any] = {
        "incident": incident,
        "diagnosis": diagnosis,
        "style": STYLE,
        "policy": REPORT_SECURITY_POLICY,
        "verdict": describe_verdict(diagnosis),
        "missing": group_by_rank(diagnosis.missing),
        "cause": CAUSE_TEXT[diagnosis.cause],
        "places": MEMBER_STATE_TEXT,
        "for_it": [each for each in diagnosis.testimonies if each.agrees],
        "against": [each for each in diagnosis.testimonies if not each.agrees],
        "tied": () if reading is None else reading.tied,
        "timeline": draw_timeline(
            incident.timeline,
            incident.opened_wall_seconds,
            incident.diagnosed_wall_seconds,
            incident.closed_wall_seconds,
        ),
        "power": draw_rank_chart(ranks, culprits, "power_watts", "W", highest_watts(incident)),
        "utilization": draw_rank_chart(ranks, culprits, "utilization_percent", "%", 100.0),
        "waits": waits[:MAX_ROWS],
        "waits_left": len(waits) - MAX_ROWS,
        "groups": groups[:MAX_GROUPS],
        "culprits": culprits,
        "groups_left": len(groups) - MAX_GROUPS,
        "rows_most": MAX_ROWS,
        "stacks": stack_views(incident, culprits),
        "files": incident.files[:MAX_FILES],
        "files_left": len(incident.files) - MAX_FILES,
        "version": version("wattwatch"),
    }
    return templates().get_template("report.html").render(values)


def describe_verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.nothing_open:
        return "no hang"
    if diagnosis.verdict is DiagnosisVerdict.UNKNOWN and diagnosis.culprits:
        return "suspected"
    return VERDICT_TEXT[diagnosis.verdict]


def stack_views(incident: IncidentReport, culprits: frozenset[int]) -> Sequence[StackView]:
    """Those of the culprits, then one of the largest group of the others: where they wait."""
    own = {each.rank: each for each in incident.diagnosis.stacks}
    own |= {each.rank: each for each in incident.stacks if each.rank in culprits}
    views = [stack_view(own[rank], f"rank {rank}", "holds the job up") for rank in sorted(own)[:MAX_STACKS]]
    others = group_by_activity([each for each in rank_activities(incident.stacks) if each.rank not in culprits])
    if others:
        largest = others[0]
        example = next(each for each in incident.stacks if each.rank == largest.ranks[0])
        note = f"{format_count(len(largest.ranks), 'rank')} at this line: {largest.words}"
        views.append(stack_view(example, format_ranks(largest.ranks), note))
    return views


def stack_view(stacks: RankStacks, title: str, note: str) -> StackView:
    frames = displayed_frames(stacks)
    shown = tuple((frame, not is_library(frame.file)) for frame in frames[:MAX_FRAMES])
    return StackView(title, note, shown, len(frames) - len(shown))


def highest_watts(incident: IncidentReport) -> float | None:
    """What a board drew at most while the job was watched: against that, all boards of a hang stand at the floor."""
    return max((p.power_watts_high for p in incident.timeline if p.power_watts_high is not None), default=None)


def backticks_to_code(text: str) -> Markup:
    """What stands between backticks as code; all of it escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(each) if i % 2 else escape(each) for i, each in enumerate(parts)
    )


def format_size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def format_wall_time(wall_seconds: float) -> str:
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def format_rank_and_node_count(seen: LiveEvidence | None) -> str:
    if seen is None or not seen.ranks:
        return ""
    nodes = Counter(rank.node for rank in seen.ranks)
    return f"{format_count(len(seen.ranks), 'rank')} on {format_count(len(nodes), 'node')}"


def _shown(value: object) -> object:
    """What a template writes out."""
    return type(value)(replace_unprintable(value)) if isinstance(value, str) else value


@cache
def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("wattwatch.watcher.diagnosis.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ranks=format_ranks,
        size=format_size,
        amount=format_hours,
        energy=format_energy,
        duration=format_duration,
        moment=format_wall_time,
        ticked=backticks_to_code,
        capital=capitalize_first,
        thousands="{:,}".format,
    )
    environment.globals.update(node_words=format_rank_and_node_count, counted=format_count, agreeing=agree_with_count)
    return environment
