"""The output of a node is parsed into frames, however it is cut and whatever is in it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from wattwatch.watcher.diagnosis.capture.files import AgentFrame, AgentFrameReader

STREAM = b'{"hello": 1, "bytes": 0}\n{"file": "stacks", "rank": 3, "bytes": 5}\na\n{b\n{"end": 1, "bytes": 0}\n'


def read(stream: bytes, cuts: list[int], max_frame_bytes: int = 1000) -> tuple[list[AgentFrame], AgentFrameReader]:
    reader = AgentFrameReader(max_frame_bytes)
    at = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    frames = [frame for a, b in pairwise(at) for frame in reader.feed(stream[a:b])]
    return frames, reader


@given(st.lists(st.integers(0, len(STREAM))))
def test_frames_do_not_depend_on_how_they_arrive(cuts: list[int]) -> None:
    frames, reader = read(STREAM, cuts)
    assert [frame.data for frame in frames] == [b"", b"a\n{b\n"]
    assert reader.complete


def test_a_greeting_before_the_first_frame_is_skipped() -> None:
    frames, reader = read(b"Welcome to gpu-01!\n{motd}\n" + STREAM, [])
    assert len(frames) == 2
    assert reader.complete


def test_a_cut_off_frame_is_counted_and_not_complete() -> None:
    frames, reader = read(STREAM[:-30], [])
    assert len(frames) == 1
    assert not reader.complete
    assert reader.cut_off_bytes > 0


def test_garbage_between_frames_ends_the_reading() -> None:
    frames, reader = read(STREAM[:25] + b"Segmentation fault\n" + STREAM[25:], [])
    assert len(frames) == 1
    assert reader.garbage == b"Segmentation fault"
    assert not reader.complete


def test_a_frame_larger_than_allowed_is_not_waited_for() -> None:
    frames, reader = read(b'{"hello": 1, "bytes": 0}\n{"file": "stacks", "bytes": 1000000000000}\nx', [])
    assert len(frames) == 1
    assert not reader.complete
    assert reader.cut_off_bytes == 0


@given(st.binary(max_size=300), st.lists(st.integers(0, 300)))
def test_no_bytes_raise(stream: bytes, cuts: list[int]) -> None:
    read(stream, cuts)
