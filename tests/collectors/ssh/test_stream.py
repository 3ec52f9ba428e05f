"""Bytes become lines in bounded memory, however they are chunked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from wattwatch.collectors.ssh.stream import MAX_LINE_BYTES, LineSplitter


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=40))
def test_lines_are_the_same_however_the_bytes_are_cut(data: bytes, sizes: list[int]) -> None:
    whole, pieces = LineSplitter(), LineSplitter()
    expected = whole.feed(data)
    found: list[bytes] = []
    for size in sizes:
        found += pieces.feed(data[:size])
        data = data[size:]
    found += pieces.feed(data)
    assert found == expected


def test_a_line_of_ten_megabytes_is_skipped_and_the_next_one_is_read() -> None:
    splitter = LineSplitter()
    block = b"x" * 32_768
    for _ in range(320):
        assert splitter.feed(block) == []
    assert splitter.feed(b"end\nnext\n") == [b"next"]
    assert splitter.skipped_bytes == 320 * len(block) + 4


def test_a_line_just_over_the_limit_is_skipped_even_if_it_arrives_at_once() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b"y" * (MAX_LINE_BYTES + 1) + b"\nok\n") == [b"ok"]
    assert splitter.feed(b"y" * MAX_LINE_BYTES + b"\n") == [b"y" * MAX_LINE_BYTES]


def test_an_incomplete_line_is_counted_and_dropped() -> None:
    splitter = LineSplitter()
    assert splitter.feed(b'{"v":1,"seq"') == []
    splitter.cut()
    assert splitter.skipped_bytes == 12
