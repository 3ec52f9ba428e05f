"""The incident report: complete in itself, safe for any names, and valid with little evidence."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.watcher.diagnosis.sample_incidents import NOW, incident, timeline
from wattwatch.watcher.diagnosis.model import Diagnosis, DiagnosisVerdict, HangCause, MemberState, RankLog, RankReadings
from wattwatch.watcher.diagnosis.model import SignalSummary as Said
from wattwatch.watcher.diagnosis.report.page import (
    EvidenceFile,
    IncidentReport,
    backticks_to_code,
    render_incident_report,
)
from wattwatch.watcher.diagnosis.report.ranks import draw_rank_chart
from wattwatch.watcher.diagnosis.report.timeline import draw_timeline, place_event_marks, tick_times

HOSTILE = "<script>alert(\"x\")</script> & 'q' </style> `<img src=x>` {{7*7}} \ud800\x1b[2J\u202e\x9b"
VOID = {"meta", "path", "rect"}
LITTLE = IncidentReport(
    "llama",
    Diagnosis(DiagnosisVerdict.UNKNOWN, False, HangCause.UNKNOWN, (), 0.0, None, "Nothing is known.", "", ""),
)


class Balanced(HTMLParser):
    """Every element that opens is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


def parsed(page: str) -> Balanced:
    found = Balanced()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


@pytest.mark.parametrize("world", [1, 8, 16, 64, 65, 1024])
def test_it_is_well_formed_whatever_the_size_of_the_job(world: int) -> None:
    page = render_incident_report(incident(world, culprit=world // 2))
    found = parsed(page)
    assert {"svg", "table", "pre", "h1"} <= found.seen
    for picture in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(picture)
    assert len(page) < 150_000
    assert "nan" not in re.sub(r"<(?:style|pre)>.*?</(?:style|pre)>", "", page, flags=re.DOTALL)


@pytest.mark.parametrize("world", [16, 1024])
def test_nothing_is_loaded_and_nothing_runs(world: int) -> None:
    page = render_incident_report(incident(world))
    found = parsed(page)
    assert not found.seen & {"script", "link", "img", "iframe", "object", "use", "a"}
    assert not found.attributes & {"src", "href", "style", "onload", "onclick"}
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page


def test_its_policy_allows_its_own_style_and_nothing_else() -> None:
    page = render_incident_report(incident())
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    (policy,) = re.findall(r'content="(default-src[^"]*)"', page)
    assert f"style-src &#39;sha256-{digest}&#39;" in policy
    assert policy.startswith("default-src &#39;none&#39;")


def test_names_from_the_job_are_escaped() -> None:
    whole = incident()
    signals = (Said(HOSTILE, True, HOSTILE), Said(HOSTILE, False, HOSTILE))
    diagnosis = replace(
        whole.diagnosis,
        summary=HOSTILE,
        why=HOSTILE,
        advice=HOSTILE,
        missing=(HOSTILE,),
        signals=signals,
        logs=(RankLog(3, HOSTILE, (HOSTILE, "ValueError: no tokens")),),
    )
    assert whole.live is not None
    ranks = tuple(replace(rank, node=HOSTILE) for rank in whole.live.ranks)
    page = render_incident_report(
        replace(
            whole,
            job=HOSTILE,
            alert=HOSTILE,
            summary=HOSTILE,
            facts=(HOSTILE,),
            diagnosis=diagnosis,
            live=replace(whole.live, ranks=ranks, faults=(replace(whole.live.faults[0], words=HOSTILE),)),
            files=(EvidenceFile(HOSTILE, 1, "0" * 64, HOSTILE),),
            directory=HOSTILE,
        )
    )
    assert not parsed(page).seen & {"script", "img"}
    assert "{{7*7}}" in page
    assert "ValueError: no tokens" in page
    assert page.count("</style>") == 1
    assert not set(page) & set("\ud800\x1b\u202e\x9b")


def test_text_between_backticks_becomes_code_and_is_escaped() -> None:
    assert backticks_to_code("set `a<b` or `c`") == "set <code>a&lt;b</code> or <code>c</code>"
    assert backticks_to_code("a lone ` <i>") == "a lone ` &lt;i&gt;"


def test_with_little_evidence_the_page_says_so_and_draws_nothing() -> None:
    page = render_incident_report(LITTLE)
    assert "Nothing is known." in page
    assert "not proven · 0 % confidence" in page
    assert "What happened" not in page
    assert "Power and utilization of each rank" not in page
    parsed(page)


def test_it_names_rank_node_confidence_and_cost() -> None:
    page = render_incident_report(incident())
    for words in (
        "Rank 3 on node-01 is in the save&#39;s barrier",
        "proven · 97 % confidence",
        "cause: the program",
        "ranks 0-2, 4-15",
        "save_checkpoint (/opt/job/train.py:88)",
        "184 W on the marked ranks, 189–193 W on the others",
        "0.98 <small>GPU-hours",
        "190 <small>Wh",
        "py-spy is not installed",
        "cut off after 4,096 bytes",
    ):
        assert words in page, words


def test_a_closed_incident_shows_its_duration() -> None:
    page = render_incident_report(replace(incident(), closed_wall_seconds=NOW + 385))
    assert "<dt>lasted</dt><dd>10 min</dd>" in page
    assert ">closed</text>" in page


def test_a_rank_without_a_reading_is_marked_as_absent() -> None:
    ranks = (RankReadings(0, "n", power_watts=190.0), RankReadings(1, "n"))
    picture = draw_rank_chart(ranks, frozenset({1}), "power_watts", "W")
    assert picture is not None
    assert (picture.bars.count("M"), picture.absent.count("M"), picture.marked) == (1, 1, "")
    assert draw_rank_chart(ranks, frozenset(), "utilization_percent", "%") is None


def test_a_thousand_ranks_are_one_column_per_node_and_a_large_node_takes_several() -> None:
    ranks = tuple(RankReadings(rank, f"n{rank // 8}", utilization_percent=100.0) for rank in range(1024))
    picture = draw_rank_chart(ranks, frozenset({9}), "utilization_percent", "%", 100.0)
    assert picture is not None
    assert sum(path.count("M") for path in picture.shades) == 1024
    assert (picture.width, picture.marked.count("M")) == (704.0, 1)
    nowhere = tuple(replace(rank, node="") for rank in ranks)
    other = draw_rank_chart(nowhere, frozenset(), "utilization_percent", "%", 100.0)
    assert other is not None
    assert other.width == 64 * 11


def test_a_gap_in_the_readings_is_a_gap_in_the_chart() -> None:
    points = [
        replace(point, power_watts_median=None, power_watts_low=None, power_watts_high=None) if 300 < i < 340 else point
        for i, point in enumerate(timeline())
    ]
    picture = draw_timeline(points, NOW - 215, None, None)
    assert picture is not None
    assert picture.median.count("M") == 2
    assert [segment.state for segment in picture.segments][-2:] == ["waiting", "hung"]
    assert draw_timeline(points[:1], None, None, None) is None


def test_ticks_are_at_round_times_and_labels_keep_clear_of_each_other() -> None:
    assert [at % 120 for at in tick_times(NOW - 700, NOW)] == [0] * 6
    assert len(tick_times(NOW - 86_400, NOW)) == 4
    assert [mark.before for mark in place_event_marks([(500.0, "alert"), (520.0, "diagnosed"), (990.0, "closed")])] == [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("places", [(940.0, 985.0), (500.0, 510.0, 520.0), (2.0, 4.0), (0.0, 990.0), (990.0,) * 3])
def test_no_label_of_the_timeline_overlaps_another(places: tuple[float, ...]) -> None:
    made = place_event_marks(list(zip(places, ("alert", "diagnosed", "closed"), strict=False)))
    spans = []
    for mark in made:
        width = 7.0 * len(mark.words)
        start = mark.x - 5 - width if mark.before else mark.x + 5
        assert start >= 0
        spans.append((mark.row, start, start + width))
    for i, (row, start, end) in enumerate(spans):
        assert all(row != other or end <= left or right <= start for other, left, right in spans[:i]), made


def test_stacked_labels_have_room() -> None:
    page = render_incident_report(replace(incident(), opened_wall_seconds=NOW - 3, diagnosed_wall_seconds=NOW))
    assert 'viewBox="0 -33 1000 273"' in page
    assert 'y="-22">diagnosed' in page


def test_ranks_in_different_operations_at_one_slot_are_shown_waiting_for_the_culprit() -> None:
    made = incident()
    reading = made.diagnosis.collectives
    assert reading is not None
    (group,) = reading.groups
    met = tuple(replace(member, state=MemberState.WAITING) for member in group.members)
    parted = replace(reading, waits=(), groups=(replace(group, members=met),))
    page = render_incident_report(replace(made, diagnosis=replace(made.diagnosis, collectives=parted)))
    assert "Who waits for whom" in page
    assert "15 ranks in all_reduce" in page
    assert "in barrier at the same sequence number" in page
    alone = replace(parted, groups=())
    without = render_incident_report(replace(made, diagnosis=replace(made.diagnosis, collectives=alone)))
    assert "Who waits for whom" not in without
