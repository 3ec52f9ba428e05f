"""A diagnosis in the API and on the page, and how they say that there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.watcher.diagnosis.sample_incidents import incident
from tests.watcher.web import sample_snapshots as samples
from tests.watcher.web.served_app import make_app, served
from wattwatch.watcher.diagnosis.model import Evidence
from wattwatch.watcher.diagnosis.report.page import render_incident_report
from wattwatch.watcher.engine.snapshot import DiagnosisStage, DiagnosisView, Snapshot
from wattwatch.watcher.incidents.investigation import InvestigationResult, list_evidence_with_digests, render_report
from wattwatch.watcher.web.page import PageRenderer

JOB = "finetune-evenfix"
PATH = f"/api/v1/jobs/{JOB}/diagnosis"
MADE = incident()
NO_REPORT = DiagnosisView(
    JOB, DiagnosisStage.DONE, "JobHung-218", "JobHung", samples.NOW - 215, samples.NOW - 200, MADE.diagnosis
)


def cluster(*views: DiagnosisView) -> Snapshot:
    return replace(samples.cluster(), diagnoses={view.job: view for view in views})


def ask(path: str, *views: DiagnosisView, token: str | None = None) -> httpx.Response:
    with served(make_app(cluster(*views), token).app) as address:
        return httpx.get(address + path, trust_env=False)


def problem(answer: httpx.Response) -> str:
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"
    document: Mapping[str, Any] = answer.json()
    return str(document["detail"])


@pytest.fixture
def done(tmp_path: Path) -> DiagnosisView:
    report = tmp_path / "report.html"
    report.write_text(render_incident_report(MADE), "utf-8")
    return replace(NO_REPORT, directory=str(tmp_path), report=str(report))


def test_the_api_returns_who_where_why_and_how_certain(done: DiagnosisView) -> None:
    document = ask(PATH, done).json()
    assert (document["verdict"], document["conclusive"], document["culprits"]) == ("desync", True, [3])
    assert (document["alert"], document["stage"], document["cause"]) == ("JobHung", "done", "program")
    assert document["who"] == [
        {
            "rank": 3,
            "node": "node-01",
            "gpu": 3,
            "doing": "in barrier at sequence number 41 (save_checkpoint, train.py:88)",
        }
    ]
    (group,) = document["groups"]
    assert [(row["place"], len(row["ranks"])) for row in group["members"]] == [("waiting", 15), ("behind", 1)]
    (wait,) = document["waits"]
    assert (len(wait["ranks"]), wait["awaited"]) == (15, [3])
    assert document["report"] == f"{PATH}/report"
    assert document["stacks"][0]["frames"][2]["function"] == "save_checkpoint"


@pytest.mark.parametrize(
    ("view", "says"),
    [
        (None, "no hang or stalled checkpoint has been detected so far"),
        (DiagnosisView(JOB, DiagnosisStage.OFF), "`capture = false`"),
        (replace(NO_REPORT, stage=DiagnosisStage.RUNNING, diagnosis=None), "has been running since 10:11:25 UTC"),
        (
            replace(NO_REPORT, stage=DiagnosisStage.FAILED, diagnosis=None, trouble="the disk is full", directory="/d"),
            "gave no diagnosis: the disk is full; the captured files are in /d",
        ),
    ],
    ids=["no hang", "off", "running", "failed"],
)
@pytest.mark.parametrize("path", [PATH, f"{PATH}/report"])
def test_without_a_diagnosis_the_api_says_why(path: str, view: DiagnosisView | None, says: str) -> None:
    assert says in problem(ask(path, *([] if view is None else [view])))


def test_an_unknown_job_is_not_reported_as_a_job_without_a_hang() -> None:
    assert "there is no job 'nobody'" in problem(ask("/api/v1/jobs/nobody/diagnosis"))


def test_an_earlier_diagnosis_is_returned_while_the_next_capture_runs(done: DiagnosisView) -> None:
    document = ask(PATH, replace(done, stage=DiagnosisStage.RUNNING, ended_wall_seconds=None)).json()
    assert (document["stage"], document["ended"], document["culprits"]) == ("running", None, [3])


def test_the_report_is_served_with_a_policy_that_allows_only_its_own_style(done: DiagnosisView) -> None:
    answer = ask(f"{PATH}/report", done)
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.text == render_incident_report(MADE)


def test_a_missing_report_is_a_problem_document_that_says_so(done: DiagnosisView) -> None:
    Path(done.report).unlink()
    assert "cannot be read: No such file" in problem(ask(f"{PATH}/report", done))
    assert "could not be written" in problem(ask(f"{PATH}/report", NO_REPORT))


@pytest.mark.parametrize("path", [PATH, f"{PATH}/report"])
def test_both_paths_require_the_token(done: DiagnosisView, path: str) -> None:
    answer = ask(path, done, token="s3cret")
    assert answer.status_code == 401
    assert "Rank 3" not in answer.text


def shown(*views: DiagnosisView) -> str:
    return PageRenderer(make_app(cluster(*views)).latest).page()


def test_the_page_shows_a_diagnosis_with_its_job_while_the_episode_is_open(done: DiagnosisView) -> None:
    page = shown(done)
    assert "<b>Diagnosis:</b> Rank 3 on node-01 is in the save&#39;s barrier" in page
    assert f'<a href="{PATH}/report">report</a>' in page
    assert "<b>Diagnosis (not conclusive):</b>" in shown(
        replace(done, diagnosis=replace(MADE.diagnosis, conclusive=False))
    )
    assert "Capturing evidence" in shown(replace(done, stage=DiagnosisStage.RUNNING, diagnosis=None))
    assert "Diagnosis" not in shown(replace(done, episode_id="one before"))


def test_a_closed_alert_has_its_diagnosis_and_the_link_to_its_report(done: DiagnosisView) -> None:
    snapshot = cluster(done)
    first = replace(snapshot.episodes[0], closed_wall_seconds=samples.NOW - 20, diagnosis="rank 3 (conclusive)")
    other = replace(first, id="one before", diagnosis="rank 4 (not conclusive)")
    closed = replace(snapshot, episodes=(first, other, *snapshot.episodes[1:]))
    page = PageRenderer(make_app(closed).latest).page().split("Recently closed alerts")[1]
    assert "<b>Diagnosis:</b> rank 3 (conclusive)" in page
    assert "<b>Diagnosis:</b> rank 4 (not conclusive)" in page
    assert page.count(f'<a href="{PATH}/report">report</a>') == 1


def test_an_alert_has_its_diagnosis_and_its_cost() -> None:
    snapshot = samples.cluster()
    first = replace(snapshot.episodes[0], diagnosis="rank 3 (conclusive)", kilowatt_hours_lost=0.19)
    with served(make_app(replace(snapshot, episodes=(first, *snapshot.episodes[1:]))).app) as address:
        alerts = httpx.get(f"{address}/api/v1/alerts", trust_env=False).json()
        page = httpx.get(address, trust_env=False).text
    assert (alerts[0]["diagnosis"], alerts[0]["kilowatt_hours_lost"]) == ("rank 3 (conclusive)", 0.19)
    assert alerts[1]["diagnosis"] is None
    assert "<b>Diagnosis:</b> rank 3 (conclusive)" in page


def test_an_incident_report_lists_its_evidence_with_digests(tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_bytes(b"abc")
    (tmp_path / "rank-00003.recorder").write_bytes(b"record")
    (tmp_path / "manifest.json").write_text(
        '{"files": {"rank-00003.recorder": {"sha256": "feed", "node": "node-01", "source": null}}}'
    )
    assert [(file.name, file.sha256[:8], file.about) for file in list_evidence_with_digests(tmp_path)] == [
        ("rank-00003.recorder", "feed", "node-01"),
        ("seen.json", "ba7816bf", ""),
    ]
    assert MADE.live is not None
    result = InvestigationResult(tmp_path, MADE.live, samples.NOW, Evidence(stacks=MADE.stacks), MADE.diagnosis)
    page = render_report(samples.hung(), samples.episodes()[0], result)
    assert "rank-00003.recorder" in page
    assert "0.97 <small>GPU-hours" in page
    with pytest.raises(ValueError, match="no diagnosis"):
        render_report(samples.hung(), samples.episodes()[0], replace(result, diagnosis=None))


def test_an_invalid_manifest_hides_no_file(tmp_path: Path) -> None:
    (tmp_path / "seen.json").write_bytes(b"abc")
    for text in ("", "[]", '{"files": []}', '{"files": {"seen.json": 3}}'):
        (tmp_path / "manifest.json").write_text(text)
        assert [file.name for file in list_evidence_with_digests(tmp_path)] == ["seen.json"]
