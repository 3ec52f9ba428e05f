"""Real hung jobs over SSH: ranks that can answer do, the others are named with the reason, and no rank is disturbed.

The seconds of each kind are printed: `pytest -s`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.collectors.ssh.running_fleet import RunningFleet
from tests.watcher.diagnosis.hung_jobs import KINDS, HungJob, hung_job
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.diagnosis.capture.collector import CapturePlan, CaptureResult, NodeCapturePlan, capture_evidence
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence

pytest.importorskip("torch", reason="torch is not installed: pip install 'wattwatch[trainer]'")

TOLD_BY_LOGS = ("raised", "size_mismatch")  # what the ranks printed last is what tells


def files_of(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*") if not path.name.endswith(".tmp")}


def fates(job: HungJob) -> dict[int, str]:
    """Whether each process runs, is stopped or has ended: S and R are one."""
    return {rank: state if state in "TZ" else "runs" for rank, state in job.states().items()}


def why(result: CaptureResult, rank: int) -> str:
    return "; ".join(sentence for sentence in result.missing if f"rank {rank}:" in sentence)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hung_job_is_captured_and_not_disturbed(kind: str, watch: RunningFleet, tmp_path: Path) -> None:
    with hung_job(kind, tmp_path) as job:
        before, files = fates(job), files_of(job.run_directory)
        plan = CapturePlan("job", (NodeCapturePlan("node"),), str(job.run_directory))
        result = capture_evidence(plan, watch.fleet.channels, tmp_path / "capture", Clock())
        print(f"\n{kind}: {result.took_seconds:.2f} s", *result.missing, sep="\n  ")  # noqa: T201 - a measurement
        assert fates(job) == before
        assert files_of(job.run_directory) == files, "nothing was written on the node"
    assert not any("not finished" in sentence or "not everything" in sentence for sentence in result.missing)
    for rank in job.processes:
        if rank in job.answering:
            assert json.loads((result.directory / f"rank-{rank:05d}.recorder.json").read_text())["entries"]
        else:
            assert f"process {job.pids[rank]} " in why(result, rank)
        if rank in job.answering and rank not in job.kind.mute:
            assert "most recent call first" in (result.directory / f"rank-{rank:05d}.stacks.txt").read_text()
        elif rank in job.kind.mute:
            assert "holding the GIL" in why(result, rank)
    processes = json.loads((result.directory / "node-node.processes.json").read_text())
    assert {row["rank"]: row["pid"] for row in processes} == job.pids
    assert {row["rank"]: row["state"] for row in processes if row["state"] in "TZ"} == {
        rank: fate for rank, fate in before.items() if fate != "runs"
    }
    if job.kind.dies:  # what those that saw it wrote down on their way out
        dumps = {rank: result.files[f"rank-{rank:05d}.recorder.json"] for rank in (0, 1, 3)}
        assert {rank: Path(dump.source or "").name for rank, dump in dumps.items()} == {
            rank: f"recorder-{rank:05d}.json" for rank in dumps
        }
    elif kind == "raised":
        assert "ValueError: shard 7" in (result.directory / "rank-00002.log.txt").read_text()
    if kind in TOLD_BY_LOGS:
        found = diagnose(load_evidence(result.directory))
        assert tuple(culprit.rank for culprit in found.culprits) == job.kind.culprits
        assert (found.verdict, found.cause) == (job.kind.verdict, job.kind.cause)
    if job.kind.dies:
        return
    for rank in job.kind.culprits:
        stacks = result.directory / f"rank-{rank:05d}.stacks.txt"
        assert not stacks.exists() or job.kind.function in stacks.read_text()
