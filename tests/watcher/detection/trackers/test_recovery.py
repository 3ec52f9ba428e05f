"""What is positively seen of a job, and what is not: observations -> witness."""

from __future__ import annotations

from collections.abc import Mapping

from wattwatch.collectors.samples import HostStatus, ProcessSample, ProgressSample
from wattwatch.watcher.detection.model import JobProgress, JobSample, NodeState
from wattwatch.watcher.detection.trackers.recovery import STABLE_OBSERVATIONS, RecoveryTracker


def sample(steps: Mapping[str, int] | None = None, **nodes: tuple[int, ...] | HostStatus) -> JobSample:
    """A job with these logs and their steps; each node with the pids of its ranks, or with what is wrong with it."""
    states = tuple(
        NodeState(name, given, "", 9.0, fresh=False)
        if isinstance(given, HostStatus)
        else NodeState(
            name,
            HostStatus.OK,
            "",
            0.5,
            fresh=True,
            processes=tuple(ProcessSample(pid, "python3", "R", 10.0, gpu_indexes=(0,)) for pid in given),
        )
        for name, given in nodes.items()
    )
    sources = tuple(ProgressSample(path, "torchtitan", step) for path, step in (steps or {}).items())
    return JobSample("llama", (), states, JobProgress(step=max((steps or {"": 0}).values()), sources=sources))


def advancing(*looks: JobSample) -> bool:
    witnessing = RecoveryTracker()
    return [witnessing.update(look) for look in looks][-1].advancing


def test_a_step_that_advances_is_seen_and_remembered() -> None:
    assert not advancing(sample({"a.log": 100}))
    assert not advancing(sample({"a.log": 100}), sample({"a.log": 100}))
    assert advancing(sample({"a.log": 100}), sample({"a.log": 101}), sample({"a.log": 101}))


def test_a_log_that_becomes_readable_further_ahead_is_no_step() -> None:
    assert not advancing(sample({"a.log": 90}), sample({"a.log": 90, "b.log": 100}), sample({"b.log": 100}))


def test_a_log_that_was_unreadable_and_is_further_now_is_one() -> None:
    assert advancing(sample({"a.log": 90}), sample(), sample({"a.log": 91}))


def test_a_run_that_counts_from_a_lower_step_advances_from_there() -> None:
    assert not advancing(sample({"a.log": 100}), sample({"a.log": 40}))
    assert advancing(sample({"a.log": 100}), sample({"a.log": 40}), sample({"a.log": 41}))


def test_new_processes_that_stay_are_the_job_started_again() -> None:
    dead, again = sample(one=()), sample(one=(4000,))
    assert not advancing(dead, *[again] * (STABLE_OBSERVATIONS - 1))
    assert advancing(dead, *[again] * STABLE_OBSERVATIONS)


def test_a_test_on_a_gpu_that_comes_and_goes_is_not() -> None:
    look = [sample(one=()), sample(one=(4000,))]
    assert not advancing(*look * STABLE_OBSERVATIONS)


def test_the_processes_of_a_node_that_becomes_readable_are_not_new() -> None:
    away, there = sample(one=HostStatus.UNREACHABLE), sample(one=(4000,))
    assert not advancing(away, *[there] * 2 * STABLE_OBSERVATIONS)


def test_only_nodes_whose_gpus_are_seen_count() -> None:
    seen = RecoveryTracker().update(sample(one=(4000,), two=HostStatus.UNREACHABLE, three=HostStatus.DRIVER_DOWN))
    assert seen.nodes_ok == {"one"}
