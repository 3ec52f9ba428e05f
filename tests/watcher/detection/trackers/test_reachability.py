"""Blind is not broken: what is said of nodes that cannot be seen, and what is not."""

from __future__ import annotations

import pytest

from tests.watcher.detection.simulated_seconds import COMPUTE, SPIN, Job
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.model import NodeLink, UnreachableCause
from wattwatch.watcher.detection.model import AlertName, JobState, NodeState, Severity

UNREACHABLE = AlertName.NODE_UNREACHABLE
BLIND = AlertName.PROBE_BLIND


def training(**settings: object) -> Job:
    job = Job(**{"nodes": 2, "gpus": 4, **settings})  # type: ignore[arg-type]  # handed through
    job.play(40, COMPUTE)
    return job


def cut_off(job: Job, node: str = "node-2") -> None:
    job.links[node] = NodeLink(node, HostStatus.UNREACHABLE, "no line for 5 s; next attempt in 2 s", 5.0)


def test_a_node_that_stays_silent_is_a_warning_while_the_job_goes_on() -> None:
    job = training()
    cut_off(job)
    job.play(60, COMPUTE, silent=["node-2"])
    finding = job.finding(UNREACHABLE)
    assert (finding.severity, finding.scope) == (Severity.WARNING, "node-2")
    assert job.alerts == {"NodeUnreachable"}
    assert job.state is JobState.COMPUTING


def test_and_critical_once_steps_stall_with_it() -> None:
    job = training()
    cut_off(job)
    job.play(60, SPIN, silent=["node-2"])
    finding = job.finding(UNREACHABLE)
    assert finding.severity is Severity.CRITICAL
    assert finding.gpus_idle == 8


def test_a_short_silence_is_nothing() -> None:
    job = training()
    cut_off(job)
    job.play(6, COMPUTE, silent=["node-2"])
    job.links["node-2"] = NodeLink("node-2", HostStatus.OK, "", 0.0)
    job.play(20, COMPUTE)
    assert job.alerts == set()


@pytest.mark.parametrize(
    "status", [HostStatus.DRIVER_DOWN, HostStatus.SAMPLER_TIMEOUT, HostStatus.PARSE_ERROR, HostStatus.AUTH_FAILED]
)
def test_an_unreadable_node_is_a_warning_and_the_job_computes(status: HostStatus) -> None:
    job = training()
    job.status["node-2"] = (status, "as seen")
    job.play(60, COMPUTE)
    assert job.finding(BLIND).severity is Severity.WARNING
    assert [s.node for s in job.finding(BLIND).suspects] == ["node-2"]
    assert job.alerts == {"ProbeBlind"}
    assert job.state is JobState.COMPUTING


def test_a_node_without_nvidia_smi_says_what_is_still_readable_there() -> None:
    missing = "nvidia-smi is not installed or not in PATH; the NVML library is not visible here"
    for progress, still in (
        ("heartbeat", " (the job's heartbeats are still readable)"),
        ("log", " (the job's log is still readable)"),
        (None, ""),
    ):
        job = training(nodes=1, progress=progress)
        job.status["node-1"] = (HostStatus.DRIVER_DOWN, missing)
        job.play(60, COMPUTE)
        said = job.finding(BLIND)
        assert said.summary == f"GPUs of node-1 cannot be read: nvidia-smi is not installed or not in PATH{still}."
        assert missing in said.evidence[0]
        assert job.detector.reason.count("nvidia-smi") == 1
        assert job.observed[-1].verdict.why == f"No GPU could be read on 1 node: node-1: {missing}"


def test_the_log_of_one_node_is_not_reported_as_readable_on_another() -> None:
    job = training(progress="log")
    job.status["node-2"] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not returned for 12 s")
    job.play(20, COMPUTE)
    assert job.finding(BLIND).summary == "GPUs of node-2 cannot be read: GPU query does not finish."


def test_an_unreadable_node_does_not_hide_stalled_steps() -> None:
    job = training()
    job.status["node-2"] = (HostStatus.DRIVER_DOWN, "NVML: driver/library version mismatch")
    job.play(60, SPIN)
    assert job.finding(AlertName.JOB_HUNG).confirmed


def test_a_driver_that_sees_no_gpu_is_a_fault() -> None:
    job = training()
    job.status["node-2"] = (HostStatus.NO_DEVICES, "No devices were found")
    job.play(20, SPIN)
    assert job.finding(AlertName.GPU_FAULT).scope == "node-2"


def test_all_nodes_unreadable_is_no_verdict_on_the_job() -> None:
    job = training(progress=None)
    for node in job.nodes:
        job.status[node] = (HostStatus.DRIVER_DOWN, "NVML: driver/library version mismatch")
    job.play(60, COMPUTE)
    assert job.state is JobState.UNKNOWN
    assert job.alerts == {"ProbeBlind"}


def test_a_hang_of_a_job_without_a_counter_ends_when_its_gpus_work_again() -> None:
    job = Job(nodes=2, progress=None)
    job.play(40, COMPUTE)
    job.play(400, SPIN)
    assert job.finding(AlertName.JOB_HUNG).confirmed
    job.play(10, COMPUTE)
    assert job.findings == ()


def test_a_node_that_reboots_stays_one_finding_until_it_is_seen_again() -> None:
    job = training()
    cut_off(job)
    job.play(20, COMPUTE, silent=["node-2"])
    for _ in range(4):
        job.links["node-2"] = NodeLink("node-2", HostStatus.AUTH_FAILED, "login refused while it boots", 30.0)
        job.play(4, COMPUTE, silent=["node-2"])
        assert job.finding(UNREACHABLE).scope == "node-2"
        cut_off(job)
        job.play(8, COMPUTE, silent=["node-2"])
        assert job.finding(UNREACHABLE).scope == "node-2"
    job.links["node-2"] = NodeLink("node-2", HostStatus.OK, "", 0.0)
    job.play(5, COMPUTE)
    assert job.findings == ()


def test_an_unreadable_node_that_falls_silent_is_still_unreadable() -> None:
    job = training()
    job.status["node-2"] = (HostStatus.SAMPLER_TIMEOUT, "nvml has not answered for 12 s")
    job.play(20, COMPUTE)
    assert job.alerts == {"ProbeBlind"}
    cut_off(job)
    job.play(4, COMPUTE, silent=["node-2"])
    assert job.finding(BLIND).scope == "node-2"


def test_a_job_of_which_no_node_answers_for_a_minute_is_critical() -> None:
    job = training(progress=None)
    for node in job.nodes:
        cut_off(job, node)
    job.play(30, COMPUTE, silent=list(job.nodes))
    assert {f.severity for f in job.findings if f.alert is UNREACHABLE} == {Severity.WARNING}
    job.play(50, COMPUTE, silent=list(job.nodes))
    assert {f.severity for f in job.findings if f.alert is UNREACHABLE} == {Severity.CRITICAL}


def test_a_node_that_answers_without_its_driver_is_no_longer_said_to_be_silent() -> None:
    job = training()
    cut_off(job)
    job.play(20, COMPUTE, silent=["node-2"])
    assert job.finding(UNREACHABLE).summary == "node-2 does not answer."
    job.links["node-2"] = NodeLink("node-2", HostStatus.OK, "", 0.0)
    job.status["node-2"] = (HostStatus.DRIVER_DOWN, "NVIDIA driver is not loaded")
    job.play(5, COMPUTE)
    found = job.finding(UNREACHABLE)
    assert found.summary == "node-2 answers again, but its GPUs cannot be read: NVIDIA driver is not loaded."
    assert "last data received 0 s ago" in found.evidence


@pytest.mark.parametrize(
    ("cause", "said", "advice"),
    [
        (UnreachableCause.SILENT, "does not answer", "BMC"),
        (UnreachableCause.ROUTE, "cannot be reached: the network reports no route to it", "BMC"),
        (UnreachableCause.REFUSED, "is up but refuses SSH connections", "sshd"),
        (UnreachableCause.NAME, "cannot be reached: its host name does not resolve", "DNS"),
        (UnreachableCause.HANDSHAKE, "answers, but ends each SSH connection before the login", "MaxStartups"),
        (UnreachableCause.SESSION, "accepts the SSH login, but sends no data", "log in to it"),
        (UnreachableCause.GATEWAY, "cannot be reached through its SSH gateway", "gateway"),
        (UnreachableCause.CONFIGURATION, "cannot be reached: its SSH configuration", "ssh_config"),
    ],
)
def test_only_a_node_from_which_nothing_came_back_is_said_not_to_answer(
    cause: UnreachableCause, said: str, advice: str
) -> None:
    job = training()
    job.links["node-2"] = NodeLink("node-2", HostStatus.UNREACHABLE, "as it was", 5.0, cause=cause)
    job.play(60, COMPUTE, silent=["node-2"])
    finding = job.finding(UNREACHABLE)
    assert finding.summary.startswith(f"node-2 {said}")
    assert advice in finding.advice
    state = NodeState("node-2", HostStatus.UNREACHABLE, "as it was", 5.0, fresh=False, cause=cause)
    assert state.unreadable_reason.startswith(f"node {said}")
    assert ("answer" in finding.summary) == (cause in (UnreachableCause.SILENT, UnreachableCause.HANDSHAKE))


def test_a_rejected_login_after_silence_is_said_with_its_own_next_step() -> None:
    job = training()
    cut_off(job)
    job.play(20, COMPUTE, silent=["node-2"])
    job.links["node-2"] = NodeLink("node-2", HostStatus.HOST_KEY_CHANGED, "another key", 30.0)
    job.play(5, COMPUTE, silent=["node-2"])
    finding = job.finding(UNREACHABLE)
    assert "SSH host key does not match the known one" in finding.summary
    assert "host key changed" in finding.advice
    assert "BMC" not in finding.advice


@pytest.mark.parametrize(("nodes", "said"), [(1, ""), (2, "the other node of"), (3, "none of the 2")])
def test_how_many_other_nodes_cannot_be_reached_is_counted(nodes: int, said: str) -> None:
    job = training(nodes=nodes, progress=None)
    for node in job.nodes:
        cut_off(job, node)
    job.play(80, COMPUTE, silent=list(job.nodes))
    summary = next(f.summary for f in job.findings if f.alert is UNREACHABLE)
    assert said in summary
    assert summary.endswith(".")
    assert nodes > 1 or summary == "node-1 does not answer."


def test_each_way_of_being_unreadable_has_its_own_duration_and_is_a_cause_of_its_own() -> None:
    job = training()
    job.status["node-2"] = (HostStatus.SAMPLER_TIMEOUT, "nvidia-smi has not answered")
    job.play(60, COMPUTE)
    first = job.finding(BLIND)
    job.status["node-2"] = (HostStatus.DRIVER_DOWN, "nvidia-smi is not installed")
    job.play(20, COMPUTE)
    second = job.finding(BLIND)
    assert first.evidence == ("sampler timeout for 59 s: nvidia-smi has not answered",)
    assert second.evidence == ("driver down for 19 s: nvidia-smi is not installed",)
    assert first.causes == ("sampler_timeout",)
    assert second.causes == ("nvidia-smi is not installed",)
    cut_off(job)
    job.play(20, COMPUTE, silent=["node-2"])
    assert job.finding(BLIND).causes == ()  # silence is reported by NodeUnreachable
    assert job.finding(UNREACHABLE).causes == ("node silent",)
