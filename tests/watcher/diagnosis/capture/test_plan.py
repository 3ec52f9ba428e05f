"""The plan of a capture, from what the watcher knows about the job."""

from __future__ import annotations

from wattwatch.collectors.samples import GpuSample, HostStatus, ProcessSample, ProgressSample
from wattwatch.watcher.config.settings import CaptureSettings
from wattwatch.watcher.detection.model import JobProgress, JobSample, JobSpec, NodeState, RankGpu
from wattwatch.watcher.diagnosis.capture.collector import NodeCapturePlan, plan_capture

NODES = ("node-01", "node-02", "node-03")
SPEC = JobSpec("llama", NODES, run_directory="/nfs/runs/llama")


def node(name: str, status: HostStatus = HostStatus.OK, *processes: ProcessSample) -> NodeState:
    detail = "" if status is HostStatus.OK else "no answer within 10 s"
    return NodeState(name, status, detail, 0.0, fresh=True, processes=processes)


def process(pid: int, rank: int | None = None, *gpu_indexes: int) -> ProcessSample:
    return ProcessSample(pid, "python", "R", 0.0, gpu_indexes=gpu_indexes, rank=rank)


def sample(*nodes: NodeState, phase: str = "train", gpus: tuple[RankGpu, ...] = ()) -> JobSample:
    heartbeats = (ProgressSample("rank-00000.json", "heartbeat", 7, rank=0, phase=phase),)
    return JobSample("llama", gpus, nodes, JobProgress(step=7, sources=heartbeats))


def test_a_process_has_the_rank_of_its_heartbeat_or_of_its_gpu() -> None:
    seen = node("node-01", HostStatus.OK, process(11, 0), process(12, None, 1), process(13, None, 0, 1), process(14))
    rank_gpu = RankGpu("node-01", 5, GpuSample(index=1))
    plan = plan_capture(SPEC, sample(seen, gpus=(rank_gpu,)), CaptureSettings())
    assert plan.nodes == (
        NodeCapturePlan("node-01", (0, 5), ((0, 11), (5, 12), (None, 13), (None, 14)), None, ras=True),
    )
    assert plan.run_directory == "/nfs/runs/llama"


def test_nccl_ras_is_asked_on_two_nodes_that_answer() -> None:
    nodes = [node(name) for name in NODES]
    asked = [
        each.ras
        for each in plan_capture(SPEC, sample(node("n", HostStatus.UNREACHABLE), *nodes), CaptureSettings()).nodes
    ]
    assert asked == [False, True, False, True]


def test_a_node_that_cannot_be_reached_keeps_its_reason() -> None:
    seen = sample(node("node-01", HostStatus.UNREACHABLE), node("node-02", HostStatus.DRIVER_DOWN))
    plan = plan_capture(SPEC, seen, CaptureSettings())
    assert [each.unreachable for each in plan.nodes] == ["no answer within 10 s", None]


def test_a_save_in_progress_is_part_of_the_plan() -> None:
    assert plan_capture(SPEC, sample(node("node-01"), phase="save"), CaptureSettings()).saving
    assert not plan_capture(SPEC, sample(node("node-01"), phase="barrier"), CaptureSettings()).saving


def test_the_first_node_that_answers_stands_in_for_ranks_of_those_that_do_not() -> None:
    lost = node("node-01", HostStatus.UNREACHABLE, process(11, 3), process(12, 2))
    plan = plan_capture(SPEC, sample(lost, node("node-02"), node("node-03")), CaptureSettings())
    assert [each.stands_in_for for each in plan.nodes] == [(), (2, 3), ()]
