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

from watcher.diagnose.diagnosis import Cause, Diagnosis, DiagnosisVerdict
from watcher.diagnose.document import at_one_slot, culprits_first, group_document, wait_documents
from watcher.diagnose.evidence import RankStacks, Seen, StackFrame
from watcher.diagnose.report.ranks import rank_picture
from watcher.diagnose.report.timeline import timeline_picture
from watcher.diagnose.traces.activity import grouped, rank_activities
from watcher.diagnose.traces.own_code import is_library
from watcher.diagnose.traces.stacks import shown_frames
from watcher.diagnose.words import PLACE_WORDS, agreeing, capital, counted, grouped_by_rank, printable, ranks_in_words
from watcher.quantities import amount, duration, energy
from watcher.snapshot import TimelinePoint

STYLE: Final = (resources.files("watcher.diagnose.report") / "templates" / "report.css").read_text("utf-8")
_HASH: Final = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
POLICY: Final = f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'"

GROUPS_MOST: Final = 8
ROWS_MOST: Final = 10  # of a group, and of who waits for whom
FRAMES_MOST: Final = 10
FILES_MOST: Final = 60
STACKS_MOST: Final = 4

VERDICT_WORDS: Final = {
    DiagnosisVerdict.DESYNC: "ranks are in different collectives",
    DiagnosisVerdict.MISMATCH: "one collective with other sizes or types",
    DiagnosisVerdict.NEVER_ARRIVED: "ranks that never arrived",
    DiagnosisVerdict.NO_DESYNC: "all ranks in the same collective",
    DiagnosisVerdict.UNKNOWN: "not known",
}
CAUSE_WORDS: Final = {
    Cause.GPU: "a GPU",
    Cause.RANK: "a rank's process",
    Cause.HOST: "a host",
    Cause.STORAGE: "storage",
    Cause.NETWORK: "the network",
    Cause.DATA: "the data",
    Cause.PROGRAM: "the program",
    Cause.UNKNOWN: "not known",
}


@dataclass(frozen=True, slots=True)
class EvidenceFile:
    name: str
    bytes: int
    sha256: str
    about: str = ""  # where it came from


@dataclass(frozen=True, slots=True)
class Incident:
    """What the page is drawn from. Wall seconds are Unix time; what is not known is None or empty."""

    job: str
    diagnosis: Diagnosis
    seen: Seen | None = None
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


def incident_report(incident: Incident) -> str:
    """The whole page as text; encode it as UTF-8."""
    diagnosis, reading = incident.diagnosis, incident.diagnosis.reading
    culprits = frozenset(culprit.rank for culprit in diagnosis.culprits)
    waited = [] if reading is None else wait_documents(reading.waits)
    waits = culprits_first(waited or at_one_slot(diagnosis, culprits), culprits)
    groups = [] if reading is None else [group_document(group) for group in reading.groups]
    ranks = () if incident.seen is None else incident.seen.ranks
    values: Mapping[str, Any] = {
        "incident": incident,
        "diagnosis": diagnosis,
        "style": STYLE,
        "policy": POLICY,
        "verdict": verdict_words(diagnosis),
        "missing": grouped_by_rank(diagnosis.missing),
        "cause": CAUSE_WORDS[diagnosis.cause],
        "places": PLACE_WORDS,
        "for_it": [each for each in diagnosis.testimonies if each.agrees],
        "against": [each for each in diagnosis.testimonies if not each.agrees],
        "tied": () if reading is None else reading.tied,
        "timeline": timeline_picture(
            incident.timeline,
            incident.opened_wall_seconds,
            incident.diagnosed_wall_seconds,
            incident.closed_wall_seconds,
        ),
        "power": rank_picture(ranks, culprits, "power_watts", "W", top_watts(incident)),
        "utilization": rank_picture(ranks, culprits, "utilization_percent", "%", 100.0),
        "waits": waits[:ROWS_MOST],
        "waits_left": len(waits) - ROWS_MOST,
        "groups": groups[:GROUPS_MOST],
        "culprits": culprits,
        "groups_left": len(groups) - GROUPS_MOST,
        "rows_most": ROWS_MOST,
        "stacks": stack_views(incident, culprits),
        "files": incident.files[:FILES_MOST],
        "files_left": len(incident.files) - FILES_MOST,
        "version": version("wattwatch"),
    }
    return templates().get_template("report.html").render(values)


def verdict_words(diagnosis: Diagnosis) -> str:
    if diagnosis.nothing_open:
        return "no hang"
    if diagnosis.verdict is DiagnosisVerdict.UNKNOWN and diagnosis.culprits:
        return "suspected"
    return VERDICT_WORDS[diagnosis.verdict]


def stack_views(incident: Incident, culprits: frozenset[int]) -> Sequence[StackView]:
    """Those of the culprits, then one of the largest group of the others: where they wait."""
    own = {each.rank: each for each in incident.diagnosis.stacks}
    own |= {each.rank: each for each in incident.stacks if each.rank in culprits}
    views = [stack_view(own[rank], f"rank {rank}", "holds the job up") for rank in sorted(own)[:STACKS_MOST]]
    others = grouped([each for each in rank_activities(incident.stacks) if each.rank not in culprits])
    if others:
        largest = others[0]
        example = next(each for each in incident.stacks if each.rank == largest.ranks[0])
        note = f"{counted(len(largest.ranks), 'rank')} at this line: {largest.words}"
        views.append(stack_view(example, ranks_in_words(largest.ranks), note))
    return views


def stack_view(stacks: RankStacks, title: str, note: str) -> StackView:
    frames = shown_frames(stacks)
    shown = tuple((frame, not is_library(frame.file)) for frame in frames[:FRAMES_MOST])
    return StackView(title, note, shown, len(frames) - len(shown))


def top_watts(incident: Incident) -> float | None:
    """What a board drew at most while the job was watched: against that, all boards of a hang stand at the floor."""
    return max((p.power_watts_high for p in incident.timeline if p.power_watts_high is not None), default=None)


def ticked(text: str) -> Markup:
    """What stands between backticks as code; all of it escaped."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(each) if i % 2 else escape(each) for i, each in enumerate(parts)
    )


def size_words(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def moment_words(wall_seconds: float) -> str:
    return datetime.fromtimestamp(wall_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def node_words(seen: Seen | None) -> str:
    if seen is None or not seen.ranks:
        return ""
    nodes = Counter(rank.node for rank in seen.ranks)
    return f"{counted(len(seen.ranks), 'rank')} on {counted(len(nodes), 'node')}"


def _shown(value: object) -> object:
    """What a template writes out."""
    return type(value)(printable(value)) if isinstance(value, str) else value


@cache
def templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("watcher.diagnose.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        ranks=ranks_in_words,
        size=size_words,
        amount=amount,
        energy=energy,
        duration=duration,
        moment=moment_words,
        ticked=ticked,
        capital=capital,
        thousands="{:,}".format,
    )
    environment.globals.update(node_words=node_words, counted=counted, agreeing=agreeing)
    return environment
