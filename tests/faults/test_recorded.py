"""Recordings of a rig against what was injected into it: nothing is missed, late or untrue.

The parts in tests/data/recordings are cut from a 17-minute recording of simulated GPUs behind real SSH, made by this
project and published with it. The whole recording is too large for the repository.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.recorded import Comparison, compare, play, table
from wattwatch.watcher.recordings.format import open_recording

PARTS = Path(__file__).parents[1] / "data" / "recordings"
WHOLE = Path(__file__).parents[3] / "shared" / "corpus" / "reports2" / "rig"


def checked(path: Path, truth: Path, *jobs: str) -> Comparison:
    comparison = compare(path, json.loads(truth.read_text("utf-8")), jobs)
    assert comparison.problems == [], "\n".join(table(comparison))
    return comparison


@pytest.mark.parametrize(
    ("name", "job", "said"),
    [
        ("two_hangs", "job-1", {"4 all ranks": "ranks differs from the others", "5 rank-3": "rank 3 on node-1 GPU 3"}),
        (
            "lost_gpu_and_hidden_crash",
            "job-2",
            {"7c lost rank 3": "suspect rank 3 on node-3 GPU 3", "13 crash": "the memory of all 16 GPUs was released"},
        ),
        ("crash_behind_hung_queries", "job-4", {"13b crash": "exited between two samples"}),
        ("node_lost_for_a_while", "job-3", {"11d link of both nodes": "does not answer"}),
    ],
)
def test_a_part_of_the_recording_is_judged_right(name: str, job: str, said: dict[str, str]) -> None:
    comparison = checked(PARTS / f"{name}.wattwatch.gz", PARTS / "four_jobs.truth.json", job)
    for what, words in said.items():
        summaries = [each.summary for each in comparison.said if each.injected.what.startswith(what)]
        assert summaries, what
        assert all(words in summary for summary in summaries), summaries


def test_what_is_said_of_a_job_of_which_one_node_is_blind_names_the_part_that_is_seen() -> None:
    """Node-5 came back 20 s before node-6."""
    recording = open_recording(PARTS / "node_lost_for_a_while.wattwatch.gz")
    half = [view for now, view in play(recording) if 80 <= now <= 98]
    assert half
    for view in half:
        assert view.reason.startswith("Only 8 of 16 GPUs seen. ")
        assert [gpu.rank for gpu in view.sample.unseen] == list(range(8, 16))
        assert view.verdict.confidence <= 0.75


def test_the_whole_recording_is_judged_right() -> None:
    recording = WHOLE / "four_jobs.wattwatch.gz"
    if not recording.exists():
        pytest.skip("the recording is not in this checkout")
    comparison = checked(recording, WHOLE / "four_jobs.truth.json")
    assert len(comparison.said) >= 40
