"""Two stages of a pipeline that send and receive in batches, with two tensor-parallel ranks each."""

from __future__ import annotations

from tests.watcher.diagnosis.collectives.simulated_job import collective, peer
from wattwatch.watcher.diagnosis.collectives.analysis import analyze_collectives
from wattwatch.watcher.diagnosis.flight_recorder.model import (
    GroupRecord,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
)
from wattwatch.watcher.diagnosis.model import DiagnosisVerdict

STAGES = {0: ProcessGroup("1", (0, 2), "PIPELINE"), 1: ProcessGroup("2", (1, 3), "PIPELINE")}
TENSOR = {0: ProcessGroup("3", (0, 1), "TENSOR"), 1: ProcessGroup("4", (2, 3), "TENSOR")}
DATA = ProcessGroup("5", (2, 3), "DATA")
SEND, RECEIVE = (peer("send", 0, 1), peer("recv", 0, 1)), (peer("recv", 1, 0), peer("send", 1, 0))


def pending(record: int, slot: int, operation: Operation) -> OperationLaunch:
    return OperationLaunch(record, slot, operation, None, False, False)


def rank_record(rank: int, behind_the_batch: int) -> RankRecord:
    """First comes the batch with the rank of the other stage, which each rank launches in a different order."""
    stage = rank // 2
    batch = (SEND[stage], RECEIVE[stage]) if stage == 0 else (RECEIVE[stage], SEND[stage])
    pair = GroupRecord(STAGES[rank % 2], 40, None, 38, tuple(pending(i, 39 + i, each) for i, each in enumerate(batch)))
    gather = collective("_all_gather_base", 1, 2)
    queued = tuple(pending(10 + i, 101 + i, gather) for i in range(behind_the_batch))
    parts = [pair, GroupRecord(TENSOR[stage], 100 + behind_the_batch, None, 100, queued)]
    if stage == 1:
        reduce = tuple(pending(30 + i, 8 + i, collective("all_reduce", 1, 1)) for i in range(behind_the_batch // 4))
        parts.append(GroupRecord(DATA, 7 + len(reduce), None, 7, reduce))
    return RankRecord(rank, f"_dump_{rank}", "2.9", "2.27.3", tuple(parts))


def test_the_two_ranks_of_an_exchange_do_not_wait_for_each_other() -> None:
    analysis = analyze_collectives([rank_record(rank, 8) for rank in range(4)])
    assert analysis.verdict is DiagnosisVerdict.NO_DESYNC, analysis.why
    assert analysis.culprits == ()


def test_a_rank_that_stopped_launching_after_the_exchange_is_named() -> None:
    analysis = analyze_collectives([rank_record(rank, 2 if rank == 3 else 8) for rank in range(4)])
    assert analysis.verdict is DiagnosisVerdict.NEVER_ARRIVED, analysis.why
    assert analysis.culprits == (3,)
    assert (
        "rank 3 launched nothing after sequence number 102 of TENSOR, while its peers launched 6 more operations"
        in analysis.why
    )
