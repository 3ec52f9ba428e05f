"""Output of RAS's monitor mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watcher.diagnosis.nccl_ras.sample_reports import sample
from wattwatch.watcher.diagnosis.diagnose import diagnose
from wattwatch.watcher.diagnosis.loading.evidence import load_evidence
from wattwatch.watcher.diagnosis.nccl_ras.monitor_events import RasEvent, parse_monitor_events
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_report

DEAD = RasEvent("2025-12-19 13:07:07", "PEER_DEAD", "172.16.64.245", 1524345, (1,), "")


def events_of(*names: str) -> tuple[RasEvent, ...]:
    return parse_monitor_events("".join(sample(name).decode() for name in names))


def test_text_and_json_give_the_same_events() -> None:
    assert events_of("monitor_events.txt") == (DEAD,)
    assert events_of("docs_2.30_block08.txt", "docs_2.30_block09.txt") == (DEAD,)
    assert events_of("docs_2.30_block10.json") == (DEAD,)


def test_objects_without_a_separator() -> None:
    first, second = events_of("monitor_events.jsonstream")
    assert (first.event, first.host, first.pid, first.gpus) == ("PEER_DEAD", "10.0.0.12", 40013, (5,))
    assert (second.event, second.host, second.pid, second.gpus) == ("PEER_UNRESPONSIVE", "10.0.0.12", None, ())


def test_a_broken_object_does_not_hide_the_next() -> None:
    broken = sample("docs_2.30_block10.json").replace(b'"pid"', b'"pid')
    assert parse_monitor_events((broken + sample("docs_2.30_block10.json")).decode()) == (DEAD,)


def test_gpus_are_nvml_indices_if_cuda_numbers_them_differently() -> None:
    (event,) = parse_monitor_events(
        "[2025-12-19 13:07:07] PEER_NEW: Process 7 on node n1 managing GPUs 0,1 (NVML 4,5) joined\n"
    )
    assert (event.gpus, event.details) == ((4, 5), "joined")


def test_the_problem_names_the_failing_peers() -> None:
    problem = parse_report(sample("docs_2.30_block10.json")).problem
    assert problem is not None
    assert problem.endswith(
        "not a status report: PEER_DEAD process 1524345 on 172.16.64.245 (GPU 1) at 2025-12-19 13:07:07"
    )


@pytest.mark.parametrize("name", ["monitor_events.txt", "monitor_events.jsonstream", "docs_2.30_block10.json"])
def test_a_directory_with_saved_monitor_output_is_diagnosed(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(sample(name))
    found = diagnose(load_evidence(tmp_path))
    assert found.culprits == ()
    assert "PEER_DEAD process" in found.why
