"""The incident report: one HTML page that is complete in itself, for reading, printing and forwarding. Pure.

It loads nothing and runs no script, and its security policy says so. All text that comes from the job, its nodes or its
files is escaped by the template.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    format_bytes,
    format_count,
    format_duration,
    format_energy,
    format_hours,
    format_ranks,
    format_utc_time,
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
from wattwatch.watcher.diagnosis.signals.signal import source_label
from wattwatch.watcher.diagnosis.stacks.activity import group_by_activity, rank_activities
from wattwatch.watcher.diagnosis.stacks.python_stacks import displayed_frames
from wattwatch.watcher.diagnosis.stacks.user_code import is_library

# The style is inlined and allowed by its hash, so that the policy can forbid everything else, inline scripts too.
STYLE: Final = (resources.files("wattwatch.watcher.diagnosis.report") / "templates" / "report.css").read_text("utf-8")
_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
REPORT_SECURITY_POLICY: Final = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"

# Limits that keep the report of a job of a thousand ranks readable; diagnosis.json has everything.
MAX_GROUPS: Final = 8
MAX_ROWS: Final = 10  # of a process group, and of the waits
MAX_FRAMES: Final = 10
MAX_FILES: Final = 60
MAX_STACKS: Final = 4

VERDICT_TEXT: Final = {
    DiagnosisVerdict.DESYNC: "ranks are in different collectives",
    DiagnosisVerdict.MISMATCH: "the sizes or types of a collective differ",
    DiagnosisVerdict.NEVER_ARRIVED: "ranks are missing from a collective",
    DiagnosisVerdict.NO_DESYNC: "the ranks are in the same collective",
    DiagnosisVerdict.UNKNOWN: "verdict unknown",
}
CAUSE_TEXT: Final = {
    HangCause.GPU: "a GPU",
    HangCause.RANK: "a rank's process",
    HangCause.HOST: "a host",
    HangCause.STORAGE: "storage",
    HangCause.NETWORK: "the network",
    HangCause.DATA: "the data",
    HangCause.PROGRAM: "the program",
    HangCause.UNKNOWN: "unknown",
}


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    name: str
    bytes: int
    sha256: str
    about: str = ""  # the node and path, or command, that it came from


@dataclass(frozen=True, slots=True)
class IncidentReport:
    """The content of the report. Wall seconds are Unix time; None or empty: unknown."""

    job: str
    diagnosis: Diagnosis
    live: LiveEvidence | None = None
    alert: str = ""
    summary: str = ""  # of the alert
    facts: tuple[str, ...] = ()  # the alert's evidence
    opened_wall_seconds: float | None = None
    closed_wall_seconds: float | None = None
    diagnosed_wall_seconds: float | None = None
    timeline: tuple[TimelinePoint, ...] = ()
    stacks: tuple[RankStacks, ...] = ()  # of every rank that has any
    files: tuple[EvidenceFile, ...] = ()
    directory: str = ""
    gpu_hours_lost: float = 0.0
    kilowatt_hours_lost: float = 0.0


@dataclass(frozen=True, slots=True)
class StackView:
    title: str
    note: str
    frames: tuple[tuple[StackFrame, bool], ...]  # innermost first; True: the job's own code
    more: int  # frames left out


def render_incident_report(incident: IncidentReport) -> str:
    """The whole page. Encode it as UTF-8."""
    diagnosis, collectives = incident.diagnosis, incident.diagnosis.collectives
    culprits = frozenset(culprit.rank for culprit in diagnosis.culprits)
    waited = [] if collectives is None else wait_documents(collectives.waits)
    waits = culprits_first(waited or waits_at_shared_slot(diagnosis, culprits), culprits)
    groups = [] if collectives is None else [group_document(group) for group in collectives.groups]
    ranks = () if incident.live is None else incident.live.ranks
    values: Mapping[str, Any] = {
        "incident": incident,
        "diagnosis": diagnosis,
        "style": STYLE,
        "policy": REPORT_SECURITY_POLICY,
        "verdict": describe_verdict(diagnosis),
        "missing": group_by_rank(diagnosis.missing),
        "cause": CAUSE_TEXT[diagnosis.cause],
        "member_states": MEMBER_STATE_TEXT,
        "supporting": [each for each in diagnosis.signals if each.agrees],
        "contradicting": [each for each in diagnosis.signals if not each.agrees],
        "tied": () if collectives is None else collectives.tied,
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
        "max_rows": MAX_ROWS,
        "stacks": stack_views(incident, culprits),
        "files": incident.files[:MAX_FILES],
        "files_left": len(incident.files) - MAX_FILES,
        "version": version("wattwatch"),
    }
    return templates().get_template("report.html").render(values)


def describe_verdict(diagnosis: Diagnosis) -> str:
    if diagnosis.no_hang:
        return "no hang"
    if diagnosis.verdict is DiagnosisVerdict.UNKNOWN and diagnosis.culprits:
        return "suspected"
    return VERDICT_TEXT[diagnosis.verdict]


def stack_views(incident: IncidentReport, culprits: frozenset[int]) -> Sequence[StackView]:
    """The stacks of the culprits, then one from the largest group of other ranks, to show where those wait."""
    own = {each.rank: each for each in incident.diagnosis.stacks}
    own |= {each.rank: each for each in incident.stacks if each.rank in culprits}
    views = [stack_view(own[rank], f"rank {rank}", "blocks the job") for rank in sorted(own)[:MAX_STACKS]]
    others = group_by_activity([each for each in rank_activities(incident.stacks) if each.rank not in culprits])
    if others:
        largest = others[0]
        example = next(each for each in incident.stacks if each.rank == largest.ranks[0])
        alike = len(largest.ranks) - 1
        note = largest.words + (f", like {format_count(alike, 'other rank')}" if alike else "")
        views.append(stack_view(example, f"rank {example.rank}", note))
    return views


def stack_view(stacks: RankStacks, title: str, note: str) -> StackView:
    frames = displayed_frames(stacks)
    shown = tuple((frame, not is_library(frame.file)) for frame in frames[:MAX_FRAMES])
    return StackView(title, note, shown, len(frames) - len(shown))


def highest_watts(incident: IncidentReport) -> float | None:
    """The highest power of any GPU in the timeline. As the top of the scale, it shows how low a hang is."""
    return max((p.power_watts_high for p in incident.timeline if p.power_watts_high is not None), default=None)


def backticks_to_code(text: str) -> Markup:
    """Text between backticks as <code>; all of it escaped."""
    # An odd number of backticks has no pairs: leave the text as it is.
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(each) if i % 2 else escape(each) for i, each in enumerate(parts)
    )


def format_rank_and_node_count(live: LiveEvidence | None) -> str:
    if live is None or not live.ranks:
        return ""
    nodes = Counter(rank.node for rank in live.ranks)
    return f"{format_count(len(live.ranks), 'rank')} on {format_count(len(nodes), 'node')}"


def _without_control_characters(value: object) -> object:
    return type(value)(replace_unprintable(value)) if isinstance(value, str) else value


@cache
def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("wattwatch.watcher.diagnosis.report", "templates"),
        autoescape=True,
        # A misspelled name in the template is an error, not an empty place in the report.
        undefined=StrictUndefined,
        # Escaping leaves control and bidirectional characters alone, which could make a name look like another one.
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ranks=format_ranks,
        size=format_bytes,
        hours=format_hours,
        energy=format_energy,
        duration=format_duration,
        utc_time=format_utc_time,
        code=backticks_to_code,
        capitalized=capitalize_first,
        source_label=source_label,
        thousands="{:,}".format,
    )
    environment.globals.update(
        rank_and_node_count=format_rank_and_node_count,
        count=format_count,
        agree=agree_with_count,
    )
    return environment
