"""Lines of several nodes become one sample: ranks, GPUs, steps; and nothing is made up where a line is missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wattwatch.collectors.samples import (
    CheckpointSample,
    GpuSample,
    HostStatus,
    HungCall,
    MissingGpu,
    NodeSample,
    ProcessSample,
    ProgressSample,
    ReadingStatus,
)
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.assembler import JobAssembler
from wattwatch.watcher.detection.model import JobSample, JobSpec

NODES = ("a", "b")
LINKS = {node: NodeLink(node, HostStatus.OK, "", 0.0) for node in NODES}
BEAT = "/run/heartbeat/rank-{}.json"


def spec(**settings: object) -> JobSpec:
    return JobSpec("job", NODES, run_directory="/run", **settings)  # type: ignore[arg-type]  # JobSpec's own fields


def boards(*indexes: int, prefix: str = "GPU") -> tuple[GpuSample, ...]:
    return tuple(GpuSample(i, f"{prefix}-{i}", f"00000000:{i:02X}:00.0", power_watts=190.0) for i in indexes)


def line(node: str, now: float, gpus: Sequence[GpuSample] | None = boards(0, 1), **fields: object) -> NodeSample:
    answered = None if gpus is None else tuple(gpus)
    return NodeSample(node, HostStatus.OK, "", int(now), now, now, now, gpus=answered, **fields)  # type: ignore[arg-type]  # NodeSample's own fields


def beat(rank: int, step: int, age: float = 1.0, restart: int = 0, source: str = BEAT) -> ProgressSample:
    return ProgressSample(source.format(rank), "heartbeat", step, age_seconds=age, rank=rank, restart=restart)


def look(assembler: JobAssembler, now: float, *lines: NodeSample) -> JobSample:
    for each in lines:
        assembler.add(each)
    return assembler.assemble(LINKS, now, 0.0)


def test_ranks_follow_the_order_of_nodes_and_gpus_where_no_source_names_them() -> None:
    sample = look(JobAssembler(spec()), 10.0, line("b", 10.0), line("a", 10.0))
    assert [(g.node, g.gpu.index, g.rank) for g in sample.gpus] == [("a", 0, 0), ("a", 1, 1), ("b", 0, 2), ("b", 1, 3)]


def test_ranks_of_heartbeats_win_over_the_order() -> None:
    processes = (
        ProcessSample(7, "python3", "R", 1.0, None, (0,), 3),
        ProcessSample(8, "python3", "R", 1.0, None, (1,), 2),
    )
    sample = look(JobAssembler(spec()), 10.0, line("a", 10.0, processes=processes), line("b", 10.0))
    assert [g.rank for g in sample.gpus] == [3, 2, None, None]


def test_no_rank_is_guessed_behind_a_node_that_never_spoke() -> None:
    sample = look(JobAssembler(spec()), 10.0, line("b", 10.0))
    assert [g.rank for g in sample.gpus] == [None, None]


def test_a_line_is_part_of_the_sample_for_two_and_a_half_intervals() -> None:
    assembler = JobAssembler(spec())
    assert look(assembler, 10.0, line("a", 10.0), line("b", 10.0)).complete
    late = look(assembler, 12.4, line("a", 12.0))
    assert late.complete
    gone = look(assembler, 12.6)
    assert not gone.complete
    assert {g.node for g in gone.gpus} == {"a"}
    assert gone.expected_gpus == 4


def test_a_gpu_that_is_no_longer_listed_is_missing_and_keeps_its_place() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0, boards(0, 1, 2)), line("b", 10.0))
    sample = look(assembler, 11.0, line("a", 11.0, boards(0, 2)), line("b", 11.0))
    (node, _) = sample.nodes
    assert [(m.index, m.pci_bus_id, m.reason) for m in node.missing_gpus] == [
        (1, "00000000:01:00.0", ReadingStatus.LOST)
    ]
    assert [(g.gpu.index, g.rank) for g in sample.gpus if g.node == "a"] == [(0, 0), (2, 2)]
    assert [g.rank for g in sample.gpus if g.node == "b"] == [3, 4]


def test_a_gpu_that_the_tool_names_as_lost_is_missing_once() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0))
    lost = MissingGpu(1, "00000000:01:00.0", ReadingStatus.LOST, "GPU is lost")
    sample = look(assembler, 11.0, line("a", 11.0, boards(0), missing_gpus=(lost,)))
    assert sample.nodes[0].missing_gpus == (lost,)


def test_a_replaced_gpu_is_no_missing_one() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0))
    assert look(assembler, 11.0, line("a", 11.0, boards(0, 1, prefix="NEW"))).nodes[0].missing_gpus == ()


def test_gpus_that_never_showed_are_missing_where_their_number_is_configured() -> None:
    sample = look(JobAssembler(spec(gpus_per_node=8)), 10.0, line("a", 10.0, boards(0, 1, 2, 3, 4, 5, 6)))
    assert [m.text for m in sample.nodes[0].missing_gpus] == ["7 GPUs are listed, but the configuration expects 8"]


def test_gpus_that_could_not_be_asked_are_not_missing() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0))
    assert look(assembler, 11.0, line("a", 11.0, None)).nodes[0].missing_gpus == ()


def test_the_age_of_a_step_counts_from_its_last_change_on_our_clock() -> None:
    assembler = JobAssembler(spec())
    first = look(assembler, 10.0, line("a", 10.0, progress=(beat(0, 5, age=3.0), beat(1, 4))))
    assert (first.progress.step, first.progress.slowest_step, first.progress.age_seconds) == (5, 4, 3.0)
    assert look(assembler, 11.0, line("a", 11.0, progress=(beat(0, 5),))).progress.age_seconds == 4.0
    assert look(assembler, 12.0, line("a", 12.0, progress=(beat(0, 6),))).progress.age_seconds == 0.0


def test_sources_of_other_jobs_on_the_node_are_not_ours() -> None:
    others = (
        beat(0, 99, source="/other/rank-{}.json"),
        beat(1, 98, source="/run2/rank-{}.json"),
        ProgressSample("/logs/b.log", "megatron_lm", 97),
        ProgressSample("/logs/a.log", "megatron_lm", 7),
    )
    sample = look(JobAssembler(spec(logs=("/logs/a*.log",))), 10.0, line("a", 10.0, progress=others))
    assert sample.progress.step == 7


def test_logs_and_heartbeats_of_an_earlier_run_are_left_out() -> None:
    assembler = JobAssembler(spec(logs=("/logs/*.log",)))
    old = ProgressSample("/logs/1.log", "torchtitan", 5000, age_seconds=4000.0)
    new = ProgressSample("/logs/2.log", "torchtitan", 4200, age_seconds=2.0)
    assert look(assembler, 10.0, line("a", 10.0, progress=(old, new))).progress.step == 4200
    beats = (beat(0, 900, age=9000.0), beat(1, 100, restart=1), beat(2, 120, restart=0))
    assert look(assembler, 11.0, line("a", 11.0, progress=beats)).progress.step == 100


def test_ranks_that_all_fell_silent_hours_ago_are_all_kept() -> None:
    beats = (beat(0, 3850, age=9000.0), beat(3, 3850, age=9040.0))
    assert len(look(JobAssembler(spec()), 10.0, line("a", 10.0, progress=beats)).progress.sources) == 2


def test_a_silent_node_proves_no_stalled_counter() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0, progress=(beat(0, 5),)), line("b", 10.0))
    assert not look(assembler, 20.0, line("b", 20.0)).progress.readable


def test_a_source_that_cannot_be_read_now_proves_none_either() -> None:
    stuck = (HungCall("read /run", 40.0),)
    sample = look(JobAssembler(spec()), 10.0, line("a", 10.0, progress=(beat(0, 5),), hung_calls=stuck))
    assert not sample.progress.readable
    other = (HungCall("read /elsewhere", 40.0), HungCall("list /run/checkpoints", 40.0))
    sample = look(JobAssembler(spec()), 10.0, line("a", 10.0, progress=(beat(0, 5),), hung_calls=other))
    assert sample.progress.step == 5


def test_of_two_listings_of_a_directory_the_fresher_one_counts() -> None:
    assembler = JobAssembler(spec(checkpoint_directory="/ckpt"))
    old, new = CheckpointSample("/ckpt", (), 30.0), CheckpointSample("/ckpt", (), 1.0)
    sample = look(assembler, 10.0, line("a", 10.0, checkpoints=(old,)), line("b", 10.0, checkpoints=(new,)))
    assert sample.checkpoints == (new,)


def test_a_node_whose_gpus_cannot_be_asked_still_tells_of_checkpoints() -> None:
    assembler = JobAssembler(spec(checkpoint_directory="/ckpt"))
    listing = CheckpointSample("/ckpt", (), 1.0)
    blind = replace(
        line("a", 10.0, None, checkpoints=(listing,)), status=HostStatus.DRIVER_DOWN, detail="no nvidia-smi"
    )
    assert look(assembler, 10.0, blind).checkpoints == (listing,)
    assert look(assembler, 20.0).checkpoints == ()


def test_only_the_jobs_processes_are_its_own() -> None:
    processes = (
        ProcessSample(1, "python3", "R", 1.0),
        ProcessSample(2, "Xorg", "S", 1.0, None, (0,)),
        ProcessSample(3, "pt_main_thread", "R", 1.0, None, (0,), 0),
    )
    sample = look(JobAssembler(spec(processes="^python")), 10.0, line("a", 10.0, processes=processes))
    assert [p.pid for p in sample.nodes[0].processes or ()] == [1, 3]


def test_what_the_connection_says_outweighs_the_last_line() -> None:
    assembler = JobAssembler(spec())
    assembler.add(line("a", 10.0))
    links = {**LINKS, "a": NodeLink("a", HostStatus.UNREACHABLE, "no line for 9 s")}
    node = assembler.assemble(links, 11.0, 0.0).nodes[0]
    assert (node.status, node.detail, node.fresh) == (HostStatus.UNREACHABLE, "no line for 9 s", False)


def test_a_line_of_a_strange_node_is_ignored() -> None:
    assert look(JobAssembler(spec()), 10.0, line("z", 10.0)).gpus == ()


def board(i: int, *, uuid: str | None, pci: str | None = None) -> GpuSample:
    return GpuSample(i, uuid=uuid, pci_bus_id=pci)


def test_a_gpu_in_the_place_of_another_one_is_no_loss() -> None:
    """Exchanged, or named by another tool; also when a third GPU is lost at the same time."""
    before = tuple(board(i, uuid=f"GPU-{i}", pci=f"00000000:1{i}:00.0") for i in range(4))
    for after in (
        (*before[:2], board(2, uuid="GPU-new", pci="0000:12:00.0")),  # in short form
        (*before[:2], board(2, uuid="GPU-new")),  # without a slot
        tuple(board(i, uuid=None, pci=f"00000000:1{i}:00.0") for i in range(3)),
        tuple(board(i, uuid=None) for i in range(3)),
    ):
        assembler = JobAssembler(spec())
        look(assembler, 10.0, line("a", 10.0, gpus=before))
        for second in (11.0, 12.0):
            missing = look(assembler, second, line("a", second, gpus=after)).nodes[0].missing_gpus
            assert [m.index for m in missing] == [3]


def test_a_gpu_without_a_slot_is_missed_beside_one_that_the_tool_could_not_open() -> None:
    before = tuple(board(i, uuid=f"GPU-{i}") for i in range(4))
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0, gpus=before))
    told = (MissingGpu(2, None, ReadingStatus.LOST, "cannot be opened"),)
    missing = look(assembler, 11.0, line("a", 11.0, gpus=before[:2], missing_gpus=told)).nodes[0].missing_gpus
    assert [m.index for m in missing] == [2, 3]


def held(*indexes: int) -> tuple[GpuSample, ...]:
    return tuple(replace(gpu, memory_used_bytes=60e9) for gpu in boards(*indexes))


def test_a_list_that_shows_nobody_beside_memory_in_use_is_unknown_until_it_shows_somebody() -> None:
    assembler = JobAssembler(spec())
    sample = look(assembler, 10.0, line("a", 10.0, held(0, 1), processes=()), line("b", 10.0, processes=()))
    assert [node.processes for node in sample.nodes] == [None, ()]
    sample = look(assembler, 11.0, line("a", 11.0, processes=()))
    assert sample.nodes[0].processes is None, "it says no more once the memory is released"
    rank = ProcessSample(7, "python3", "R", 1.0, None, (0,))
    assert look(assembler, 12.0, line("a", 12.0, processes=(rank,))).nodes[0].processes == (rank,)
    assert look(assembler, 13.0, line("a", 13.0, held(0, 1), processes=())).nodes[0].processes == ()


def test_gpus_of_a_blind_node_are_unseen_with_the_ranks_they_had() -> None:
    assembler = JobAssembler(spec())
    sample = look(assembler, 10.0, line("a", 10.0), line("b", 10.0))
    assert (sample.unseen, sample.extent, sample.seen_share) == ((), "", 1.0)
    for second in range(11, 20):
        sample = look(assembler, float(second), line("a", float(second)))
    assert [(gpu.node, gpu.rank, gpu.index, gpu.reason) for gpu in sample.unseen] == [
        ("b", 2, 0, "no recent reading"),
        ("b", 3, 1, "no recent reading"),
    ]
    assert (sample.extent, sample.seen_share) == ("2 of 4 GPUs seen", 0.5)


def test_a_node_that_has_never_answered_is_counted_as_one_like_the_others() -> None:
    sample = look(JobAssembler(spec()), 10.0, line("a", 10.0))
    assert (sample.unseen, sample.extent, sample.seen_share) == ((), "GPUs of 1 of 2 nodes seen", 0.5)
    sample = look(JobAssembler(spec(gpus_per_node=2)), 10.0, line("a", 10.0))
    assert [(gpu.node, gpu.rank, gpu.index) for gpu in sample.unseen] == [("b", None, None), ("b", None, None)]
    assert sample.extent == "2 of 4 GPUs seen"


def test_a_lost_gpu_is_unseen_and_the_other_ranks_stay() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 10.0, line("a", 10.0), line("b", 10.0))
    gone = MissingGpu(1, None, ReadingStatus.LOST, "NVML cannot open GPU 1")
    sample = look(assembler, 11.0, line("a", 11.0, boards(0), missing_gpus=(gone,)), line("b", 11.0))
    assert [(gpu.node, gpu.rank, gpu.reason) for gpu in sample.unseen] == [("a", 1, "NVML cannot open GPU 1")]
    assert [(gpu.node, gpu.rank) for gpu in sample.gpus] == [("a", 0), ("b", 2), ("b", 3)]
    assert sample.extent == "3 of 4 GPUs seen"


def test_a_gpu_that_was_lost_before_the_first_sample_counts_for_the_ranks_behind_it() -> None:
    gone = MissingGpu(1, None, ReadingStatus.LOST, "NVML cannot open GPU 1")
    sample = look(JobAssembler(spec()), 11.0, line("a", 11.0, boards(0), missing_gpus=(gone,)), line("b", 11.0))
    assert [(gpu.node, gpu.rank) for gpu in sample.unseen] == [("a", 1)]
    assert [(gpu.node, gpu.rank) for gpu in sample.gpus] == [("a", 0), ("b", 2), ("b", 3)]


def test_a_node_that_drops_out_and_returns_does_not_make_a_stalled_step_young() -> None:
    """Rank 0 stands at step 499 and rank 1 at 500: the highest step changes with the nodes that answer."""
    assembler = JobAssembler(spec())
    ages = []
    for second in range(60):
        now = 100.0 + second
        lines = [line("a", now, progress=(beat(0, 499, age=40.0 + second),))]
        if not 20 <= second < 40:
            lines.append(line("b", now, progress=(beat(1, 500, age=30.0 + second),)))
        ages.append(look(assembler, now, *lines).progress.age_seconds)
    assert ages[0] == 30.0
    assert min(age for age in ages if age is not None) == 30.0
    assert ages[-1] == 30.0 + 59


def test_a_step_that_changed_while_nobody_could_read_it_is_as_old_as_its_source() -> None:
    assembler = JobAssembler(spec())
    look(assembler, 100.0, line("a", 100.0, progress=(beat(0, 500),)))
    look(assembler, 110.0, line("a", 110.0, progress=()))
    assert look(assembler, 400.0, line("a", 400.0, progress=(beat(0, 501, age=280.0),))).progress.age_seconds == 280.0
