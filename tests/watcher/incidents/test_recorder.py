"""An incident leaves a recording of its job that gives the same verdict again; memory and disk stay bounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.plan import Phase, Setting
from tests.faults.probe_lines import ProbeLines
from tests.faults.simulated_job import SimulatedJob
from tests.faults.watched_job import job_spec
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName, Finding, JobSpec, Severity
from wattwatch.watcher.engine.snapshot import EpisodeView
from wattwatch.watcher.incidents import recorder
from wattwatch.watcher.incidents.recorder import IncidentRecorder, NodeLineBuffer, ProbeState
from wattwatch.watcher.recordings.format import open_recording
from wattwatch.watcher.recordings.replay import ReplayResult, replay

SETTING = Setting(seed=4, nodes=2, gpus=4, step_seconds=3.0, victim=5)
SPEC = job_spec(SETTING)
OTHER = JobSpec("other", ("elsewhere",))
HANG = Finding("pretrain", AlertName.JOB_HUNG, Severity.WARNING, "", "may hang", (), "", 0.0, confirmed=False)
LINKS: Mapping[str, NodeLink] = {node: NodeLink(node, HostStatus.OK, "") for node in SPEC.nodes}


class Play:
    """A job whose nodes send lines, and an incident that is true from some moment on."""

    def __init__(self, directory: Path) -> None:
        self.job = SimulatedJob(SETTING)
        self.probes = {node: ProbeLines(node) for node in SPEC.nodes}
        self.recorder = IncidentRecorder(directory, [SPEC, OTHER])
        self.recorder.start()

    def play(self, phase: Phase, finding: Finding | None = None) -> None:
        self.job.begin(phase)
        for _ in range(int(phase.seconds)):
            for sample in self.job.tell(phase, 1.0):
                self.recorder.add_line(sample.node, self.job.now, self.probes[sample.node].line(sample))
            findings = {"pretrain": (finding,) if finding else (), "other": ()}
            self.recorder.update(LINKS, findings, self.job.now + 0.1, self.job.wall)


def hang_of(result: ReplayResult) -> EpisodeView:
    (found,) = [episode for episode in result.episodes if episode.alert == "JobHung"]
    return found


def hung(directory: Path, before_seconds: float = 900.0) -> Path:
    play = Play(directory)
    play.play(Phase(before_seconds, "train"))
    play.play(Phase(3, "spin", ranks={"victim": "in_barrier"}))
    play.play(Phase(120, "spin", ranks={"victim": "in_barrier"}), HANG)
    play.recorder.stop()
    (path,) = directory.glob("*.gz")
    return path


def test_the_recording_of_a_hang_gives_the_same_verdict_again(tmp_path: Path) -> None:
    path = hung(tmp_path)
    assert path.name.endswith("-pretrain-JobHung.wattwatch.gz")
    recording = open_recording(path)
    assert recording.specs == (SPEC,)
    result = replay("incident", recording)
    found = hang_of(result)
    assert (found.severity, found.confirmed) == (Severity.CRITICAL, True)
    assert [(s.node, s.gpu, s.rank) for s in found.suspects] == [("node-2", 1, 5)]
    assert [episode.alert for episode in result.episodes] == ["JobHung"]


def test_the_path_is_logged_and_published_and_only_the_owner_may_read_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "20250101T000000Z-pretrain-2-JobHung.wattwatch.gz").write_bytes(b"of another job")
    assert IncidentRecorder(tmp_path, [SPEC]).newest == {}
    path = hung(tmp_path / "here", before_seconds=10)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [record.message for record in caplog.records if str(path) in record.message] == [
        f"recording the incident of job pretrain and the 300 s before it in {path}"
    ]
    assert IncidentRecorder(tmp_path / "here", [SPEC, OTHER]).newest == {"pretrain": str(path)}  # after a restart


def test_it_begins_minutes_before_the_alert_and_ends_a_minute_after_the_last_finding(tmp_path: Path) -> None:
    play = Play(tmp_path)
    play.play(Phase(900, "train"))
    play.play(Phase(50, "spin"), HANG)
    play.play(Phase(200, "train"))
    assert play.recorder.error is None
    play.recorder.stop()
    (path,) = tmp_path.glob("*.gz")
    events = [m.seconds for m in open_recording(path).events]
    began = play.job.now - 250
    assert began - recorder.BEFORE_SECONDS - recorder.CHUNK_SECONDS - 1 <= events[0] <= began - 250
    assert events[-1] == pytest.approx(began + 50 + recorder.AFTER_SECONDS, abs=3)


def test_what_was_sent_long_before_is_written_with_the_first_line(tmp_path: Path) -> None:
    """A rank that never changes its heartbeat is known in the recording, though the heartbeat was sent long before."""
    play = Play(tmp_path)
    play.play(Phase(10, "train"))
    play.play(Phase(900, "pause"))
    play.play(Phase(5, "pause"), HANG)
    play.recorder.stop()
    (path,) = tmp_path.glob("*.gz")
    samples = [m.sample for m in open_recording(path).events if m.sample is not None]
    late = [sample for sample in samples if sample.node == "node-2"][-1]
    assert {source.rank for source in late.progress} == {4, 5, 6, 7}
    assert all(source.step is not None and (source.age_seconds or 0) > 800 for source in late.progress)


def test_a_healthy_job_and_alerts_of_severity_info_are_not_recorded(tmp_path: Path) -> None:
    play = Play(tmp_path)
    play.play(Phase(100, "train"))
    play.play(Phase(100, "train"), replace(HANG, alert=AlertName.JOB_COMPLETED, severity=Severity.INFO))
    play.recorder.stop()
    assert list(tmp_path.iterdir()) == []


def test_the_oldest_recordings_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_RECORDINGS", 3)
    for day in range(5):
        (tmp_path / f"2026010{day}T000000Z-pretrain-JobHung.wattwatch.gz").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("mine")
    hung_play = Play(tmp_path)
    hung_play.play(Phase(5, "spin"), HANG)
    hung_play.recorder.stop()
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 4
    assert "notes.txt" in kept
    assert not any(name.startswith(("20260100", "20260101", "20260102")) for name in kept)


def test_a_recording_ends_at_its_maximum_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_RECORDING_BYTES", 50_000)
    play = Play(tmp_path)
    play.play(Phase(200, "spin"), HANG)
    play.recorder.stop()
    assert sum(path.stat().st_size for path in tmp_path.glob("*.gz")) < 3 * 50_000


def test_a_directory_that_cannot_be_created_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    play = Play(tmp_path / "file" / "incidents")
    play.play(Phase(5, "spin"), HANG)
    assert play.recorder.error == "the incident of job pretrain cannot be recorded: Not a directory"
    play.recorder.stop()


def test_the_buffer_holds_some_minutes_however_long_the_watcher_runs() -> None:
    buffer, probe, job = NodeLineBuffer(), ProbeLines("node-1"), SimulatedJob(SETTING)
    for _ in range(3000):
        sample = job.tell(Phase(1, "train"), 1.0)[0]
        buffer.add(job.now, probe.line(sample))
    assert len(buffer.chunks) <= (recorder.BEFORE_SECONDS / recorder.CHUNK_SECONDS) + 2
    assert len(buffer.lines) <= recorder.CHUNK_SECONDS + 1


def test_text_appended_to_a_log_follows_the_known_text() -> None:
    state = ProbeState()
    state.fold(b'{"v":1,"seq":1,"t":1.0,"w":1.0,"log":[[0,"/a.log",0,7,1.0,"step: 1"]]}')
    state.fold(b'{"v":1,"seq":2,"t":2.0,"w":2.0,"log":[[0,"/a.log",7,15,2.0,"\\nstep: 2"]]}')
    state.fold(b"not a line of our probe")
    state.fold(b'{"beat":[null]}')
    (line,) = state.lines()
    assert b'"step: 1\\nstep: 2"' in line
    assert ProbeReader("n", ProbeRequest()).read(line, 1.0) is not None
