"""Lines that repeat, share or follow each other: each thing that was said counts once."""

from __future__ import annotations

from tests.watcher.detection.simulated_seconds import LOG
from wattwatch.collectors.samples import GpuSample, HostStatus, KernelEvent, NodeSample, ProgressSample
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.model import JobSpec


def test_a_log_that_two_nodes_share_counts_once() -> None:
    assembler = JobAssembler(JobSpec("pretrain", ("node-1", "node-2"), logs=(LOG,)))
    for node, step in (("node-1", 7), ("node-2", 8)):
        progress = (ProgressSample(LOG, "torchtitan", step, age_seconds=1.0),)
        assembler.add(NodeSample(node, HostStatus.OK, "", 1, 1.0, 0.0, 1.0, progress=progress))
    sample = assembler.assemble({}, 1.5, 0.0)
    assert [s.step for s in sample.progress.sources] == [8]


def test_no_kernel_line_is_lost_between_two_observations_and_none_comes_twice() -> None:
    assembler = JobAssembler(JobSpec("pretrain", ("node-1",)))
    for i in range(3):
        event = KernelEvent("xid", f"line {i}", 0.1, 79)
        assembler.add(NodeSample("node-1", HostStatus.OK, "", i, i, 0.0, i, kernel_events=(event,)))
    (node,) = assembler.assemble({}, 3.0, 0.0).nodes
    assert [e.text for e in node.kernel_events] == ["line 0", "line 1", "line 2"]
    (node,) = assembler.assemble({}, 3.0, 0.0).nodes
    assert node.kernel_events == ()


def test_a_repeated_answer_is_the_same_reading() -> None:
    assembler = JobAssembler(JobSpec("pretrain", ("node-1",)))
    readings = []
    for second, age in enumerate((0.0, 0.1, 1.1, 2.1, 0.1, 1.1)):
        gpus = (GpuSample(0),)
        assembler.add(
            NodeSample("node-1", HostStatus.OK, "", second, second, 0.0, second, gpus=gpus, gpus_age_seconds=age)
        )
        readings.append(assembler.assemble({}, second, 0.0).nodes[0].reading)
    assert readings == [1, 2, 2, 2, 3, 3]
