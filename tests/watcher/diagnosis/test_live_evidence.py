"""What the watcher knows from outside, as evidence: the readings of each rank, and every fault that a node reports."""

from __future__ import annotations

from dataclasses import replace

import pytest

from wattwatch.collectors.samples import (
    CheckpointSample,
    FilesystemSample,
    GpuSample,
    HostStatus,
    HungCall,
    KernelEvent,
    MissingGpu,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.collectors.ssh.model import UnreachableCause
from wattwatch.watcher.detection.model import (
    AlertName,
    Finding,
    JobProgress,
    JobSample,
    JobState,
    NodeState,
    PowerState,
    RankGpu,
    Severity,
    Suspect,
    UnseenGpu,
    UtilizationPattern,
    Verdict,
)
from wattwatch.watcher.diagnosis.live_evidence import NodeKernelEvent, collect_live_evidence, collect_node_faults
from wattwatch.watcher.diagnosis.model import NodeFault, RankReadings

VERDICT = Verdict(
    PowerState.HANG, 0.9, UtilizationPattern.ONE_LOW_REST_BUSY, "", "", (Suspect("n1", 1),), at_floor=True
)
NODE = NodeState("n1", HostStatus.OK, "", 0.1, True)


def heartbeat(rank: int, step: int, phase: str = "train", restart: int = 0) -> ProgressSample:
    return ProgressSample(f"rank-{rank}", "heartbeat", step, rank=rank, pid=100 + rank, phase=phase, restart=restart)


def process(rank: int, state: str = "R") -> ProcessSample:
    return ProcessSample(100 + rank, "python", state, 5.0, rank=rank)


def job(**changes: object) -> JobSample:
    gpus = tuple(RankGpu("n1", i, GpuSample(i, power_watts=190.0 + i, utilization_percent=99.0)) for i in range(2))
    sample = JobSample("llama", gpus, (NODE,), JobProgress(step=9), wall_seconds=1e9)
    return replace(sample, **changes)  # type: ignore[arg-type]  # fields by name


def faults(**changes: object) -> list[NodeFault]:
    return list(collect_node_faults(job(**changes), (), ()))


def on_node(**changes: object) -> list[NodeFault]:
    return faults(nodes=(replace(NODE, **changes),))  # type: ignore[arg-type]  # fields by name


def test_a_rank_is_reported_with_its_gpu_its_step_and_its_phase() -> None:
    nodes = (replace(NODE, processes=(process(0),)),)
    sources = (heartbeat(0, 9), heartbeat(1, 8, "save"))
    evidence = collect_live_evidence(
        job(nodes=nodes, progress=JobProgress(step=9, sources=sources)), VERDICT, (), JobState.HUNG
    )
    assert (evidence.job, evidence.state, evidence.shape, evidence.step, evidence.at_floor) == (
        "llama",
        "hung",
        "one_low_rest_busy",
        9,
        True,
    )
    assert evidence.ranks == (
        RankReadings(0, "n1", 0, 190.0, 99.0, 9, "train", alive=True),
        RankReadings(1, "n1", 1, 191.0, 99.0, 8, "save", alive=False),
    )
    assert evidence.suspects == (1,)  # identified by its GPU only


def test_a_heartbeat_of_an_earlier_attempt_does_not_count() -> None:
    sources = (heartbeat(0, 3, "save", restart=1), heartbeat(0, 900))
    evidence = collect_live_evidence(job(progress=JobProgress(step=3, sources=sources)), VERDICT, (), JobState.HUNG)
    assert (evidence.ranks[0].step, evidence.ranks[0].phase) == (3, "save")


def test_a_rank_without_a_gpu_is_known_by_its_process() -> None:
    evidence = collect_live_evidence(
        job(gpus=(), nodes=(replace(NODE, processes=(process(5),)),)), VERDICT, (), JobState.HUNG
    )
    assert evidence.ranks == (RankReadings(5, "n1", alive=True),)


def test_a_rank_whose_gpu_is_not_seen_is_there_without_a_reading() -> None:
    unseen = (
        UnseenGpu("n2", 2, 0, None, "node does not answer"),
        UnseenGpu("n2", None, 1, None, "node does not answer"),
    )
    ranks = collect_live_evidence(job(unseen=unseen), VERDICT, (), JobState.HUNG).ranks
    assert ranks[2] == RankReadings(2, "n2", 0)
    assert len(ranks) == 3


def test_a_missing_gpu_is_reported_with_the_rank_it_had() -> None:
    gone = MissingGpu(1, None, ReadingStatus.LOST, "NVML cannot open GPU 1")
    unseen = (UnseenGpu("n1", 1, 1, None, gone.text),)
    assert faults(nodes=(replace(NODE, missing_gpus=(gone,)),), unseen=unseen) == [
        NodeFault("gpu", "n1", "NVML cannot open GPU 1", 1, 1)
    ]


def test_unknown_readings_of_a_rank_are_none() -> None:
    (rank,) = collect_live_evidence(job(gpus=(RankGpu("n1", 0, GpuSample(0)),)), VERDICT, (), JobState.HUNG).ranks
    assert (rank.power_watts, rank.step, rank.alive, rank.throttled) == (None, None, None, None)


def test_a_broken_gpu_is_reported_once_with_all_its_evidence() -> None:
    lost = GpuSample(1, reasons={"power_watts": ReadingStatus.LOST})
    findings_text = ("Xid 79 (the GPU fell off the bus): NVRM: Xid", "GPU 1 lost: power_watts")
    suspect = (Suspect("n1", 1),)
    found = Finding(
        "llama", AlertName.GPU_FAULT, Severity.CRITICAL, "n1/1", "", findings_text, "", 0.0, suspects=suspect
    )
    sample = job(gpus=(RankGpu("n1", 7, lost),))
    assert list(collect_node_faults(sample, (found,), ())) == [NodeFault("gpu", "n1", "; ".join(findings_text), 7, 1)]
    assert list(collect_node_faults(sample, (), ())) == [NodeFault("gpu", "n1", "GPU 1 lost", 7, 1)]


@pytest.mark.parametrize(
    ("what", "found"),
    [
        (
            {"missing_gpus": (MissingGpu(3, None, ReadingStatus.LOST, "no handle for GPU 3"),)},
            ("gpu", "no handle for GPU 3"),
        ),
        (
            {"hung_calls": (HungCall("list /mnt/ckpt", 48.0),)},
            ("storage", "`list /mnt/ckpt` has not returned for 48 s"),
        ),
        ({"hung_calls": (HungCall("nvidia-smi", 12.0),)}, ("gpu", "`nvidia-smi` has not returned for 12 s")),
        ({"filesystems": (FilesystemSample("/mnt", 0, 9),)}, ("storage", "/mnt is full")),
        ({"filesystems": (FilesystemSample("/mnt", None, None, "I/O error"),)}, ("storage", "/mnt: I/O error")),
        ({"processes": (process(4, "T"),)}, ("process", "rank 4 (pid 104, python) is stopped by a signal")),
        (
            {"status": HostStatus.UNREACHABLE, "detail": "no line for 9 s"},
            ("host", "the node does not answer: no line for 9 s"),
        ),
        (
            {"status": HostStatus.UNREACHABLE, "detail": "connection refused", "cause": UnreachableCause.REFUSED},
            ("host", "the node is up but refuses SSH connections: connection refused"),
        ),
        (
            {"kernel_events": (KernelEvent("oom", "Killed process 104 (python)", 30.0),)},
            ("oom", "out-of-memory kill: Killed process 104 (python) (30 s ago)"),
        ),
        (
            {"kernel_events": (KernelEvent("xid", "NVRM: Xid 48", None, xid=48),)},
            ("gpu", "Xid 48 (double-bit ECC error): NVRM: Xid 48"),
        ),
        ({"kernel_events": (KernelEvent("xid", "NVRM: Xid 31", None, xid=31),)}, ("process", "Xid 31: NVRM: Xid 31")),
    ],
)
def test_each_fault_of_a_node_has_its_kind_and_description(what: dict[str, object], found: tuple[str, str]) -> None:
    assert [(fault.kind, fault.words) for fault in on_node(**what)] == [found]


def test_a_healthy_node_has_no_fault() -> None:
    assert on_node(processes=(process(0), process(1, "S")), filesystems=(FilesystemSample("/mnt", 5, 9),)) == []


def test_a_throttled_gpu_is_reported_with_its_clock() -> None:
    hot = GpuSample(
        0, throttle_reasons=frozenset({"hw_thermal_slowdown"}), sm_clock_mhz=600.0, temperature_celsius=93.0
    )
    (fault,) = faults(gpus=(RankGpu("n1", 0, hot),))
    assert (fault.kind, fault.rank) == ("throttle", 0)
    assert fault.words == "GPU 0 is throttled: hw_thermal_slowdown, 600 MHz, 93 °C"


def test_a_remembered_kernel_message_is_reported_once() -> None:
    event = KernelEvent("oom", "Killed process 104", 1.0)
    sample = job(nodes=(replace(NODE, kernel_events=(event,)),))
    (fault,) = collect_node_faults(sample, (), (NodeKernelEvent("n1", event, 40.0),))
    assert fault.words == "out-of-memory kill: Killed process 104 (40 s ago)"


def test_a_checkpoint_directory_that_cannot_be_listed_is_a_fault_of_storage() -> None:
    (fault,) = faults(checkpoints=(CheckpointSample("/ckpt", (), 3.0, "Stale file handle"),))
    assert (fault.kind, fault.words) == ("storage", "/ckpt cannot be listed: Stale file handle")
