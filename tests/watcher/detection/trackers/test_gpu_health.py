"""Broken GPUs: one finding a GPU, whoever witnesses it, and once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.watcher.detection.simulated_seconds import COMPUTE, KILLED, LOST, SPIN, Activity, Job, xid
from wattwatch.collectors.samples import HostStatus, MissingGpu, NodeSample, ReadingStatus
from wattwatch.watcher.detection.model import AlertName, JobState, Severity

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


def unopened(index: int) -> Callable[[NodeSample], NodeSample]:
    """NVML counts the GPU and cannot open it: it has neither PCI id nor UUID from then on."""

    def change(line: NodeSample) -> NodeSample:
        lost = MissingGpu(index, None, ReadingStatus.LOST, f"NVML cannot open GPU {index}: the GPU fell off the bus")
        others = tuple(gpu for gpu in line.gpus or () if gpu.index != index)
        return replace(line, gpus=others, missing_gpus=(lost,)) if line.node == "node-2" else line

    return change


def with_counters(index: int, **counters: float) -> Callable[[NodeSample], NodeSample]:
    def change(line: NodeSample) -> NodeSample:
        gpus = tuple(replace(gpu, **counters) if gpu.index == index else gpu for gpu in line.gpus or ())  # type: ignore[arg-type]  # fields by name
        return replace(line, gpus=gpus)

    return change


def test_an_uncorrected_memory_error_while_the_job_runs_is_a_fault_of_that_gpu_with_its_age() -> None:
    job = training()
    job.change_line = with_counters(5, uncorrected_ecc_errors=2.0)
    job.play(20, COMPUTE)
    assert job.findings == (), "those were counted before the job was followed"
    job.change_line = with_counters(5, uncorrected_ecc_errors=3.0, lifetime_uncorrected_ecc_errors=12.0)
    job.play(30, COMPUTE)
    fault = job.finding(FAULT)
    assert (fault.severity, [(s.node, s.gpu, s.rank) for s in fault.suspects]) == (
        Severity.WARNING,
        [("node-1", 5, 5)],
    )
    assert fault.summary.endswith("GPU 5 has uncorrected memory errors.")
    assert fault.evidence == (
        "GPU 5: 1 new uncorrected memory (ECC) error, the last one seen 29 s ago; 3 since the driver was loaded, "
        "12 errors in its lifetime",
    )
    assert (fault.gpus_idle, job.state) == (0, JobState.COMPUTING)
    job.play(900, COMPUTE)
    assert job.findings == ()


def test_a_hang_names_a_gpu_only_for_memory_errors_that_were_counted_in_it() -> None:
    for before, during, named in ((2.0, 2.0, []), (3.0, 3.0, []), (2.0, 3.0, [5])):
        job = training(nodes=1, progress="log")
        job.change_line = with_counters(5, uncorrected_ecc_errors=2.0)
        job.play(10, COMPUTE)
        job.change_line = with_counters(5, uncorrected_ecc_errors=before)
        job.play(60, COMPUTE)
        job.change_line = with_counters(5, uncorrected_ecc_errors=during)
        job.play(90, SPIN)
        hang = job.finding(AlertName.JOB_HUNG)
        assert [suspect.gpu for suspect in hang.suspects] == named
        assert any("1 new uncorrected memory (ECC) error" in fact for fact in hang.evidence) == bool(named)


def test_damaged_memory_that_waits_for_a_reset_is_said_for_as_long_as_the_driver_says_so() -> None:
    job = training()
    job.change_line = with_counters(2, memory_repair_pending=1.0)
    job.play(1000, COMPUTE)
    assert job.finding(FAULT).summary.endswith("GPU 2 has damaged memory and needs a reset.")
    job.change_line = with_counters(2, memory_repair_pending=0.0, memory_repair_failed=1.0)
    job.play(5, COMPUTE)
    assert "no spare row is left" in job.finding(FAULT).evidence[0]
    job.change_line = with_counters(2, memory_repair_pending=0.0)
    job.play(5, COMPUTE)
    assert job.findings == ()


def test_a_counter_that_starts_again_with_the_driver_is_no_error() -> None:
    job = training()
    for total in (4.0, 0.0, 0.0, 2.0):
        job.change_line = with_counters(1, uncorrected_ecc_errors=total)
        job.play(3, COMPUTE)
    assert job.finding(FAULT).evidence[0].startswith("GPU 1: 2 new uncorrected memory (ECC) errors")


def test_a_lost_gpu_keeps_its_rank_from_the_first_sample_to_the_hang_that_follows() -> None:
    job = training(nodes=2, gpus=4, progress="log")
    job.play(1, SPIN, {6: LOST})
    job.change_line = unopened(2)
    job.play(60, SPIN)
    faults = [f for second in job.observed for f in second.findings if f.alert is FAULT]
    assert {f.summary for f in faults} == {"rank 6 on node-2 GPU 2 has failed."}
    assert len({f.key for f in faults}) == 1
    assert [str(s) for s in job.observed[-1].verdict.suspects] == ["rank 6 on node-2 GPU 2"]
    hang = job.finding(AlertName.JOB_HUNG)
    assert hang.summary.endswith("suspect rank 6 on node-2 GPU 2.")
    assert any("rank 6 on node-2 GPU 2 has been lost for" in line for line in hang.evidence)


def test_a_gpu_that_was_lost_while_steps_went_on_is_no_suspect_of_a_later_hang() -> None:
    job = training(nodes=2, gpus=4, progress="log")
    job.change_line = unopened(2)
    job.play(60, COMPUTE)
    job.play(60, SPIN)
    assert job.finding(AlertName.JOB_HUNG).suspects == ()


def test_a_gpu_that_is_lost_from_the_start_is_one_fault_by_index_and_by_pci_id() -> None:
    for xid_first in (True, False):
        job = Job(nodes=2, gpus=4, progress="log")
        job.change_line = unopened(2)
        job.kernel["node-2"] = [xid(79, 2)] if xid_first else []
        job.play(3, COMPUTE)
        job.kernel["node-2"] = [] if xid_first else [xid(79, 2)]
        job.play(3, COMPUTE)
        assert len({f.key for second in job.observed for f in second.findings if f.alert is FAULT}) == 1, xid_first
        fault = job.finding(FAULT)
        assert [str(s) for s in fault.suspects] == ["rank 6 on node-2 GPU 2"]
        assert any("Xid 79" in line for line in fault.evidence)
        assert any("NVML cannot open GPU 2" in line for line in fault.evidence)


def test_every_xid_of_a_gpu_is_kept_and_the_fatal_one_decides() -> None:
    job = training()
    job.kernel["node-1"] = [xid(94, 2), xid(48, 2), xid(63, 2)]
    job.play(3, COMPUTE)
    fault = job.finding(FAULT)
    assert fault.evidence[0].startswith("Xid 48")
    assert [line.split()[1] for line in fault.evidence if line.startswith("Xid")] == ["48", "94", "63"]


def test_a_gpu_that_answers_is_not_said_to_have_failed_on_the_word_of_the_kernel_log_alone() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 2)]
    job.play(3, COMPUTE)
    fault = job.finding(FAULT)
    assert fault.summary == ("rank 2 on node-1 GPU 2 answers, but the kernel log reports that it has failed (Xid 79).")
    assert fault.evidence[-1] == "the GPU answers: 985 W, utilization 99 %"
    assert fault.gpus_idle == 0, "it works"
    job.kernel["node-1"] = [xid(94, 3)]
    job.play(3, COMPUTE)
    assert "rank 3 on node-1 GPU 3 needs a reset soon (Xid 94)." in [f.summary for f in job.findings]


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


def test_an_xid_has_its_age_for_as_long_as_it_counts() -> None:
    job = training()
    job.kernel["node-1"] = [xid(79, 3, age_seconds=5.0)]
    job.play(1, COMPUTE)
    job.play(90, COMPUTE)
    found = job.finding(AlertName.GPU_FAULT)
    assert found.evidence[0].startswith("Xid 79 (")
    assert "), logged 1 min 35 s ago: NVRM: Xid" in found.evidence[0]
    assert found.causes == ("Xid 79",)


def test_a_fault_of_a_node_that_cannot_be_read_any_more_says_when_it_was_last_seen() -> None:
    job = training()
    job.play(5, COMPUTE, {3: LOST})
    job.status["node-1"] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered")
    job.play(60, COMPUTE)
    found = job.finding(AlertName.GPU_FAULT)
    assert found.evidence[-1] == "the GPUs of its node cannot be read now; this was last seen 1 min ago"
    assert sum("last seen" in fact for fact in found.evidence) == 1
