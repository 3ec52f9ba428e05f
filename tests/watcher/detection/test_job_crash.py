"""Processes that are gone: whose, why, and when that is no crash."""

from __future__ import annotations

from dataclasses import replace

from tests.watcher.detection.simulated_seconds import COMPUTE, KILLED, LOAD, SPIN, Job
from wattwatch.collectors.samples import HostStatus, KernelEvent, NodeSample
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import AlertName, JobState

CRASHED = AlertName.JOB_CRASHED


def warmed_up(**settings: object) -> Job:
    job = Job(**{"nodes": 2, "gpus": 4, **settings})  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    assert not job.alerts
    return job


def test_a_process_missing_on_two_samples_is_a_crash_that_names_the_rank_and_the_oom_killer() -> None:
    job = warmed_up()
    oom = KernelEvent("oom", "Out of memory: Killed process 4005 (python3)", 1.0, pid=4005, process="python3")
    job.kernel["node-2"] = [oom]
    job.play(1, SPIN, {5: KILLED})
    assert job.findings == ()
    job.play(1, SPIN, {5: KILLED})
    crash = job.finding(CRASHED)
    assert job.state is JobState.CRASHED
    assert [str(s) for s in crash.suspects] == ["rank 5 on node-2 GPU 1"]
    assert any("out of memory" in line for line in crash.evidence)
    assert crash.gpus_idle == 8
    job.play(60, SPIN, {5: KILLED})
    assert job.alerts == {"JobCrashed"}


def test_a_crash_without_a_kernel_message_says_so() -> None:
    job = warmed_up()
    job.play(3, SPIN, {5: KILLED})
    assert any("the kernel log has no entry about its exit" in line for line in job.finding(CRASHED).evidence)


def test_all_processes_gone_in_the_middle_of_the_run_is_a_crash() -> None:
    job = warmed_up()
    job.play(5, KILLED)
    assert any("none is left" in line for line in job.finding(CRASHED).evidence)


def test_of_ranks_that_exit_between_two_samples_none_is_named_as_the_first() -> None:
    job = warmed_up(nodes=1, gpus=2)
    job.play(5, KILLED)
    crash = job.finding(CRASHED)
    assert crash.summary == "pretrain crashed: ranks 0, 1 exited between two samples; it is unknown which exited first."
    assert crash.suspects == ()


def test_who_is_gone_a_sample_before_the_others_is_named_also_of_two() -> None:
    job = warmed_up(nodes=1, gpus=2)
    job.play(1, SPIN, {1: KILLED})
    job.play(10, KILLED)
    crash = job.finding(CRASHED)
    assert [s.rank for s in crash.suspects] == [1]
    assert crash.summary == "pretrain crashed: rank 1 on node-1 GPU 1."


def test_evaluating_a_sample_twice_does_not_make_its_node_the_later_one() -> None:
    job = warmed_up(nodes=2, gpus=1)
    job.play(1, KILLED, silent=["node-2"])  # its line of that second comes late
    job.play(5, KILLED)
    crash = job.finding(CRASHED)
    assert crash.suspects == ()
    assert "ranks 0, 1 exited between two samples" in crash.summary


def test_all_ranks_of_one_node_point_to_the_node() -> None:
    job = warmed_up()
    job.play(5, SPIN, dict.fromkeys(range(4, 8), KILLED))
    job.play(60, KILLED)
    crash = job.finding(CRASHED)
    assert [str(s) for s in crash.suspects] == ["node-2"]
    assert "ranks 4, 5, 6, 7 on node-2 exited between two samples" in crash.summary


def test_processes_without_ranks_that_end_together_are_named_by_their_gpus() -> None:
    job = warmed_up(nodes=1, gpus=2, progress="log")
    job.play(5, KILLED)
    assert "node-1 GPU 0, node-1 GPU 1 exited between two samples" in job.finding(CRASHED).summary


def test_the_kernel_names_one_of_those_that_ended_together() -> None:
    job = warmed_up(nodes=1, gpus=2)
    job.kernel["node-1"] = [KernelEvent("oom", "Killed process 4001 (python3)", 1.0, pid=4001, process="python3")]
    job.play(5, KILLED)
    assert [s.rank for s in job.finding(CRASHED).suspects] == [1]


def test_a_silent_node_is_never_a_crash() -> None:
    job = warmed_up()
    job.links["node-2"] = NodeLink("node-2", HostStatus.UNREACHABLE, "no line for 5 s", 5.0)
    job.play(60, SPIN, silent=["node-2"])
    assert "JobCrashed" not in job.alerts


def test_gpus_that_cannot_be_asked_hide_no_process_of_a_foreign_job() -> None:
    job = warmed_up(progress="log")
    job.status["node-2"] = (HostStatus.DRIVER_DOWN, "NVML: driver/library version mismatch")
    job.play(30, COMPUTE, dict.fromkeys(range(4, 8), KILLED))
    assert "JobCrashed" not in job.alerts


def without_processes(line: NodeSample) -> NodeSample:
    """The driver lists none of them, as an account without rights, or in another pid namespace, sees it."""
    return replace(line, processes=())


def test_an_empty_list_beside_memory_in_use_is_unknown_and_the_released_memory_tells_the_crash() -> None:
    """Sixteen ranks ended, and an empty process list, which had been there all along, was taken for "nobody"."""
    job = Job(nodes=2, gpus=8, progress="log")
    job.change_line = without_processes
    job.play(40, COMPUTE)
    assert all(node.processes is None for node in job.sample.nodes)  # type: ignore[union-attr]  # it was played
    job.play(30, KILLED)
    crash = job.finding(CRASHED)
    assert job.state is JobState.CRASHED
    assert crash.confirmed
    assert crash.summary == ("pretrain crashed: the memory of all 16 GPUs was released, so its processes have exited.")
    assert crash.evidence[:2] == (
        "memory in use on 16 GPUs: 128 MB in total, before that up to 1.3 TB",
        "the processes of node-1, node-2 cannot be listed",
    )
    assert not any("no process of the job is running" in second.verdict.why for second in job.observed)


def test_one_node_that_hides_its_processes_leaves_it_unknown_whether_any_is_left() -> None:
    job = Job(nodes=2, gpus=4, progress="log")
    job.change_line = lambda line: without_processes(line) if line.node == "node-1" else line
    job.play(40, COMPUTE)
    job.play(5, KILLED)
    crash = job.finding(CRASHED)
    assert crash.evidence[0] == "4 processes of the job exited; the processes of node-1 cannot be listed"
    assert not any("no process of the job is running" in second.verdict.why for second in job.observed)


def test_an_empty_list_is_believed_where_the_list_has_shown_the_jobs_processes() -> None:
    job = warmed_up(progress="log")
    job.play(5, KILLED)
    assert all(node.processes == () for node in job.sample.nodes)  # type: ignore[union-attr]  # it was played
    assert any("8 processes of the job exited, and none is left" in line for line in job.finding(CRASHED).evidence)


def test_processes_that_proc_has_no_more_have_exited_though_the_gpus_cannot_be_read() -> None:
    """A crash while nvidia-smi hung on both nodes went unsaid, though the pids had vanished from /proc."""
    job = warmed_up(progress="log")
    for node in job.nodes:
        job.status[node] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered for 11 s")
    gone = frozenset((4000 + rank, 500.0) for rank in range(8))
    job.change_line = lambda line: replace(line, processes=None, exited_processes=gone)
    job.play(1, SPIN)
    assert "JobCrashed" not in job.alerts
    job.play(1, SPIN)
    crash = job.finding(CRASHED)
    assert crash.evidence[0] == "8 processes of the job exited, and none of the known processes is left"
    assert job.sample is not None
    assert not any(node.processes == () for node in job.sample.nodes)


def test_a_process_that_no_gpu_lists_any_more_but_that_lives_has_not_exited() -> None:
    job = warmed_up(progress="log")

    def unlisted(line: NodeSample) -> NodeSample:
        kept = tuple(process for process in line.processes or () if process.pid != 4001)
        return replace(line, processes=kept, unlisted_processes=frozenset({(4001, 500.0)}))

    job.change_line = unlisted
    job.play(60, COMPUTE)
    assert job.alerts == set()


def test_what_is_known_of_the_other_processes_is_said_and_no_more() -> None:
    job = warmed_up()
    job.play(3, SPIN, {5: KILLED})
    assert job.finding(CRASHED).evidence[0] == "1 process of the job exited; 7 still exist"
    job = warmed_up(progress="log")
    job.play(1, SPIN, dict.fromkeys(range(4), KILLED))
    job.play(1, KILLED)
    assert job.finding(CRASHED).evidence[0] == (
        "4 processes of the job exited, and 4 more are missing from the newest sample"
    )


def test_a_kernel_log_that_cannot_be_read_has_no_entry_because_nobody_can_look() -> None:
    job = warmed_up()
    error = "the kernel log cannot be read: Operation not permitted"
    job.change_line = lambda line: replace(line, kernel_log_error=error)
    job.play(3, SPIN, {5: KILLED})
    told = "\n".join(job.finding(CRASHED).evidence)
    assert "the kernel log of node-2 cannot be read" in told
    assert "has no entry" not in told


def test_a_job_started_again_between_two_samples_is_no_crash() -> None:
    for progress in ("heartbeat", "log"):
        job = warmed_up(progress=progress)
        job.first_pid, job.started, job.step, job.restart = 9000, 900.0, 900, 1
        job.play(30, LOAD)
        assert job.alerts == set(), progress


def test_one_rank_started_again_is_no_crash() -> None:
    job = warmed_up()
    job.play(1, SPIN, {5: KILLED})
    job.first_pid, job.started = 9000, 900.0
    job.play(30, COMPUTE)
    assert job.alerts == set()


def test_a_restart_after_the_crash_closes_it() -> None:
    job = warmed_up()
    job.play(30, SPIN, {5: KILLED})
    job.first_pid, job.started, job.step, job.restart = 9000, 900.0, 900, 1
    job.play(60, COMPUTE)
    assert job.findings == ()
    assert job.state is JobState.COMPUTING


def test_a_restarted_job_can_crash_again() -> None:
    job = warmed_up()
    job.play(30, SPIN, {5: KILLED})
    job.first_pid, job.started, job.step, job.restart = 9000, 900.0, 900, 1
    job.play(60, COMPUTE)
    job.play(3, SPIN, {1: KILLED})
    assert [s.rank for s in job.finding(CRASHED).suspects] == [1]


def test_a_rank_that_dies_in_the_last_save_is_a_crash_in_the_end() -> None:
    job = warmed_up(step=990, total_steps=998)
    assert job.step == 998
    job.play(200, SPIN, {5: KILLED})
    assert [s.rank for s in job.finding(CRASHED).suspects] == [5]
