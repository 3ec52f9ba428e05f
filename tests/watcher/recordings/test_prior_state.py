"""What was learned before a recording's first line stands at its head, and replay judges with it."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.faults.plan import Phase, Setting
from tests.faults.probe_lines import ProbeLines
from tests.faults.simulated_job import SimulatedJob
from tests.faults.watched_job import job_spec
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.cli.replay import verdicts_without_names
from wattwatch.watcher.detection.baselines.baseline import Baseline, BaselineKind
from wattwatch.watcher.detection.baselines.baseline import LearningPhase as LearnedPhase
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import AlertName, Finding, JobSpec, Severity, UtilizationPattern
from wattwatch.watcher.detection.prior_state import (
    MAX_VALUES_PER_RECORD,
    PriorState,
    prior_state_from_records,
    prior_state_to_records,
    restrict_to_jobs,
)
from wattwatch.watcher.detection.trackers.observation import (
    CheckpointSaveHistory,
    HangHistory,
    JobHistory,
    StepRateHistory,
)
from wattwatch.watcher.incidents.recorder import IncidentRecorder
from wattwatch.watcher.recordings.anonymize import write_anonymized
from wattwatch.watcher.recordings.format import RecordingWriter, open_recording
from wattwatch.watcher.recordings.replay import replay

SETTING = Setting(seed=4, nodes=2, gpus=4, step_seconds=3.0, victim=5)
SPEC = job_spec(SETTING)
HABITS = JobHistory(
    StepRateHistory((3.0, 3.1), 3.0, 3.1, 40),
    CheckpointSaveHistory(150.0, 4),
    HangHistory(60.0, {UtilizationPattern.ALL_BUSY: 9.0}, 3),
    (3.0, 3.2),
)
HANG = Finding("pretrain", AlertName.JOB_HUNG, Severity.WARNING, "", "may hang", (), "", 0.0, confirmed=False)


def floor(
    node: str, board: str, watts: float = 188.0, kind: BaselineKind = BaselineKind.CONTEXT, job: str = "pretrain"
) -> Baseline:
    return Baseline(node, board, kind, job, watts, 60, LearnedPhase.START_UP, 1.7e9, "NVIDIA B300 SXM6 AC", 1100.0, 5e6)


def through_json(known: PriorState) -> PriorState | None:
    return prior_state_from_records(orjson.loads(orjson.dumps(record)) for record in prior_state_to_records(known))


@pytest.mark.parametrize("count", [0, 1, MAX_VALUES_PER_RECORD, MAX_VALUES_PER_RECORD + 1])
def test_prior_state_is_read_back_unchanged(count: int) -> None:
    known = PriorState(tuple(floor("node-1", str(i)) for i in range(count)), {"pretrain": HABITS})
    assert through_json(known) == known


def test_a_new_detector_continues_with_what_another_has_learned() -> None:
    detector = JobDetector(SPEC)
    detector.restore_history(HABITS)
    assert detector.history() == HABITS


def test_only_the_prior_state_of_the_job_and_its_nodes_is_written() -> None:
    mine, plateau = floor("node-1", "a"), floor("node-1", "a", 985.0, BaselineKind.PLATEAU)
    others = (floor("elsewhere", "a"), floor("node-1", "a", 700.0, BaselineKind.PLATEAU, "other"))
    known = PriorState((mine, plateau, *others), {"pretrain": HABITS, "other": JobHistory()})
    assert restrict_to_jobs(known, [SPEC]) == PriorState((mine, plateau), {"pretrain": HABITS})


def spoiled(change: Callable[[dict[str, Any]], object]) -> PriorState | None:
    (record,) = (
        orjson.loads(orjson.dumps(r)) for r in prior_state_to_records(PriorState((floor("n", "a"),), {"j": HABITS}))
    )
    change(record["known"])
    return prior_state_from_records([record])


@pytest.mark.parametrize(
    "change",
    [
        lambda known: known.update(version=2),
        lambda known: known.pop("version"),
        lambda known: known["boards"][0].pop("watts"),
        lambda known: known.update(habits=3),
        lambda known: known["habits"]["j"].update(pace={"intervals": "x"}),
    ],
)
def test_an_unreadable_prior_state_is_ignored(change: Callable[[dict[str, Any]], object]) -> None:
    assert spoiled(change) is None


def test_an_implausible_value_is_left_out() -> None:
    known = spoiled(lambda known: known["boards"][0].update(watts=-3.0))
    assert known == PriorState((), {"j": HABITS})
    assert through_json(PriorState((floor("n", "a", math.inf),), {})) != PriorState((floor("n", "a", math.inf),), {})


def recorded(path: Path, known: PriorState | None, spec: JobSpec = SPEC, seconds: int = 200) -> Path:
    """Nobody saw the job work before: it saves for longer than a limit that nobody has learned."""
    recorder = RecordingWriter(path, [spec])
    if known is not None:
        recorder.write_prior_state(known)
    job = SimulatedJob(SETTING)
    probes = {node: ProbeLines(node) for node in spec.nodes}
    for phase in (Phase(60, "train"), Phase(seconds, "spin", ranks={"victim": "in_barrier"})):
        job.begin(phase)
        for _ in range(int(phase.seconds)):
            for sample in job.tell(phase, 1.0):
                recorder.write_line(sample.node, job.now, probes[sample.node].line(sample))
            recorder.write_links({node: NodeLink(node, HostStatus.OK, "") for node in spec.nodes}, job.now + 0.1)
    recorder.close()
    return path


def hang_confirmed_seconds(path: Path) -> float:
    return next(c.at_seconds for c in replay("", open_recording(path)).changes if c.state.value == "hung")


def test_replay_uses_the_step_rate_that_was_known_before(tmp_path: Path) -> None:
    slow = JobHistory(StepRateHistory((20.0,) * 10, 20.0, 20.0, 100))
    without = hang_confirmed_seconds(recorded(tmp_path / "without.gz", None))
    known = hang_confirmed_seconds(recorded(tmp_path / "known.gz", PriorState((), {"pretrain": slow})))
    assert known - without == pytest.approx(120.0 - 30.0, abs=5.0)


def test_the_anonymous_copy_keeps_the_prior_state_under_pseudonyms(tmp_path: Path) -> None:
    boards = (floor("node-2", "GPU-1920aaaa-0000-0000-0000-000000000001", job="falcon"),)
    spec = replace(SPEC, name="falcon")
    known = PriorState(boards, {"falcon": JobHistory(StepRateHistory((20.0,) * 10, 20.0, 20.0, 100))})
    original = recorded(tmp_path / "a.gz", known, spec)
    write_anonymized(original, tmp_path / "b.gz")
    text = gzip.decompress((tmp_path / "b.gz").read_bytes()).decode().lower()
    assert "falcon" not in text
    assert "gpu-1920" not in text
    copy = open_recording(tmp_path / "b.gz")
    assert copy.prior_state is not None
    (value,), (job,) = copy.prior_state.boards, copy.prior_state.habits
    assert (value.node, value.job, job) == ("node-2", "job-1", "job-1")
    assert copy.prior_state.habits[job] == known.habits["falcon"]
    before, after = (replay("", open_recording(tmp_path / name)) for name in ("a.gz", "b.gz"))
    assert verdicts_without_names(before) == verdicts_without_names(after)


def test_an_old_recording_without_prior_state_replays(tmp_path: Path) -> None:
    recording = open_recording(recorded(tmp_path / "old.gz", None))
    assert recording.prior_state is None
    assert next(recording.events).sample is not None


def test_the_recording_of_an_incident_has_the_prior_state(tmp_path: Path) -> None:
    incidents = IncidentRecorder(tmp_path, [SPEC])
    incidents.start()
    job, probes = SimulatedJob(SETTING), {node: ProbeLines(node) for node in SPEC.nodes}
    links = {node: NodeLink(node, HostStatus.OK, "") for node in SPEC.nodes}
    phase = Phase(600, "train")
    job.begin(phase)
    began = job.now
    for second in range(600):
        for sample in job.tell(phase, 1.0):
            incidents.add_line(sample.node, job.now, probes[sample.node].line(sample))
        known = PriorState((floor("node-1", "a", 100.0 + second),), {"pretrain": HABITS, "other": HABITS})
        told = {"pretrain": (HANG,) if second > 550 else ()}
        incidents.update(links, told, job.now, job.wall, lambda known=known: known)  # type: ignore[misc]
    incidents.stop()
    (path,) = tmp_path.glob("*.gz")
    recording = open_recording(path)
    assert recording.prior_state is not None
    assert dict(recording.prior_state.habits) == {"pretrain": HABITS}
    (value,) = recording.prior_state.boards
    first = next(recording.events).seconds - began
    assert value.watts - 100.0 == pytest.approx(first, abs=61.0)
