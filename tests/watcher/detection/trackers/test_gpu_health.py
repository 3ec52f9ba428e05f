"""Broken GPUs: one finding a GPU, whoever witnesses it, and once."""

from __future__ import annotations

from dataclasses import replace

from tests.watcher.detection.simulated_seconds import COMPUTE, KILLED, LOST, SPIN, Activity, Job, xid
from wattwatch.collectors.samples import HostStatus, ReadingStatus
from wattwatch.watcher.detection.model import AlertName

FAULT = AlertName.GPU_FAULT
UNREADABLE = Activity(
    None,
    None,
    steps=True,
    reasons={"power_watts": ReadingStatus.UNREADABLE, "utilization_percent": ReadingStatus.UNREADABLE},
)


def training(**settings: object) -> Job:
    job = Job(**settings)  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    return job


def test_a_lost_gpu_with_three_sources_is_one_finding() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 5)]
    job.play(5, SPIN, {5: LOST})
    fault = job.finding(FAULT)
    assert [(s.node, s.gpu, s.rank) for s in fault.suspects] == [("node-1", 5, 5)]
    assert len({f.key for told in job.observed for f in told.findings if f.alert is FAULT}) == 1
    assert any("Xid 79" in line for line in fault.evidence)
    assert any("lost" in line for line in fault.evidence)


def test_a_gpu_that_vanishes_from_the_list_is_the_same_finding() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 7)]
    job.play(3, SPIN, {7: LOST})
    job.gpus = 7
    job.play(10, SPIN)
    assert len({f.key for told in job.observed for f in told.findings if f.alert is FAULT}) == 1
    assert [s.gpu for s in job.finding(FAULT).suspects] == [7]


def test_lines_that_are_sent_again_after_a_reconnect_are_no_news() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 5, age_seconds=5000)]
    job.play(5, COMPUTE)
    assert job.alerts == set()


def test_the_same_line_twice_is_one_finding_and_ends_with_its_time() -> None:
    job = training()
    job.kernel["node-1"] = [xid(48, 2)]
    job.play(100, COMPUTE)
    job.kernel["node-1"] = [xid(48, 2, age_seconds=101)]
    job.play(810, COMPUTE)
    assert job.findings == ()


def test_an_xid_of_the_program_is_no_fault_of_the_gpu() -> None:
    job = training()
    job.kernel["node-1"] = [xid(31, 2), xid(43, 3), xid(13, 1)]
    job.play(20, COMPUTE)
    assert job.alerts == set()


def test_one_failed_reading_is_none_two_are_a_fault() -> None:
    job = training()
    job.play(1, COMPUTE, {2: UNREADABLE})
    assert job.findings == ()
    job.play(1, COMPUTE)
    assert job.findings == ()
    job.play(2, COMPUTE, {2: UNREADABLE})
    assert [s.gpu for s in job.finding(FAULT).suspects] == [2]


def test_one_failed_reading_that_is_repeated_is_still_one() -> None:
    job = training()
    job.play(1, COMPUTE, {2: UNREADABLE})
    job.play(4, COMPUTE, {2: UNREADABLE}, repeat_gpus=True)
    assert job.findings == ()


def test_a_gpu_that_wants_a_reset_is_named_at_once() -> None:
    job = training()
    reset = replace(UNREADABLE, reasons={"power_watts": ReadingStatus.RESET_REQUIRED})
    job.play(1, COMPUTE, {6: reset})
    assert [s.gpu for s in job.finding(FAULT).suspects] == [6]


def test_a_fault_and_stalled_steps_are_both_reported_so_that_the_cause_can_explain_both() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 5)]
    job.play(120, SPIN, {5: LOST})
    assert {f.alert.value for f in job.findings} == {"GpuFault", "JobHung"}


def test_a_fault_and_a_killed_rank_are_both_reported() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 5)]
    job.play(5, SPIN, {5: replace(LOST, process=False), 6: KILLED})
    assert {f.alert.value for f in job.findings} == {"GpuFault", "JobCrashed"}


def test_a_slow_query_on_another_node_hides_no_broken_gpu() -> None:
    job = training(nodes=2, gpus=4)
    for _ in range(3):
        job.play(1, COMPUTE, {2: UNREADABLE}, slow=["node-2"])
    assert [s.gpu for s in job.finding(FAULT).suspects] == [2]


def test_a_lost_gpu_stays_broken_while_its_node_is_silent_or_its_driver_hangs() -> None:
    job = Job(nodes=2)
    job.play(60, COMPUTE)
    job.play(30, SPIN, {3: LOST})
    start = job.now
    job.play(6, SPIN, {3: LOST}, silent=["node-1"])
    job.play(10, SPIN, {3: LOST})
    job.status["node-1"] = (HostStatus.SAMPLER_TIMEOUT, "nvml has not answered for 6 s")
    job.play(30, SPIN)
    told = job.seconds_of(AlertName.GPU_FAULT)
    assert [second for second in told if second > start] == [start + i for i in range(1, 47)]
    job.status.clear()
    job.play(3, COMPUTE)
    assert AlertName.GPU_FAULT not in {finding.alert for finding in job.findings}


def test_the_same_kernel_message_is_news_when_it_was_written_later() -> None:
    job = Job()
    job.play(10, COMPUTE)
    job.kernel["node-1"] = [xid(79, 3)]
    job.play(930, COMPUTE)
    assert job.findings == ()
    job.kernel["node-1"] = [xid(79, 3, age_seconds=932.0)]  # sent again
    job.play(10, COMPUTE)
    assert job.findings == ()
    job.kernel["node-1"] = [xid(79, 3)]
    job.play(1, COMPUTE)
    assert job.finding(AlertName.GPU_FAULT)
