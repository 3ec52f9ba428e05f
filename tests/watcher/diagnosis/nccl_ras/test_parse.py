"""Anything may come from the port: what is kept of broken reports, and that nothing raises."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.watcher.diagnosis.nccl_ras.sample_reports import DATA, Communicator, report, sample
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls, parse_report

NAMES = sorted(path.name for path in DATA.iterdir())
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def test_carriage_returns_and_replies_before_the_report_do_not_matter() -> None:
    for name in ("status_stopped_process.txt", "async_error.json"):
        data = sample(name)
        session = b"SERVER PROTOCOL 2\nOK\nERROR: Unknown command SET FORMAT json\n" + data
        assert parse_report(data.replace(b"\n", b"\r\n"), "x") == parse_report(session, "x") == parse_report(data, "x")


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the report is empty"),
        (b" \r\n\0", "the report is empty"),
        (b"\xff\xfe\x00garbage\x80", "this is not a RAS report in JSON or text format"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "this is not a RAS report in JSON or text format"),
        (b"{]", "the report is not valid JSON: "),
        (b"{}", 'the JSON has no "communicators": this is not a status report of RAS'),
        (b'{"communicators": 3}', 'the value of "communicators" is a number, not a list'),
        (
            b'{"communicators": [], "communicators_count": 2}',
            "the report lists 0 of the 2 communicators that",
        ),
        (b"{" * 100_000 + b"}" * 100_000, "the report is not valid JSON: "),
    ],
)
def test_the_problem_is_reported(data: bytes, problem: str) -> None:
    found = parse_report(data)
    assert found.communicators == ()
    assert found.problem is not None
    assert found.problem.startswith(problem)


def test_json_that_ends_early_is_parsed_up_to_there() -> None:
    data = report(Communicator(range(8)), Communicator(range(16)))
    found = parse_report(data[: len(data) * 2 // 3])
    assert found.problem is not None
    assert "is cut off at byte" in found.problem
    first, second = found.communicators
    assert (len(first.ranks), second.size) == (8, 16)
    assert 0 < len(second.ranks) < 16


def test_text_that_ends_early_is_parsed_up_to_there() -> None:
    data = sample("status_stopped_process.txt")
    found = parse_report(data[: data.index(b"Warnings")])
    assert found.problem == "the text is cut off; the part before that was used"
    assert [rank.rank for rank in found.communicators[0].ranks] == [13]


def test_fields_of_wrong_types_and_unknown_fields_are_ignored() -> None:
    document = json.loads(sample("healthy_poll1.json"))
    ranks = document["communicators"][0]["ranks"]
    ranks[0]["pid"], ranks[1]["host"], ranks[2]["nvml_dev"] = "7", None, -1
    ranks[3]["collective_counts"] = ["AllReduce"]
    ranks[4]["status"] = 5
    ranks[5]["rank"] = "five"
    ranks[6]["collective_counts"]["AllToAll"] = 12
    document["communicators"].append("what?")
    document["future"] = {"a": 1}
    found = parse_report(json.dumps(document).encode())
    read = {rank.rank: rank for rank in found.communicators[0].ranks}
    assert (read[0].pid, read[1].host, read[2].gpu, read[3].counts) == (None, None, None, None)
    assert read[4].async_error == 0
    assert 5 not in read
    assert read[6].counts is not None
    assert read[6].counts["AllToAll"] == 12
    assert found.remarks[0] == "communicator 1 is a string, not an object, and was ignored"


def test_communicators_with_the_same_hashes_stay_apart() -> None:
    document = json.loads(report(Communicator(range(8))))
    document["communicators"] *= 2
    document["communicators_count"] = 2
    first, second = parse_report(json.dumps(document).encode()).communicators
    assert first.identity != second.identity


def test_errors_in_the_text_format() -> None:
    text = """Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2         8        16        16   RUNNING  ERROR

Errors
======

#0-0 (5bd1e9955bd1e995) ERROR
  Asynchronous errors on 16 ranks
  15 ranks reported Remote process error
  Rank 5 reported Unhandled CUDA error -- GPU 5 (NVML 7) managed by process 40005 on node fe80::1

Warnings
========
"""
    (communicator,) = parse_report(text.encode()).communicators
    (rank,) = communicator.ranks
    assert (rank.rank, rank.async_error, rank.gpu, rank.pid, rank.host) == (5, 1, 7, 40005, "fe80::1")


def test_a_rank_without_process_information_is_still_named() -> None:
    text = (
        "#0-0 (5bd1e9955bd1e995) MISMATCH\n  Communicator ranks have different AllReduce operation counts\n"
        "  7 ranks have launched up to operation 4\n"
        "  Rank 2 has not launched any operations -- [process information not found]\n"
    )
    (communicator,) = parse_report(text.encode()).communicators
    (rank,) = communicator.ranks
    assert (rank.rank, rank.pid, rank.counts, communicator.size) == (2, None, {"AllReduce": 0}, 8)


def mutated(data: bytes, seed: int) -> bytes:
    """Bytes or lines removed, duplicated, swapped, or replaced by input that is hard to parse."""
    choose = random.Random(seed)
    for _ in range(choose.randint(1, 6)):
        lines = data.split(b"\n")
        at, other = choose.randrange(len(lines)), choose.randrange(len(lines))
        lines[at], lines[other] = lines[other], lines[at]
        if choose.random() < 0.5:
            lines[at] = choose.choice([b"", b"}", b"{", b'"', b"9" * 5000, b"-1", b"null", b"\xff", lines[other] * 2])
        data = b"\n".join(lines)
        start = choose.randrange(len(data) + 1)
        data = (
            data[:start]
            + choose.choice([b"", b"9" * 30, b"#0-0 (a) ", b"\0", b"]"])
            + data[start + choose.randint(0, 9) :]
        )
    return data[: choose.randrange(len(data) + 1)] if choose.random() < 0.3 else data


@given(st.sampled_from(NAMES), st.integers(0, 2**32))
def test_no_mutation_of_a_sample_raises(name: str, seed: int) -> None:
    data = mutated(sample(name), seed)
    analyze_ras([parse_polls("node-01", [("first", sample(name)), ("second", data)], 10.0)])


@given(st.sampled_from([name for name in NAMES if name.endswith(".json")]), st.data())
def test_no_value_in_any_field_raises(name: str, data: st.DataObject) -> None:
    if "malformed" in name:
        return
    document = json.loads(sample(name))
    value = document
    while isinstance(value, dict | list) and value:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        key = data.draw(st.sampled_from(list(keys)))
        if not isinstance(value[key], dict | list) or not value[key] or data.draw(st.integers(0, 3)) == 0:
            value[key] = data.draw(ANYTHING)
            break
        value = value[key]
    raw = json.dumps(document).encode()
    analyze_ras([parse_polls("node-01", [("first", sample(name)), ("second", raw)], 10.0)])


@given(st.binary(max_size=400))
def test_no_bytes_raise(data: bytes) -> None:
    parse_report(data)
