"""When a hung job is looked into, how often, and that nothing of it holds the engine up."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.watcher.web.sample_snapshots import cluster, episode, hung
from wattwatch.collectors.samples import KernelEvent
from wattwatch.watcher.detection.model import AlertName, Severity
from wattwatch.watcher.diagnosis.model import Culprit, Diagnosis, DiagnosisVerdict, Evidence, HangCause
from wattwatch.watcher.engine.snapshot import DiagnosisStage, DiagnosisView, EpisodeView, JobView, Snapshot
from wattwatch.watcher.incidents.capture_scheduler import (
    HOUR_SECONDS,
    KERNEL_EVENT_SECONDS,
    MAX_CAPTURES_PER_HOUR,
    MAX_CONCURRENT_CAPTURES,
    CaptureScheduler,
    KernelEventHistory,
)
from wattwatch.watcher.incidents.diagnosis_process import DiagnosisError
from wattwatch.watcher.incidents.investigation import (
    InvestigationResult,
    Investigator,
    capture_directory_name,
    prune_captures,
)
from wattwatch.watcher.incidents.recorder import MAX_RECORDINGS

JOB = "finetune-evenfix"
PROOF = Diagnosis(
    DiagnosisVerdict.DESYNC,
    conclusive=True,
    cause=HangCause.PROGRAM,
    culprits=(Culprit(3, "gpu-03", 3, "in barrier"),),
    confidence=0.97,
    step=3854,
    summary="Rank 3 on gpu-03 is in barrier, 15 ranks wait in all_reduce.",
    why="",
    advice="",
)
HINT = replace(PROOF, conclusive=False, culprits=(), summary="All wait in the same all_reduce.")
DEADLINE_SECONDS = 20.0


def view_of(job: str = JOB, confirmed: bool = True, alert: AlertName = AlertName.JOB_HUNG) -> JobView:
    view = hung()
    found = replace(view.findings[0], job=job, confirmed=confirmed, alert=alert)
    return replace(view, name=job, sample=replace(view.sample, job=job), findings=(found,))


def open_episode(
    job: str = JOB, confirmed: bool = True, name: str = "e1", alert: AlertName = AlertName.JOB_HUNG
) -> EpisodeView:
    return episode(alert, Severity.CRITICAL, job, "Hung.", 30.0, id=name, confirmed=confirmed)


def snapshot(*episodes: EpisodeView, views: tuple[JobView, ...] | None = None) -> Snapshot:
    views = tuple(view_of(each.job, each.confirmed) for each in episodes) if views is None else views
    return replace(cluster(), episodes=episodes, jobs={view.name: view for view in views})


class Field:
    """A diagnosing watcher whose captures end when the test lets them."""

    def __init__(self, directory: Path, *, off: bool = False) -> None:
        self.directory = directory
        self.now = 1000.0
        self.conclusions: list[Diagnosis | Exception] = []  # of each capture in turn; the last for ever
        self.captured: list[tuple[str, Path]] = []
        self.told: list[tuple[str, Diagnosis]] = []
        self.reports = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        inquiry = Investigator(self.capture, self.conclude, self.report, self.wall)
        self.diagnosing = CaptureScheduler(
            directory, {JOB: not off} | {f"job-{i}": True for i in range(9)}, inquiry, self.tell, self
        )

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1.8e9 + self.now

    def capture(self, view: JobView, directory: Path) -> None:
        with self.changed:
            self.captured.append((view.name, directory))
            self.changed.notify_all()
        assert self.gate.wait(DEADLINE_SECONDS)
        if self.failure is not None:
            raise self.failure

    def conclude(self, directory: Path) -> tuple[Evidence, Diagnosis]:
        found = self.conclusions.pop(0) if len(self.conclusions) > 1 else self.conclusions[0]
        if isinstance(found, Exception):
            raise found
        return Evidence(), found

    def report(self, view: JobView, episode: EpisodeView, result: InvestigationResult) -> str:
        with self.changed:
            self.reports += 1
            self.changed.notify_all()
        return f"<!doctype html><title>{view.name} {episode.closed_wall_seconds}</title>"

    def tell(self, name: str, diagnosis: Diagnosis) -> None:
        self.told.append((name, diagnosis))

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_SECONDS)

    def rest(self) -> None:
        """All threads have ended."""
        for thread in self.diagnosing._threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()

    def look(self, *episodes: EpisodeView, seconds: float = 1.0, views: tuple[JobView, ...] | None = None) -> None:
        """A look, all that it began, and the look after."""
        for _ in range(2):
            self.now += seconds
            self.diagnosing.look(snapshot(*episodes, views=views))
            if self.gate.is_set():
                self.rest()

    def view(self, job: str = JOB) -> DiagnosisView:
        return self.diagnosing.views()[job]


@pytest.fixture
def field(tmp_path: Path) -> Iterator[Field]:
    field = Field(tmp_path / "incidents")
    field.conclusions = [PROOF]
    yield field
    field.gate.set()
    field.rest()


def test_a_hang_is_looked_into_once_an_episode_and_told_of(field: Field) -> None:
    for _ in range(5):
        field.look(open_episode())
    assert len(field.captured) == 1
    assert field.told == [("e1", PROOF)]
    view = field.view()
    assert (view.stage, view.diagnosis, view.alert) == (DiagnosisStage.DONE, PROOF, "JobHung")
    directory = Path(view.directory)
    assert directory.name.endswith("-finetune-evenfix-JobHung.capture")
    assert json.loads((directory / "diagnosis.json").read_text())["culprits"] == [3]
    assert json.loads((directory / "seen.json").read_text())["suspects"] == [3]
    assert Path(view.report).read_text().startswith("<!doctype html>")
    field.look(open_episode(name="e2"))
    assert len(field.captured) == 2


def test_a_stalled_checkpoint_is_looked_into_and_a_slow_job_is_not(field: Field) -> None:
    for alert in (AlertName.JOB_SLOW, AlertName.JOB_STARVING, AlertName.GPU_FAULT):
        field.look(open_episode(alert=alert, name=alert.value), views=(view_of(alert=alert),))
    assert field.captured == []
    alert = AlertName.CHECKPOINT_STALLED
    field.look(open_episode(alert=alert, name="e2"), views=(view_of(alert=alert),))
    assert len(field.captured) == 1


@pytest.mark.parametrize(
    ("first", "captures"), [(PROOF, 1), (HINT, 2), (OSError("disk"), 2)], ids=["proved", "not proved", "failed"]
)
def test_a_suspicion_that_is_confirmed_is_looked_into_again_unless_it_was_proved(
    field: Field, first: Diagnosis | Exception, captures: int
) -> None:
    field.conclusions = [first, HINT, HINT]
    for _ in range(3):
        field.look(open_episode(confirmed=False))
    assert len(field.captured) == 1
    for _ in range(5):
        field.look(open_episode())
    assert len(field.captured) == captures


def test_a_hang_that_began_confirmed_is_looked_into_once_whatever_came_of_it(field: Field) -> None:
    field.conclusions = [HINT]
    for _ in range(5):
        field.look(open_episode())
    assert len(field.captured) == 1


def test_a_capture_that_hangs_holds_nobody_up_and_is_the_only_one_of_its_job(field: Field) -> None:
    field.gate.clear()
    field.look(open_episode(), open_episode(name="e2"))
    field.until(lambda: len(field.captured) == 1)
    assert field.view().stage is DiagnosisStage.RUNNING
    assert field.told == []
    field.gate.set()
    field.rest()
    field.look(open_episode())
    assert field.told == [("e1", PROOF)]


def test_so_many_at_once_and_the_others_wait_for_their_turn(field: Field) -> None:
    field.gate.clear()
    episodes = [open_episode(f"job-{i}", name=f"e{i}") for i in range(5)]
    for _ in range(3):
        field.look(*episodes)
    field.until(lambda: len(field.captured) == MAX_CONCURRENT_CAPTURES)
    field.gate.set()
    field.rest()
    for _ in range(5):
        field.look(*episodes)
    assert sorted(job for job, _ in field.captured) == [f"job-{i}" for i in range(5)]


def test_so_many_an_hour_of_one_job(field: Field) -> None:
    for i in range(2 * MAX_CAPTURES_PER_HOUR):
        field.look(open_episode(name=f"e{i}"))
    assert len(field.captured) == MAX_CAPTURES_PER_HOUR
    field.look(open_episode(name="later"), seconds=HOUR_SECONDS + 1)
    assert len(field.captured) == MAX_CAPTURES_PER_HOUR + 1


def test_a_job_whose_configuration_forbids_it_is_not_looked_into(tmp_path: Path) -> None:
    field = Field(tmp_path, off=True)
    field.look(open_episode())
    assert field.captured == []
    assert field.view().stage is DiagnosisStage.OFF


def test_an_episode_of_before_a_restart_is_looked_into_once_the_hang_is_seen_again(field: Field) -> None:
    at_work = replace(view_of(), findings=())
    field.look(open_episode(), views=(at_work,))
    assert field.captured == []
    field.look(open_episode())
    assert len(field.captured) == 1


def test_a_capture_that_fails_leaves_what_was_seen_from_outside(field: Field) -> None:
    field.failure = ConnectionError("no node answers")
    field.look(open_episode())
    view = field.view()
    assert view.diagnosis is not None
    assert view.stage is DiagnosisStage.DONE
    assert view.diagnosis.missing == ("the capture failed (ConnectionError: no node answers)",)


def test_a_diagnosis_that_fails_is_said_in_words_and_told_to_nobody(field: Field) -> None:
    field.conclusions = [KeyError("slot")]
    field.look(open_episode())
    view = field.view()
    assert (view.stage, view.diagnosis, field.told) == (DiagnosisStage.FAILED, None, [])
    assert "an error inside the watcher (KeyError: 'slot')" in view.trouble


def test_a_disk_that_cannot_be_written_is_said_and_no_node_is_asked(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file")
    field = Field(tmp_path / "incidents")
    field.look(open_episode())
    assert "cannot be written" in field.view().trouble
    assert field.captured == []


def test_the_report_is_drawn_once_more_when_the_episode_is_over(field: Field) -> None:
    field.look(open_episode())
    report = Path(field.view().report)
    assert "None" in report.read_text()
    field.look(replace(open_episode(), closed_wall_seconds=77.0), views=(replace(view_of(), findings=()),))
    assert "77.0" in report.read_text()
    assert field.reports == 2
    assert field.view().diagnosis == PROOF  # and stays the job's latest


def test_what_the_kernel_said_minutes_before_is_evidence(field: Field) -> None:
    event = KernelEvent("oom", "Killed process 7 (python)", 2.0)
    view = view_of()
    nodes = (replace(view.sample.nodes[0], kernel_events=(event,)), *view.sample.nodes[1:])
    before = replace(view, sample=replace(view.sample, nodes=nodes), findings=())
    field.look(views=(before,))
    field.look(open_episode(), seconds=100.0)
    ((_, directory),) = field.captured
    (fault,) = json.loads((directory / "seen.json").read_text())["faults"]
    assert fault["kind"] == "oom"
    assert "Killed process 7 (python) (10" in fault["words"]
    memory = KernelEventHistory()
    memory.add(before.sample, 0.0)
    assert memory.events(JOB, KERNEL_EVENT_SECONDS) == ()


def test_a_line_of_the_kernel_of_unknown_age_is_not_said_to_be_new() -> None:
    view = view_of()
    undated = KernelEvent("oom", "Killed process 7 (python)", None)
    nodes = (replace(view.sample.nodes[0], kernel_events=(undated,)), *view.sample.nodes[1:])
    memory = KernelEventHistory()
    memory.add(replace(view.sample, nodes=nodes), 0.0)
    (event,) = memory.events(JOB, 60.0)
    assert event.age_seconds is None
    assert memory.events(JOB, KERNEL_EVENT_SECONDS + 1.0) == ()


def test_as_many_captures_are_kept_as_recordings(tmp_path: Path) -> None:
    for second in range(MAX_RECORDINGS + 3):
        (tmp_path / capture_directory_name("llama", "JobHung", 1.8e9 + second, 0)).mkdir()
    (tmp_path / "20270115T080000Z-llama-JobHung.wattwatch.gz").write_bytes(b"")
    prune_captures(tmp_path)
    left = sorted(path.name for path in tmp_path.glob("*.capture"))
    assert len(left) == MAX_RECORDINGS - 1
    assert left[-1] == capture_directory_name("llama", "JobHung", 1.8e9 + MAX_RECORDINGS + 2, 0)
    assert len(list(tmp_path.glob("*.gz"))) == 1


def test_large_captures_make_room_for_each_other_and_the_newest_stays(tmp_path: Path) -> None:
    for second in range(4):
        capture = tmp_path / capture_directory_name("llama", "JobHung", 1.8e9 + second, 0)
        capture.mkdir()
        (capture / "rank-00000.recorder").write_bytes(b"x" * 100)
    prune_captures(tmp_path, kept_bytes=250)
    assert [path.name[13:15] for path in sorted(tmp_path.iterdir())] == ["02", "03"]


def test_where_there_is_no_evidence_it_says_so(field: Field) -> None:
    field.conclusions = [DiagnosisError("/captures/x: nothing in it can be used")]
    field.failure = ConnectionError("no node answers")
    field.look(open_episode())
    assert field.view().trouble == (
        "the capture failed (ConnectionError: no node answers); /captures/x: nothing in it can be used"
    )


def test_a_directory_is_named_by_time_job_and_alert_whatever_the_job_is_called() -> None:
    assert capture_directory_name("a/b ../c", "JobHung", 1.8e9, 1) == "20270115T080000Z-a-b-..-c-JobHung-2.capture"
