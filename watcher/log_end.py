"""The end of a long GPU log, with what it takes to read it: for who asks only how things stand now.

A day of eight boards is 60 MB, and its last round a kilobyte. The beginning stays too: a board that was there then and
is not at the end was lost in between.
"""

from __future__ import annotations

from typing import Final

from collectors.smi.columns import read_header
from collectors.smi.query_csv import split_cells

BEGINNING_BYTES: Final = 64 << 10
END_BYTES: Final = 1 << 20
# JSON and XML are read whole or not at all; UTF-16 is full of NUL.
WHOLE: Final = (b"{", b"[", b"<")
# One of these stands in each header, and in no row below it.
HEADER_WORDS: Final = (b"utilization", b"power", b"memory", b"temperature", b"index", b"uuid", b"# gpu", b"#gpu")
MOST_LOOKS: Final = 50


def end_of_log(data: bytes) -> bytes:
    """The first rounds, the header that holds at the end, and the last rounds; all of it where that may not do."""
    if len(data) <= 2 * (BEGINNING_BYTES + END_BYTES) or data[:4000].lstrip()[:1] in WHOLE or b"\0" in data[:4000]:
        return data
    if b"<nvidia_smi_log" in data[:BEGINNING_BYTES]:
        return data
    first = data.rfind(b"\n", 0, BEGINNING_BYTES) + 1
    last = data.find(b"\n", len(data) - END_BYTES) + 1
    if not first or not last:
        return data  # no lines: whoever reads it shall say so
    header = _header_before(data, first, last)
    return data if header is None else data[:first] + header + data[last:]


def _header_before(data: bytes, first: int, last: int) -> bytes | None:
    """The last header in between, with its line end; empty where there is none, None where that cannot be told."""
    end = last
    for _ in range(MOST_LOOKS):
        place = max(data.rfind(word, first, end) for word in HEADER_WORDS)
        if place < 0:
            return b""
        start = data.rfind(b"\n", 0, place) + 1
        line = data[start : data.find(b"\n", place) + 1]
        if line.startswith(b"#") or read_header(split_cells(line.decode("utf-8", "replace"))) is not None:
            return line
        end = start
        if end <= first:
            return b""
    return None
