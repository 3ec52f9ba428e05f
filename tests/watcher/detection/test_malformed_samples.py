"""Whatever nodes say, in whatever order: nothing is raised, nothing is told twice, nothing is made up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.watcher.detection.simulated_seconds import CHECKPOINTS, LOG, RUN_DIRECTORY, pci
from wattwatch.collectors.samples import (
    CheckpointEntry,
    CheckpointSample,
    GpuSample,
    HostStatus,
    HungCall,
    KernelEvent,
    MissingGpu,
    NodeSample,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.classifier.classifier import classify
from wattwatch.watcher.detection.detector import JobDetector
from wattwatch.watcher.detection.model import JobSpec

NUMBERS = st.none() | st.floats(0, 2000) | st.just(float("nan")) | st.just(0.0)
REASONS = st.dictionaries(
    st.sampled_from(["power_watts", "utilization_percent"]), st.sampled_from(ReadingStatus), max_size=2
)
INDEXES = st.none() | st.integers(0, 9)
PHASES = st.none() | st.sampled_from(["load", "train", "save", "barrier", "eval", "done", "x"])


@st.composite
def gpus(draw: st.DrawFn) -> GpuSample:
    index = draw(INDEXES)
    return GpuSample(
        index,
        uuid=draw(st.none() | st.just(f"GPU-{index}")),
        pci_bus_id=draw(st.none() | st.just(pci(index or 0)) | st.text(max_size=4)),
        name=draw(st.none() | st.sampled_from(["NVIDIA B300 SXM6 AC", "Tesla T4", "?"])),
        power_watts=draw(NUMBERS),
        power_limit_watts=draw(NUMBERS),
        utilization_percent=draw(st.none() | st.floats(0, 100)),
        memory_used_bytes=draw(NUMBERS),
        throttle_reasons=draw(st.none() | st.frozensets(st.sampled_from(["gpu_idle", "hw_slowdown"]))),
        mig=draw(st.none() | st.booleans()),
        reasons=draw(REASONS),
    )


PROCESSES = st.builds(
    ProcessSample,
    st.integers(1, 6),
    st.sampled_from(["python3", "x"]),
    st.sampled_from("RSDZ"),
    st.floats(0, 3),
    st.none(),
    st.lists(st.integers(0, 9), max_size=2).map(tuple),
    INDEXES,
)
PROGRESS = st.builds(
    ProgressSample,
    st.sampled_from([LOG, f"{RUN_DIRECTORY}/rank_0.json", "/elsewhere"]),
    st.sampled_from(["heartbeat", "regex"]),
    st.none() | st.integers(-1, 50),
    st.none() | st.integers(0, 50),
    NUMBERS,
    NUMBERS,
    st.none() | st.floats(0, 100),
    st.none() | st.floats(0, 1e6),
    rank=INDEXES,
    restart=st.none() | st.integers(0, 2),
    phase=PHASES,
    data_wait_ms=st.none() | st.floats(0, 1e4),
)
ENTRIES = st.builds(
    CheckpointEntry,
    st.sampled_from(["a", "b"]),
    st.none() | st.integers(0, 50),
    st.none() | st.booleans(),
    st.integers(0, 9),
    st.none() | st.floats(0, 1e5),
    st.just(""),
)
EVENTS = st.builds(
    KernelEvent,
    st.sampled_from(["xid", "oom", "segfault", "?"]),
    st.text(max_size=5),
    st.none() | st.floats(0, 1e4),
    st.none() | st.sampled_from([13, 79, 48, 9999]),
    st.none() | st.just(pci(1)) | st.text(max_size=4),
    st.none() | st.integers(1, 6),
)
LINES = st.builds(
    NodeSample,
    st.sampled_from(["node-1", "node-2"]),
    st.sampled_from(HostStatus),
    st.text(max_size=5),
    st.integers(0, 5),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
    st.just(0.0),
    gpus=st.none() | st.lists(gpus(), max_size=4).map(tuple),
    missing_gpus=st.lists(
        st.builds(MissingGpu, INDEXES, st.none() | st.just(pci(2)), st.sampled_from(ReadingStatus), st.just("gone")),
        max_size=1,
    ).map(tuple),
    processes=st.none() | st.lists(PROCESSES, max_size=4).map(tuple),
    progress=st.lists(PROGRESS, max_size=3).map(tuple),
    checkpoints=st.lists(ENTRIES, max_size=2).map(lambda e: (CheckpointSample(CHECKPOINTS, tuple(e), 1.0),)),
    kernel_events=st.lists(EVENTS, max_size=2).map(tuple),
    hung_calls=st.lists(st.builds(HungCall, st.just("nvml"), st.floats(0, 99)), max_size=1).map(tuple),
    gpus_age_seconds=st.floats(0, 10),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.lists(st.tuples(st.floats(0, 40), LINES), max_size=12))
def test_whatever_nodes_send_nothing_is_raised_and_missing_values_stay_none(rounds: list[Any]) -> None:
    spec = JobSpec(
        "pretrain", ("node-1", "node-2"), RUN_DIRECTORY, (LOG,), checkpoint_directory=CHECKPOINTS,
        floor_tokens_per_second=10.0, checkpoint_every_seconds=60.0,
    )  # fmt: skip
    assembler, detector = JobAssembler(spec), JobDetector(spec)
    now = 100.0
    for seconds, line in rounds:
        now += seconds
        said = replace(line, received_seconds=now)
        assembler.add(said)
        sample = assembler.assemble({}, now, now)
        findings = detector.observe(classify(sample), sample, now)
        ours = [g.gpu for g in sample.gpus if g.node == line.node]
        assert all(any(gpu is told for told in line.gpus or ()) for gpu in ours), "boards are passed on as they are"
        assert len({finding.key for finding in findings}) == len(findings), "one finding a key"
        assert all(finding.since_seconds <= now for finding in findings)
        assert all(seconds >= 0 for seconds in detector.wasted_gpu_seconds.values())
