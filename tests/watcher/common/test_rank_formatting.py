"""Texts about one rank and about a thousand."""

from __future__ import annotations

from wattwatch.watcher.common.formatting import (
    agree_with_count,
    capitalize_first,
    format_count,
    format_ranks,
    group_by_rank,
)


def test_a_verb_agrees_with_the_number_of_ranks() -> None:
    assert agree_with_count("has not launched it and waits in nothing", 1) == "has not launched it and waits in nothing"
    assert agree_with_count("has not launched it and waits in nothing", 2) == "have not launched it and wait in nothing"
    assert agree_with_count("has not launched it and is in no other", 2) == "have not launched it and are in no other"
    assert agree_with_count("has not launched it and has nothing", 2) == "have not launched it and have nothing"
    assert agree_with_count("is still in barrier", 3) == "are still in barrier"
    assert agree_with_count("left no flight record", 3) == "left no flight record"


def test_a_sentence_begins_with_a_capital_and_keeps_its_names() -> None:
    assert capitalize_first("rank 3 is in NCCL") == "Rank 3 is in NCCL"
    assert capitalize_first("") == ""


def test_the_same_message_of_many_ranks_is_one_line() -> None:
    lines = [
        "rank 0: no worker socket",
        "node-02: no answer",
        *(f"rank {rank}: no worker socket" for rank in range(1, 1024)),
        "rank 7: no log",
        "rank 9 is odd",
    ]
    assert group_by_rank(lines) == [
        "1,024 ranks (0-1023): no worker socket",
        "node-02: no answer",
        "rank 7: no log",
        "rank 9 is odd",
    ]


def test_messages_of_a_capture_are_one_line_for_all_ranks_or_nodes() -> None:
    lacks = "no worker socket in /run/worker: its process {} is alive (state R)"
    lines = [f"node-{node}: NCCL RAS: not allowed to connect" for node in range(4)]
    lines += [f"node-{rank // 2}: rank {rank}: {lacks.format(41_000 + rank)}" for rank in range(8)]
    lines += [f"node-1: rank 9: {lacks.format(7)}".replace("R)", "T)")]
    assert group_by_rank(lines) == [
        "4 nodes (node-0, node-1, node-2 and 1 more): NCCL RAS: not allowed to connect",
        "8 ranks (0-7): no worker socket in /run/worker: its process is alive (state R)",
        "node-1: rank 9: no worker socket in /run/worker: its process 7 is alive (state T)",
    ]


def test_numbers_have_separators_and_ranks_are_names() -> None:
    assert format_count(12_345, "rank") == "12,345 ranks"
    assert format_ranks([1023, 1024]) == "ranks 1023-1024"
    assert format_ranks(range(0, 10_000, 2)).endswith("and 4,992 more")
