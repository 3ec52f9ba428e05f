"""Each sample in tests/data/ras, and what is concluded from it."""

from __future__ import annotations

import pytest

from tests.watcher.diagnosis.nccl_ras.sample_reports import DATA, analyze_samples, sample
from wattwatch.watcher.diagnosis.nccl_ras.model import RasFinding
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_report

MONITOR_OUTPUT = "this is output of the monitor mode of RAS, not a status report"

# sample, finding, suspects, confidence, part of the explanation
ONE_REPORT: list[tuple[str, RasFinding, list[int], float, str]] = [
    (
        "async_error.json",
        RasFinding.FAILED,
        [5],
        0.85,
        "CUDA error (ncclResult 1); 15 ranks report a remote process error (ncclResult 6)",
    ),
    ("desync_crossed_counts_poll1.json", RasFinding.CROSSED, [3], 0.5, "1 more AllReduce and 1 fewer ReduceScatter"),
    (
        "desync_crossed_counts_poll2.json",
        RasFinding.CROSSED,
        [3],
        0.5,
        "two reports taken some seconds apart are needed",
    ),
    ("docs_2.30_block00.txt", RasFinding.NO_REPORT, [], 0.0, "this is an excerpt that contains no communicator"),
    ("docs_2.30_block01.txt", RasFinding.CANNOT_TELL, [], 0.0, "8 communicators of 4 ranks: RAS reports OK"),
    (
        "docs_2.30_block02.txt",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "its ranks have different launch counts, but the excerpt does not say for which operation",
    ),
    ("docs_2.30_block03.txt", RasFinding.CANNOT_TELL, [], 0.0, "6 of 32 ranks launched 1 fewer collective"),
    (
        "docs_2.30_block04.txt",
        RasFinding.LEAVING,
        [0, 8, 16, 24],
        0.25,
        "26 have left it, 4 still use it, 2 are finalizing it",
    ),
    ("docs_2.30_block05.txt", RasFinding.UNRESPONSIVE, [21], 0.7, "rank 21 (process 3487984 on 172.16.64.213, GPU 5)"),
    ("docs_2.30_block06.txt", RasFinding.DEAD, [21], 0.9, "rank 21 (process 3487984 on 172.16.64.213, GPU 5) dead"),
    ("docs_2.30_block07.json", RasFinding.UNRESPONSIVE, [1], 0.7, "rank 1 (process 1524345 on 172.16.64.245, GPU 1)"),
    ("docs_2.30_block08.txt", RasFinding.NO_REPORT, [], 0.0, MONITOR_OUTPUT),
    ("docs_2.30_block09.txt", RasFinding.NO_REPORT, [], 0.0, MONITOR_OUTPUT),
    ("docs_2.30_block10.json", RasFinding.NO_REPORT, [], 0.0, MONITOR_OUTPUT),
    (
        "healthy_poll1.json",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "all 16 ranks launched the same operations (11,550 AllGather,",
    ),
    (
        "healthy_poll2.json",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "all 16 ranks launched the same operations (11,574 AllGather,",
    ),
    ("init_in_progress.json", RasFinding.INITIALIZING, [], 0.6, "its 16 ranks are still initializing the communicator"),
    (
        "matched_but_frozen_poll1.json",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "two reports taken some seconds apart are needed",
    ),
    (
        "matched_but_frozen_poll2.json",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "two reports taken some seconds apart are needed",
    ),
    ("missing_ranks_malformed_nccl_2.28.9.json", RasFinding.UNRESPONSIVE, [13], 0.7, "rank 13 (process 40013 on"),
    ("monitor_events.jsonstream", RasFinding.NO_REPORT, [], 0.0, MONITOR_OUTPUT),
    ("monitor_events.txt", RasFinding.NO_REPORT, [], 0.0, MONITOR_OUTPUT),
    ("no_communicators.json", RasFinding.NO_COMMUNICATORS, [], 0.0, "RAS answers but reports no communicator"),
    ("process_stopped_unresponsive.json", RasFinding.UNRESPONSIVE, [13], 0.7, "stopped, starved of CPU time"),
    ("status_desync_crossed_counts.txt", RasFinding.CROSSED, [3], 0.5, "1 more AllReduce and 1 fewer ReduceScatter"),
    (
        "status_issue1730_ok_while_hung_2.26.2.txt",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "a communicator of 256 ranks: RAS reports",
    ),
    (
        "status_issue1911_small_group_ahead_2.26.2.txt",
        RasFinding.CANNOT_TELL,
        [],
        0.0,
        "30 of 32 ranks launched 1",
    ),
    ("status_ok.txt", RasFinding.CANNOT_TELL, [], 0.0, "for running jobs and for hung jobs"),
    ("status_stopped_process.txt", RasFinding.UNRESPONSIVE, [13], 0.7, "(process 40013 on 10.0.0.12, GPU 5) did not"),
]

TWO_REPORTS: list[tuple[str, str, RasFinding, list[int], float, str]] = [
    ("docs_2.30_block04.txt", "docs_2.30_block04.txt", RasFinding.LEAVING, [0, 8, 16, 24], 0.4, "26 have left it"),
    ("healthy_poll1.json", "healthy_poll2.json", RasFinding.PROGRESSING, [], 0.9, "launches continued"),
    (
        "desync_crossed_counts_poll1.json",
        "desync_crossed_counts_poll2.json",
        RasFinding.CROSSED,
        [3],
        0.75,
        "over 10 s",
    ),
    (
        "matched_but_frozen_poll1.json",
        "matched_but_frozen_poll2.json",
        RasFinding.MATCHED,
        [],
        0.6,
        "over 10 s, and all 16",
    ),
    ("healthy_poll2.json", "matched_but_frozen_poll1.json", RasFinding.PROGRESSING, [], 0.9, "launches continued"),
    ("init_in_progress.json", "init_in_progress.json", RasFinding.INITIALIZING, [], 0.6, "no change over 10 s"),
    ("init_in_progress.json", "healthy_poll1.json", RasFinding.PROGRESSING, [], 0.9, "launches continued"),
    (
        "process_stopped_unresponsive.json",
        "process_stopped_unresponsive.json",
        RasFinding.UNRESPONSIVE,
        [13],
        0.8,
        "the other ranks made no progress over 10 s",
    ),
    ("status_ok.txt", "status_ok.txt", RasFinding.CANNOT_TELL, [], 0.0, "gives no counters"),
    (
        "status_ok.txt",
        "status_desync_crossed_counts.txt",
        RasFinding.CROSSED,
        [3],
        0.5,
        "two reports taken some seconds apart are needed",
    ),
    (
        "status_desync_crossed_counts.txt",
        "status_desync_crossed_counts.txt",
        RasFinding.CROSSED,
        [3],
        0.75,
        "over 10 s",
    ),
    (
        "docs_2.30_block03.txt",
        "docs_2.30_block03.txt",
        RasFinding.BEHIND,
        [0, 2, 3, 4, 5, 7],
        0.6,
        "1 fewer collective than",
    ),
]


def test_every_sample_is_in_the_table() -> None:
    assert {row[0] for row in ONE_REPORT} == {path.name for path in DATA.iterdir()} - {
        "LICENCES.md",
        "wire_session_json.txt",
    }


@pytest.mark.parametrize(("name", "finding", "suspects", "confidence", "explanation"), ONE_REPORT)
def test_one_report(name: str, finding: RasFinding, suspects: list[int], confidence: float, explanation: str) -> None:
    analysis = analyze_samples(name)
    assert (analysis.finding, [suspect.rank for suspect in analysis.suspects]) == (finding, suspects)
    assert analysis.confidence == confidence
    assert explanation in analysis.why
    assert analysis.sources == (name,)


@pytest.mark.parametrize(("first", "second", "finding", "suspects", "confidence", "explanation"), TWO_REPORTS)
def test_two_reports(
    first: str, second: str, finding: RasFinding, suspects: list[int], confidence: float, explanation: str
) -> None:
    analysis = analyze_samples(first, second)
    assert (analysis.finding, [suspect.rank for suspect in analysis.suspects]) == (finding, suspects)
    assert analysis.confidence == confidence
    assert explanation in analysis.why


def test_a_suspect_has_its_location_and_its_rank_in_the_job() -> None:
    (suspect,) = analyze_samples("desync_crossed_counts_poll1.json", "desync_crossed_counts_poll2.json").suspects
    assert (suspect.host, suspect.pid, suspect.gpu, suspect.job_rank) == ("10.0.0.11", 40003, 3, 3)
    (suspect,) = analyze_samples("status_stopped_process.txt").suspects  # this text says that the job has 16 GPUs
    assert (suspect.host, suspect.pid, suspect.gpu, suspect.job_rank) == ("10.0.0.12", 40013, 5, 13)
    (suspect,) = analyze_samples("docs_2.30_block06.txt").suspects  # an excerpt does not
    assert (suspect.host, suspect.pid, suspect.gpu, suspect.job_rank) == ("172.16.64.213", 3487984, 5, None)


def test_the_comma_that_nccl_omits_is_added_and_noted() -> None:
    report = parse_report(sample("missing_ranks_malformed_nccl_2.28.9.json"))
    assert report.repaired
    assert report.problem is None
    assert len(report.communicators[0].ranks) == 16
    assert any(
        "omitted commas in its JSON; wattwatch added them" in note
        for note in analyze_samples("missing_ranks_malformed_nccl_2.28.9.json").notes
    )


def test_the_group_that_ras_names_is_not_blamed_if_it_is_the_one_ahead() -> None:
    name = "status_issue1911_small_group_ahead_2.26.2.txt"
    analysis = analyze_samples(name, name)
    assert analysis.finding is RasFinding.BEHIND
    assert analysis.suspects == ()
    assert [suspect.rank for suspect in analysis.tied[0]] == [12, 13]
    assert analysis.confidence <= 0.3
    assert "are ahead, and the other 30 of 32 ranks launched 1 fewer AllGather" in analysis.why


def test_numbers_in_the_text_format() -> None:
    report = parse_report(sample("docs_2.30_block04.txt"))
    assert [(entry.size, entry.state, entry.identical_count) for entry in report.communicators] == [
        (32, "FINALIZE", 1),
        (4, "RUNNING", 7),
        (4, "INIT", 1),
    ]
    report = parse_report(sample("status_stopped_process.txt"))
    assert (report.nccl_version, report.collected_seconds, report.timeouts, report.job_gpus) == ("2.30.3", 2.05, 2, 16)
    assert parse_report(sample("docs_2.30_block00.txt")).job_gpus == 32
