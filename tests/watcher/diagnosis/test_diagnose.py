"""Culprits, cause and confidence from evidence: each source alone, several together, and contradicting ones."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.watcher.diagnosis.hung_job_evidence import GROUP, launch, live, node_of, processes, record, records, stacks
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.flight_recorder.model import GroupRecord, OperationLaunch, ProcessGroup, RankRecord
from wattwatch.watcher.diagnosis.model import (
    Diagnosis,
    DiagnosisVerdict,
    Evidence,
    HangCause,
    LiveEvidence,
    NodeFault,
    RankExitReport,
    RankProcess,
    RankReadings,
)
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls
from wattwatch.watcher.diagnosis.serialization import diagnosis_document, waits_at_shared_slot


@dataclass(frozen=True)
class Case:
    name: str
    evidence: Evidence
    verdict: DiagnosisVerdict
    culprits: tuple[int, ...]
    cause: HangCause
    conclusive: bool = False
    least: float = 0.0
    most: float = 1.0


def with_ranks(live: LiveEvidence, **of_rank_3: object) -> LiveEvidence:
    """Changes rank 3."""
    return replace(
        live,
        ranks=tuple(replace(each, **of_rank_3) if each.rank == 3 else each for each in live.ranks),  # type: ignore[arg-type]
    )


def fault(kind: str, words: str, rank: int | None = 3, gpu: int | None = None) -> LiveEvidence:
    return live(faults=(NodeFault(kind, node_of(3), words, rank, gpu),))


def alive() -> LiveEvidence:
    return replace(live(), ranks=tuple(replace(each, alive=True) for each in live().ranks))


def kernel_stack(place: str) -> tuple[RankProcess, ...]:
    """Rank 3 is in state D in this kernel function."""
    return tuple(
        replace(each, kernel_stack=("rwsem_down_read_slowpath+0x1", place)) if each.rank == 3 else each
        for each in processes({3: ("D", "rwsem_down_read_slowpath")})
    )


DESYNC, NEVER, SAME, UNKNOWN = (
    DiagnosisVerdict.DESYNC,
    DiagnosisVerdict.NEVER_ARRIVED,
    DiagnosisVerdict.NO_DESYNC,
    DiagnosisVerdict.UNKNOWN,
)
ENDED = tuple(RankExitReport(rank, 5, "collective timed out", 12, True) for rank in range(8))

CASES = (
    Case("records prove it", Evidence(records({3: "barrier"})), DESYNC, (3,), HangCause.PROGRAM, True, 0.95),
    Case(
        "records and power agree",
        Evidence(records({3: "barrier"}), live=live((3,))),
        DESYNC,
        (3,),
        HangCause.PROGRAM,
        True,
        0.98,
    ),
    Case(
        "power names another than proven records",
        Evidence(records({3: "barrier"}), live=live((5,))),
        DESYNC,
        (3,),
        HangCause.PROGRAM,
        True,
        0.85,
        0.96,
    ),
    Case(
        "out of data: the paper's hang",
        Evidence(records({3: "barrier"}), live=with_ranks(live((3,)), phase="barrier", blocks_left=0)),
        DESYNC,
        (3,),
        HangCause.DATA,
        True,
    ),
    Case(
        "sizes differ",
        Evidence((*records(without=(3,)), record(3, size=65))),
        DiagnosisVerdict.MISMATCH,
        (3,),
        HangCause.PROGRAM,
        True,
    ),
    Case("one never arrived", Evidence(records({3: None})), NEVER, (3,), HangCause.RANK, least=0.85, most=0.95),
    Case(
        "one never arrived, and is stopped",
        Evidence(records({3: None}), processes=processes({3: ("T", None)})),
        NEVER,
        (3,),
        HangCause.RANK,
        least=0.95,
    ),
    Case(
        "one never arrived, and loads data",
        Evidence(records({3: None}), stacks=stacks({3: "data"})),
        NEVER,
        (3,),
        HangCause.DATA,
        least=0.93,
    ),
    Case(
        "one never arrived, and waits for a file server",
        Evidence(records({0: None}), stacks=stacks({0: "checkpoint"}), processes=processes({0: ("D", "nfs_wait")})),
        NEVER,
        (0,),
        HangCause.STORAGE,
        least=0.93,
    ),
    Case(
        "one never arrived, and its GPU has an Xid",
        Evidence(records({3: None}), live=fault("gpu", "Xid 79: fallen off the bus")),
        NEVER,
        (3,),
        HangCause.GPU,
        least=0.93,
    ),
    Case(
        "its GPU did not finish what the others finished",
        Evidence(tuple(record(rank, done=rank != 3) for rank in range(8))),
        NEVER,
        (3,),
        HangCause.GPU,
    ),
    Case(
        "one left no flight record, and is gone",
        Evidence(records(without=(3,)), processes=processes({3: (None, None)})),
        NEVER,
        (3,),
        HangCause.RANK,
        least=0.85,
    ),
    Case("one left no flight record", Evidence(records(without=(3,))), UNKNOWN, (), HangCause.UNKNOWN, most=0.1),
    Case("two left no flight record", Evidence(records(without=(3, 5))), UNKNOWN, (), HangCause.UNKNOWN, most=0.1),
    Case(
        "two left no flight record, one was killed for memory",
        Evidence(records(without=(3, 5)), live=fault("oom", "out-of-memory kill of python")),
        NEVER,
        (3,),
        HangCause.HOST,
        least=0.7,
    ),
    Case(
        "a node left no flight record and its processes are gone",
        Evidence(records(without=(4, 5, 6, 7)), processes=processes(dict.fromkeys((4, 5), (None, None)))),
        NEVER,
        (4, 5),
        HangCause.RANK,
    ),
    Case("all in the same operation", Evidence(records()), SAME, (), HangCause.NETWORK, least=0.7),
    Case(
        "all in the same operation, all GPUs are busy",
        Evidence(records(), stacks=stacks(), live=live()),
        SAME,
        (),
        HangCause.NETWORK,
        least=0.85,
    ),
    Case(
        "all in the same operation, and a link is down",
        Evidence(records(), live=fault("network", "mlx5_3 port 1 is down", None)),
        SAME,
        (),
        HangCause.NETWORK,
    ),
    Case(
        "all in the same operation, and a GPU fell off the bus",
        Evidence(records(), live=fault("gpu", "Xid 79", None, 3)),
        SAME,
        (3,),
        HangCause.GPU,
    ),
    Case(
        "stopped, without records",
        Evidence(processes=processes({3: ("T", None)})),
        NEVER,
        (3,),
        HangCause.RANK,
        least=0.8,
    ),
    Case("stacks alone", Evidence(stacks=stacks({3: "own"})), NEVER, (3,), HangCause.RANK, least=0.5, most=0.7),
    Case("stacks that all look alike", Evidence(stacks=stacks()), UNKNOWN, (), HangCause.UNKNOWN),
    Case("power alone", Evidence(live=live((3,))), UNKNOWN, (3,), HangCause.UNKNOWN, least=0.45, most=0.55),
    Case(
        "power and stacks",
        Evidence(live=live((3,)), stacks=stacks({3: "own"})),
        NEVER,
        (3,),
        HangCause.RANK,
        least=0.7,
    ),
    Case("phases alone", Evidence(live=with_ranks(live(), phase="barrier")), UNKNOWN, (3,), HangCause.DATA, most=0.7),
    Case("GPUs that are all busy", Evidence(live=live()), UNKNOWN, (), HangCause.UNKNOWN),
    Case(
        "one failed by itself, the others lost it",
        Evidence(exit_reports=(*ENDED[:3], RankExitReport(3, 1, "ValueError: bad batch", 12), *ENDED[4:])),
        NEVER,
        (3,),
        HangCause.RANK,
        least=0.75,
    ),
    Case(
        "one left no exit report, the others lost it",
        Evidence(exit_reports=(*ENDED[:3], *ENDED[4:]), node_of_rank={rank: node_of(rank) for rank in range(8)}),
        NEVER,
        (3,),
        HangCause.RANK,
    ),
    Case("nothing", Evidence(), UNKNOWN, (), HangCause.UNKNOWN, most=0.0),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_who_is_named_and_why(case: Case) -> None:
    found = diagnose(case.evidence)
    named = tuple(culprit.rank for culprit in found.culprits)
    assert (found.verdict, named, found.cause, found.conclusive) == (
        case.verdict,
        case.culprits,
        case.cause,
        case.conclusive,
    ), found
    assert case.least <= found.confidence <= case.most, found
    assert found.summary
    assert found.why
    assert found.advice
    assert "{" not in found.advice


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_order_of_files_and_ranks_changes_nothing(case: Case) -> None:
    expected = diagnose(case.evidence)
    for seed in range(4):
        shuffle = random.Random(seed).sample
        parts = {
            name: tuple(shuffle(value, len(value)))
            for name in ("records", "stacks", "processes", "exit_reports", "unreadable")
            if (value := getattr(case.evidence, name))
        }
        live = case.evidence.live
        if live is not None:
            parts["live"] = replace(live, ranks=tuple(shuffle(live.ranks, len(live.ranks))))  # type: ignore[assignment]
        assert diagnose(replace(case.evidence, **parts)) == expected  # type: ignore[arg-type]


def halves(**more: object) -> Evidence:
    return Evidence(tuple(record(rank, "barrier" if rank >= 4 else "all_reduce") for rank in range(8)), **more)  # type: ignore[arg-type]


def test_records_with_as_many_ranks_on_each_side_name_nobody() -> None:
    found = diagnose(halves())
    assert (found.verdict, found.culprits, found.conclusive) == (DESYNC, (), False)
    assert "no side has a majority, so the records do not show which side is wrong" in found.summary


@pytest.mark.parametrize(
    "evidence", [halves(live=live((6,))), halves(stacks=stacks({6: "own"}))], ids=["power", "stacks"]
)
def test_another_source_breaks_a_tie_and_says_so(evidence: Evidence) -> None:
    found = diagnose(evidence)
    assert [culprit.rank for culprit in found.culprits] == [6]
    assert not found.conclusive
    assert "this result is based on the other evidence" in found.why


def test_sources_on_both_sides_do_not_break_a_tie() -> None:
    assert diagnose(halves(live=live((1, 6), suspects=(1, 6)))).culprits == ()


def test_contradicting_evidence_is_shown_and_lowers_the_confidence() -> None:
    alone = diagnose(Evidence(records({3: None})))
    against = diagnose(Evidence(records({3: None}), live=live((5,))))
    with_it = diagnose(Evidence(records({3: None}), live=live((3,))))
    assert against.confidence < alone.confidence < with_it.confidence
    assert [(t.source, t.agrees) for t in against.signals] == [
        ("flight recorder", True),
        ("power and utilisation", False),
    ]
    assert "rank 5 at 0 % and 190 W, the other 7 ranks at 100 % and 232 W" in against.why


def test_the_summary_names_rank_node_operation_the_others_and_the_step() -> None:
    found = diagnose(Evidence(records({3: "barrier"}), live=live((3,))))
    assert found.summary == (
        "rank 3 (node-01, GPU 3) is in barrier while 7 ranks are in all_reduce at sequence number 7 of default_pg, "
        "step 1,204"
    )
    assert found.culprits[0].doing == "in barrier at sequence number 7 of default_pg (do_barrier, /job/train.py:40)"


def test_the_summary_says_what_a_missing_rank_does_instead() -> None:
    found = diagnose(Evidence(records({3: None}), stacks=stacks({3: "own"}), live=live((3,))))
    assert found.summary == (
        "7 ranks wait in all_reduce at sequence number 7 of default_pg for rank 3 (node-01, GPU 3), which has not "
        "launched it and has no pending operation: it is executing the job's code at count_forever "
        "(/job/metrics.py:12), step 1,204"
    )
    assert [each.rank for each in found.stacks] == [3]


def test_the_line_of_code_comes_from_the_stack_if_the_record_has_none() -> None:
    with_frames = records({3: "barrier"})
    bare = tuple(
        replace(
            each,
            groups=tuple(
                replace(part, launches=tuple(launch._replace(frames=()) for launch in part.launches))
                for part in each.groups
            ),
        )
        for each in with_frames
    )
    found, without, own = (
        diagnose(Evidence(bare, stacks=stacks({3: "own"}))),
        diagnose(Evidence(bare)),
        diagnose(Evidence(with_frames, stacks=stacks({3: "own"}))),
    )

    def lines(of: Diagnosis) -> set[str]:
        assert of.collectives is not None
        return {
            "" if m.frame is None else f"{m.frame.function}:{m.frame.line}" for m in of.collectives.groups[0].members
        }

    assert lines(found) == {"train_step:40", "count_forever:12"}
    assert lines(without) == {""}
    assert lines(own) == {"do_all_reduce:40", "do_barrier:40"}


def test_the_advice_for_a_stopped_process_includes_the_command_to_resume_it() -> None:
    found = diagnose(Evidence(records({3: None}), processes=processes({3: ("T", None)})))
    assert "ssh node-01 'kill -CONT 4003'" in found.advice


def test_complete_records_without_a_waiting_rank_show_no_hang() -> None:
    evidence = Evidence(tuple(record(rank, done=True) for rank in range(8)))
    found = diagnose(evidence)
    assert found.no_hang
    assert "no hang" in found.summary
    assert not diagnose(replace(evidence, live=live())).no_hang, "the watcher observed the hang"
    assert not diagnose(Evidence(evidence.records[:-1])).no_hang, "the missing one may be the culprit"


def test_a_job_that_exited_with_0_is_no_hang() -> None:
    ends = tuple(RankExitReport(rank, 0, "done", 20) for rank in range(8))
    assert diagnose(Evidence(exit_reports=ends)).no_hang


def test_if_all_ranks_of_a_node_hang_the_host_is_to_blame() -> None:
    gone = processes(dict.fromkeys((4, 5), ("T", None)))
    two_nodes = tuple(replace(each, node="node-03") if each.rank in (4, 5) else each for each in gone)
    found = diagnose(Evidence(records({4: None, 5: None}), processes=two_nodes))
    assert ([c.rank for c in found.culprits], found.cause) == ([4, 5], HangCause.HOST)


def test_advancing_ras_counters_contradict_a_hang() -> None:
    data = Path(__file__).parents[2] / "data" / "ras"
    polls = [(f"healthy_poll{i}.json", (data / f"healthy_poll{i}.json").read_bytes()) for i in (1, 2)]
    ras = (parse_polls("node-01", polls, 5.0),)
    one_of_many = GROUP._replace(description="DATA_PARALLEL_GROUP")  # RAS tells of 16 ranks
    parts = tuple(
        replace(each, groups=tuple(replace(part, group=one_of_many) for part in each.groups))
        for each in records({3: None})
    )
    alone = diagnose(Evidence(parts))
    found = diagnose(Evidence(parts, ras=ras))
    assert ("NCCL RAS", False) in [(t.source, t.agrees) for t in found.signals]
    assert found.confidence < alone.confidence
    only = diagnose(Evidence(ras=ras))
    assert (only.culprits, only.no_hang) == ((), True)
    assert only.summary.startswith("the job is making progress: ")


def test_ras_alone_names_rank_and_host() -> None:
    data = Path(__file__).parents[2] / "data" / "ras"
    name = "desync_crossed_counts_poll{}.json"
    polls = [(name.format(i), (data / name.format(i)).read_bytes()) for i in (1, 2)]
    found = diagnose(Evidence(ras=(parse_polls("", polls, 5.0),)))
    assert (found.verdict, found.conclusive, found.cause) == (DESYNC, False, HangCause.PROGRAM)
    assert [(culprit.rank, culprit.node) for culprit in found.culprits] == [(3, "10.0.0.11")]


def test_one_record_with_unknown_group_members_does_not_rule_out_a_hang() -> None:
    alone = record(0, done=True)
    part = alone.groups[0]
    unknown = replace(alone, groups=(replace(part, group=part.group._replace(members=())),))
    assert not diagnose(Evidence((unknown,))).no_hang


def test_nan_and_infinite_readings_are_tolerated() -> None:
    odd = RankReadings(3, "node-01", 3, float("nan"), float("inf"))
    found = diagnose(Evidence(live=replace(live(), ranks=(odd, *live().ranks[:3]))))
    assert found.summary


def in_group(rank: int, *launched: tuple[str, tuple[OperationLaunch, ...]]) -> RankRecord:
    """`launched`: by the description of a group of four ranks."""
    parts = [
        GroupRecord(ProcessGroup(str(len(name)), (0, 1, 2, 3), name), len(launches), None, 0, launches)
        for name, launches in launched
    ]
    return RankRecord(rank, f"rank-{rank}.json", "2.10", "2.27", tuple(parts))


def test_ranks_at_one_slot_wait_for_a_missing_one_each_in_its_own_operation() -> None:
    operations = {0: "all_gather", 2: "all_gather", 3: "all_reduce"}
    here = [in_group(rank, ("default_pg", (launch(1, name, False),))) for rank, name in operations.items()]
    missing = in_group(1, ("default_pg", ()))

    waits = diagnosis_document(diagnose(Evidence(records=(*here, missing))))["waits"]

    assert [(wait["ranks"], wait["operation"], wait["awaited"]) for wait in waits] == [
        ([0, 2], "all_gather", [1]),
        ([3], "all_reduce", [1]),
    ]


def test_culprits_in_different_operations_are_described_with_all_of_them() -> None:
    diagnosis = diagnose(Evidence(records=records({1: "barrier", 3: "broadcast"})))

    assert "ranks 1, 3 are in barrier and broadcast while 6 ranks are in all_reduce" in diagnosis.summary
    assert [(row["awaited"], row["why"]) for row in waits_at_shared_slot(diagnosis, frozenset({1, 3}))] == [
        ([1], "in barrier at the same sequence number"),
        ([3], "in broadcast at the same sequence number"),
    ]


def test_groups_entered_in_different_orders_are_described_by_where_each_rank_waits() -> None:
    first, second = launch(1, "all_reduce", False), launch(1, "broadcast", False)._replace(record_id=2)
    others = [in_group(rank, ("default_pg", (first,)), ("DATA", (second,))) for rank in (0, 1, 2)]
    odd = in_group(3, ("default_pg", (first._replace(record_id=2),)), ("DATA", (second._replace(record_id=1),)))

    diagnosis = diagnose(Evidence(records=(*others, odd)))

    assert diagnosis.summary == (
        "rank 3 is in broadcast at sequence number 1 of DATA while 3 ranks are in all_reduce at sequence number 1 "
        "of default_pg: the ranks use these groups in different orders"
    )


def test_all_ranks_in_an_operation_of_uneven_sizes_are_counted_together() -> None:
    uneven = [in_group(rank, ("default_pg", (launch(1, "all_to_all", False, size=rank + 1),))) for rank in range(4)]

    diagnosis = diagnose(Evidence(records=tuple(uneven)))

    assert diagnosis.summary.startswith("all 4 ranks wait in the same all_to_all at sequence number 1 of default_pg")
    assert "the same all_to_all at sequence number 1" in diagnosis.why
