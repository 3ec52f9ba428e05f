"""NCCL RAS reports of another job beside the records of this one: they are not used."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.watcher.diagnosis.hung_job_evidence import GROUP, record, records
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.model import Evidence
from wattwatch.watcher.diagnosis.nccl_ras.model import RasPolls
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls

DATA = Path(__file__).parents[3] / "data" / "ras"


def polls(name: str) -> RasPolls:
    """Of 16 ranks on two hosts."""
    files = [(f"{name}_poll{i}.json", (DATA / f"{name}_poll{i}.json").read_bytes()) for i in (1, 2)]
    return parse_polls("", files, 5.0)


FOREIGN = polls("desync_crossed_counts")


@pytest.mark.parametrize("odd", [{3: "barrier"}, {3: None}], ids=["proven", "likely"])
def test_a_communicator_larger_than_the_job_is_of_another_job(odd: dict[int, str | None]) -> None:
    sources = tuple(f"rank-{rank:05d}.recorder.json" for rank in range(8))
    alone = Evidence(records(odd), sources=sources)
    mixed = replace(alone, ras=(FOREIGN,), sources=(*sources, *(each.source for each in FOREIGN.reports)))
    found = diagnose(mixed)
    assert replace(found, missing=()) == diagnose(alone)
    assert found.culprits[0].node is None
    assert found.missing == (
        "desync_crossed_counts_poll1.json, desync_crossed_counts_poll2.json: "
        "this NCCL RAS report was ignored because it is from another job: "
        "it has a communicator of 16 ranks, but this job has 8 ranks",
    )


def test_more_hosts_than_the_job_has_nodes_are_of_another_job() -> None:
    wide = GROUP._replace(members=tuple(range(16)))
    whole = tuple(
        replace(each, groups=tuple(replace(part, group=wide) for part in each.groups))
        for each in (record(rank, "barrier" if rank == 3 else "all_reduce") for rank in range(16))
    )
    on_two = Evidence(whole, ras=(FOREIGN,), node_of_rank={rank: f"node-{rank // 8}" for rank in range(16)})
    on_one = replace(on_two, node_of_rank=dict.fromkeys(range(16), "node-0"))
    assert "NCCL RAS" in [each.source for each in diagnose(on_two).signals]
    assert "NCCL RAS" not in [each.source for each in diagnose(on_one).signals]
    assert "its ranks are on 2 hosts, but this job runs on 1" in diagnose(on_one).missing[0]


def test_reports_are_used_if_the_size_of_the_job_is_unknown() -> None:
    found = diagnose(Evidence(ras=(FOREIGN,)))
    assert [each.rank for each in found.culprits] == [3]
