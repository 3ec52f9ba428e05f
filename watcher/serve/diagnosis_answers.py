"""What the API answers of a diagnosis, as documented models; and why there is none, in a sentence."""

from __future__ import annotations

from datetime import datetime
from urllib.parse import quote

from pydantic import BaseModel, Field

from watcher.diagnose.diagnosis import Cause, Diagnosis, DiagnosisVerdict, Place
from watcher.diagnose.document import document_of
from watcher.serve.answers import utc
from watcher.snapshot import DiagnosisStage, DiagnosisView


class CulpritAnswer(BaseModel):
    rank: int
    node: str | None
    gpu: int | None
    doing: str = Field(description="where it is instead, with its line of code where that is known")


class StandingAnswer(BaseModel):
    """Ranks of a group that stand alike at the slot."""

    place: Place = Field(description="waiting, behind, silent, ahead or absent")
    operation: str | None = Field(description="what they launched at the slot")
    line: str | None = Field(description="line of the job's own code that launched it, or where they are instead")
    ranks: list[int]


class GroupAnswer(BaseModel):
    """One process group at a slot that the conclusion rests on, or that somebody waits at."""

    group: str
    name: str
    size: int
    slot: int
    members: list[StandingAnswer]


class WaitAnswer(BaseModel):
    """`ranks` cannot go on before `awaited` do."""

    ranks: list[int]
    awaited: list[int]
    group: str
    slot: int
    operation: str
    why: str


class TestimonyAnswer(BaseModel):
    """One source that speaks for the conclusion, or against it."""

    source: str
    agrees: bool
    words: str


class StackFrameAnswer(BaseModel):
    function: str
    file: str
    line: int | None


class StackAnswer(BaseModel):
    """The main thread of a culprit, innermost line first."""

    rank: int
    source: str
    frames: list[StackFrameAnswer]


class LogAnswer(BaseModel):
    """What a culprit printed last, without what a terminal would obey."""

    rank: int
    source: str
    lines: list[str]


class UnreadAnswer(BaseModel):
    """A record that is there and cannot be used."""

    source: str
    rank: int | None
    why: str


class DiagnosisAnswer(BaseModel):
    """Who holds the job up, where, why, and how sure: the fields of `wattwatch diagnose --json`, and where from."""

    job: str
    alert: str = Field(description="that it explains")
    episode: str = Field(description="id of the alert episode")
    stage: DiagnosisStage = Field(description="of the latest capture; running or failed: this is of one before")
    began: datetime = Field(description="when the latest capture began")
    ended: datetime | None = Field(description="null while it runs")
    trouble: str | None = Field(description="why the latest capture gave no diagnosis")
    directory: str = Field(description="on the watcher's host, with the capture: `wattwatch diagnose` reads it")
    report: str | None = Field(description="path of the incident's page, here")
    verdict: DiagnosisVerdict
    conclusive: bool = Field(description="true: proved, not only likely")
    culprits: list[int] = Field(description="ranks")
    confidence: float = Field(ge=0, le=1)
    step: int | None
    cause: Cause = Field(description="what is to blame, as far as the evidence goes")
    summary: str
    why: str
    advice: str
    who: list[CulpritAnswer]
    tied: list[list[int]] = Field(description="sets of ranks of which one is wrong, and the records do not tell which")
    groups: list[GroupAnswer]
    waits: list[WaitAnswer]
    testimonies: list[TestimonyAnswer]
    stacks: list[StackAnswer]
    logs: list[LogAnswer]
    evidence: list[str] = Field(description="files in the directory that it rests on")
    missing: list[str] = Field(description="what was asked for and not had")
    unread: list[UnreadAnswer]


def diagnosis_answer(view: DiagnosisView, diagnosis: Diagnosis) -> DiagnosisAnswer:
    return DiagnosisAnswer(
        job=view.job,
        alert=view.alert,
        episode=view.episode_id,
        stage=view.stage,
        began=utc(view.began_wall_seconds),
        ended=None if view.ended_wall_seconds is None else utc(view.ended_wall_seconds),
        trouble=view.trouble or None,
        directory=view.directory,
        report=report_path(view) if view.report else None,
        **document_of(diagnosis),
    )


def report_path(view: DiagnosisView) -> str:
    return f"/api/v1/jobs/{quote(view.job, safe='/')}/diagnosis/report"


def why_none(job: str, view: DiagnosisView | None) -> str:
    """A sentence for whoever asked and gets none."""
    if view is None:
        return f"{job!r} has not been looked into: no hang and no stalled checkpoint of it was found so far"
    if view.stage is DiagnosisStage.OFF:
        return f"{job!r} is not looked into: its configuration says `capture = false`"
    if view.stage is DiagnosisStage.RUNNING:
        return f"{job!r} is being looked into since {utc(view.began_wall_seconds):%H:%M:%S} UTC: ask again in a moment"
    return f"the capture of {job!r} gave no diagnosis: {view.trouble}; what it has is in {view.directory}"
