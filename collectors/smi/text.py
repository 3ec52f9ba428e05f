"""Bytes of any tool, shell or logger -> lines."""

from __future__ import annotations

import re
from typing import Final

_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[()][0-9A-B]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_BOMS: Final = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8"))


def read_lines(data: bytes) -> tuple[list[str], bool]:
    """The lines, and whether the last one was cut off (no line end). Bytes that are no text become U+FFFD.

    Understands UTF-8 and UTF-16 (PowerShell redirects with and without a byte-order mark), CRLF, terminal colours. A
    logger that was killed leaves NUL padding: it ends a line.
    """
    text = _decode(data)
    text = _ESCAPES.sub("", text) if "\x1b" in text else text
    text = text.replace("\ufeff", "").replace("\r\n", "\n").replace("\r", "\n")
    filled = text.rstrip("\0")
    cut = bool(filled) and not filled.endswith("\n")
    if "\0" in filled:
        filled = re.sub("\0+", "\n", filled)
    lines = filled.split("\n")
    return (lines if cut else lines[:-1]), cut


def _decode(data: bytes) -> str:
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return _whole(data[len(bom) :], encoding).decode(encoding, "replace")
    head = data[:4000]
    # ASCII in UTF-16 has a NUL in every other byte; padding has them side by side.
    odd, even = head[1::2].count(0), head[::2].count(0)
    if len(head) >= 8 and odd * 10 > len(head) * 4 and even * 10 < odd:
        return _whole(data, "utf-16-le").decode("utf-16-le", "replace")
    if len(head) >= 8 and even * 10 > len(head) * 4 and odd * 10 < even:
        return _whole(data, "utf-16-be").decode("utf-16-be", "replace")
    return data.decode("utf-8", "replace")


def _whole(data: bytes, encoding: str) -> bytes:
    """Without the half of a character that a cut left at the end of UTF-16."""
    return data[: len(data) // 2 * 2] if encoding.startswith("utf-16") else data
