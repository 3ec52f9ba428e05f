"""Pickles that nobody vouches for: only those of plain data are loaded. Standard library only: the child loads it.

A pickle is a program. torch's dumps need 25 of its instructions, none of which can name or call anything; one with any
other is refused before it runs, and the machine that runs it can find no class. (torch's own analyzer, and others, call
`pickle.load`: a dump planted where any user may write runs as whoever reads it.)
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any, Final, NoReturn

MOST_PROTOCOL: Final = 5
LONGEST_NUMBER: Final = 9  # bytes; 64 bits and a sign
# A place in the memo ("r") lies below 2**22: the machine makes room for all places before it, for a file of few bytes.
# Instructions of a fixed length, eaten at the speed of C. ("X" and "\x8c" are text: its length says where it ends.)
FIXED: Final = re.compile(
    rb"(?:[hqK].|[}\])(\x88\x89Nt\x85\x86\x87aesu\x94]|M..|[Jj].{4}|r..[\x00-\x3f]\x00|\x8a\x08.{8}|[G\x95].{8})*+",
    re.DOTALL,
)
NEEDS: Final = {
    ord(c): n for chars, n in (("hqK", 1), ("M", 2), ("JrjX", 4), ("G\x95", 8), ("\x8c\x8a", 1)) for c in chars
}
NAMED: Final = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ", "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
PROTO, STOP, TEXT, SHORT_TEXT, LONG1 = 0x80, ord("."), ord("X"), 0x8C, 0x8A


class Refused(ValueError):
    """A whole sentence: what was found."""


class CutOff(ValueError):
    """The pickle ends before its end."""


def scan(data: bytes) -> None:
    """Raises `Refused` or `CutOff`; then every instruction up to the first STOP is one of plain data."""
    if len(data) < 2:
        raise CutOff
    if data[0] != PROTO or data[1] > MOST_PROTOCOL:
        raise Refused(f"it is no pickle of protocol 2 to {MOST_PROTOCOL}")
    at, end = 2, len(data)
    while True:
        match = FIXED.match(data, at)
        at = match.end() if match else at
        code = data[at] if at < end else None
        if code == STOP:
            return
        if code is None or (code in NEEDS and at + 1 + NEEDS[code] > end):
            raise CutOff
        if code == TEXT:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif code == SHORT_TEXT or (code == LONG1 and data[at + 1] <= LONGEST_NUMBER):
            at += 2 + data[at + 1]
        else:
            raise Refused(_refusal(code, at))
        if at > end:
            raise CutOff


def _refusal(code: int, at: int) -> str:
    if code == ord("r"):
        return f"its byte {at:,} puts a value farther away than a flight record has values: it is damaged or hostile"
    name = NAMED.get(chr(code))
    if name is None:
        return f"its byte {at:,} is the pickle instruction 0x{code:02x}, which no flight record has"
    return f"its byte {at:,} is the pickle instruction {name}, which runs code: no flight record has it"


class _PlainData(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise Refused("it names a class or function: no flight record does")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise Refused("it refers to something outside: no flight record does")


def load(data: bytes) -> Any:
    """Plain data. Raises `Refused` or `CutOff`, and `MemoryError` for what grows too large."""
    scan(data)
    try:
        return _PlainData(io.BytesIO(data)).load()
    except (CutOff, Refused, MemoryError):
        raise
    except EOFError:
        raise CutOff from None
    except Exception:  # noqa: BLE001 - the instructions of a damaged one fail in any way: missing marks, wrong types
        raise Refused("its pickle instructions do not fit together: it is damaged") from None
