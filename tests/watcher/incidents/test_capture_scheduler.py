"""When a hung job is captured and diagnosed, how often, and that none of it blocks the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.web.sample_snapshots import cluster, episode, hung
from wattwatch.collectors.clock import Clock
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


class SchedulerField(Clock):
    """A scheduler whose captures end when the test lets them."""

    def __init__(self, directory: Path, *, off: bool = False) -> None:
        self.directory = directory
        self.now = 1000.0
        self.conclusions: list[Diagnosis | Exception] = []  # of each capture in turn; the last for ever
        self.captured: list[tuple[str, Path]] = []
        self.diagnoses: list[tuple[str, Diagnosis]] = []
        self.reports = 0
        self.gate = threading.Event()
        self.gate.set()
        self.failure: Exception | None = None
        self.changed = threading.Condition()
        investigator = Investigator(self.capture, self.conclude, self.report, self.wall)
        self.scheduler = CaptureScheduler(
            directory, {JOB: not off} | {f"job-{i}": True for i in range(9)}, investigator, self.on_diagnosis, self
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

    def on_diagnosis(self, name: str, diagnosis: Diagnosis) -> None:
        self.diagnoses.append((name, diagnosis))

    def until(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE_SECONDS)

    def rest(self) -> None:
        """Waits until all threads have ended."""
        for thread in self.scheduler._threads:
            thread.join(DEADLINE_SECONDS)
            assert not thread.is_alive()

    def update(self, *episodes: EpisodeView, seconds: float = 1.0, views: tuple[JobView, ...] | None = None) -> None:
        """An update, everything that it started, and another update."""
        for _ in range(2):
            self.now += seconds
            self.scheduler.update(snapshot(*episodes, views=views))
            if self.gate.is_set():
                self.rest()

    def view(self, job: str = JOB) -> DiagnosisView:
        return self.scheduler.views()[job]


@pytest.fixture
def field(tmp_path: Path) -> Iterator[SchedulerField]:
    field = SchedulerField(tmp_path / "incidents")
    field.conclusions = [PROOF]
    yield field
    field.gate.set()
    field.rest()


def test_a_hang_is_captured_once_per_episode_and_its_diagnosis_reported(field: SchedulerField) -> None:
    for _ in range(5):
        field.update(open_episode())
    assert len(field.captured) == 1
    assert field.diagnoses == [("e1", PROOF)]
    view = field.view()
    assert (view.stage, view.diagnosis, view.alert) == (DiagnosisStage.DONE, PROOF, "JobHung")
    directory = Path(view.directory)
    assert directory.name.endswith("-finetune-evenfix-JobHung.capture")
    assert json.loads((directory / "diagnosis.json").read_text())["culprits"] == [3]
    assert json.loads((directory / "seen.json").read_text())["suspects"] == [3]
    assert Path(view.report).read_text().startswith("<!doctype html>")
    field.update(open_episode(name="e2"))
    assert len(field.captured) == 2


def test_a_stalled_checkpoint_is_captured_and_a_slow_job_is_not(field: SchedulerField) -> None:
    for alert in (AlertName.JOB_SLOW, AlertName.JOB_STARVING, AlertName.GPU_FAULT):
        field.update(open_episode(alert=alert, name=alert.value), views=(view_of(alert=alert),))
    assert field.captured == []
    alert = AlertName.CHECKPOINT_STALLED
    field.update(open_episode(alert=alert, name="e2"), views=(view_of(alert=alert),))
    assert len(field.captured) == 1


@pytest.mark.parametrize(
    ("first", "captures"), [(PROOF, 1), (HINT, 2), (OSError("disk"), 2)], ids=["proved", "not proved", "failed"]
)
def test_a_suspicion_is_captured_again_once_confirmed_unless_the_first_capture_proved_it(
    field: SchedulerField, first: Diagnosis | Exception, captures: int
) -> None:
    field.conclusions = [first, HINT, HINT]
    for _ in range(3):
        field.update(open_episode(confirmed=False))
    assert len(field.captured) == 1
    for _ in range(5):
        field.update(open_episode())
    assert len(field.captured) == captures


def test_a_hang_that_was_confirmed_at_once_is_captured_once_whatever_the_result(field: SchedulerField) -> None:
    field.conclusions = [HINT]
    for _ in range(5):
        field.update(open_episode())
    assert len(field.captured) == 1


def test_a_capture_that_hangs_blocks_nothing_and_is_the_only_one_of_its_job(field: SchedulerField) -> None:
    field.gate.clear()
    field.update(open_episode(), open_episode(name="e2"))
    field.until(lambda: len(field.captured) == 1)
    assert field.view().stage is DiagnosisStage.RUNNING
    assert field.diagnoses == []
    field.gate.set()
    field.rest()
    field.update(open_episode())
    assert field.diagnoses == [("e1", PROOF)]


def test_concurrent_captures_are_limited_and_the_others_wait(field: SchedulerField) -> None:
    field.gate.clear()
    episodes = [open_episode(f"job-{i}", name=f"e{i}") for i in range(5)]
    for _ in range(3):
        field.update(*episodes)
    field.until(lambda: len(field.captured) == MAX_CONCURRENT_CAPTURES)
    field.gate.set()
    field.rest()
    for _ in range(5):
        field.update(*episodes)
    assert sorted(job for job, _ in field.captured) == [f"job-{i}" for i in range(5)]


def test_captures_per_hour_and_job_are_limited(field: SchedulerField) -> None:
    for i in range(2 * MAX_CAPTURES_PER_HOUR):
        field.update(open_episode(name=f"e{i}"))
    assert len(field.captured) == MAX_CAPTURES_PER_HOUR
    field.update(open_episode(name="later"), seconds=HOUR_SECONDS + 1)
    assert len(field.captured) == MAX_CAPTURES_PER_HOUR + 1


def test_a_job_whose_configuration_forbids_captures_is_not_captured(tmp_path: Path) -> None:
    field = SchedulerField(tmp_path, off=True)
    field.update(open_episode())
    assert field.captured == []
    assert field.view().stage is DiagnosisStage.OFF


def test_an_episode_from_before_a_restart_is_captured_once_the_hang_is_detected_again(field: SchedulerField) -> None:
    at_work = replace(view_of(), findings=())
    field.update(open_episode(), views=(at_work,))
    assert field.captured == []
    field.update(open_episode())
    assert len(field.captured) == 1


def test_a_capture_that_fails_leaves_the_live_evidence(field: SchedulerField) -> None:
    field.failure = ConnectionError("no node answers")
    field.update(open_episode())
    view = field.view()
    assert view.diagnosis is not None
    assert view.stage is DiagnosisStage.DONE
    assert view.diagnosis.missing == ("the capture failed (ConnectionError: no node answers)",)


def test_a_diagnosis_that_fails_is_explained_and_not_reported(field: SchedulerField) -> None:
    field.conclusions = [KeyError("slot")]
    field.update(open_episode())
    view = field.view()
    assert (view.stage, view.diagnosis, field.diagnoses) == (DiagnosisStage.FAILED, None, [])
    assert "internal error (KeyError: 'slot')" in view.trouble


def test_a_disk_that_cannot_be_written_is_reported_and_nothing_is_captured(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file")
    field = SchedulerField(tmp_path / "incidents")
    field.update(open_episode())
    assert "cannot be written" in field.view().trouble
    assert field.captured == []


def test_the_report_is_written_once_more_when_the_episode_closes(field: SchedulerField) -> None:
    field.update(open_episode())
    report = Path(field.view().report)
    assert "None" in report.read_text()
    field.update(replace(open_episode(), closed_wall_seconds=77.0), views=(replace(view_of(), findings=()),))
    assert "77.0" in report.read_text()
    assert field.reports == 2
    assert field.view().diagnosis == PROOF  # and stays the job's latest


def test_kernel_messages_of_minutes_before_are_evidence(field: SchedulerField) -> None:
    event = KernelEvent("oom", "Killed process 7 (python)", 2.0)
    view = view_of()
    nodes = (replace(view.sample.nodes[0], kernel_events=(event,)), *view.sample.nodes[1:])
    before = replace(view, sample=replace(view.sample, nodes=nodes), findings=())
    field.update(views=(before,))
    field.update(open_episode(), seconds=100.0)
    ((_, directory),) = field.captured
    (fault,) = json.loads((directory / "seen.json").read_text())["faults"]
    assert fault["kind"] == "oom"
    assert "Killed process 7 (python) (10" in fault["words"]
    memory = KernelEventHistory()
    memory.add(before.sample, 0.0)
    assert memory.events(JOB, KERNEL_EVENT_SECONDS) == ()


def test_a_kernel_message_of_unknown_age_stays_of_unknown_age() -> None:
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


def test_large_captures_are_pruned_by_size_and_the_newest_stays(tmp_path: Path) -> None:
    for second in range(4):
        capture = tmp_path / capture_directory_name("llama", "JobHung", 1.8e9 + second, 0)
        capture.mkdir()
        (capture / "rank-00000.recorder").write_bytes(b"x" * 100)
    prune_captures(tmp_path, kept_bytes=250)
    assert [path.name[13:15] for path in sorted(tmp_path.iterdir())] == ["02", "03"]


def test_a_capture_without_evidence_says_so(field: SchedulerField) -> None:
    field.conclusions = [DiagnosisError("/captures/x: nothing in it can be used")]
    field.failure = ConnectionError("no node answers")
    field.update(open_episode())
    assert field.view().trouble == (
        "the capture failed (ConnectionError: no node answers); /captures/x: nothing in it can be used"
    )


def test_a_directory_is_named_by_time_job_and_alert_whatever_the_job_is_called() -> None:
    assert capture_directory_name("a/b ../c", "JobHung", 1.8e9, 1) == "20270115T080000Z-a-b-..-c-JobHung-2.capture"
