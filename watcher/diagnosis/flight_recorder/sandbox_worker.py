"""Pickles that nobody vouches for: only those of plain data are loaded. Standard library only: the child loads it.

A pickle is a program. torch's dumps need 25 of its instructions, none of which can name or call anything; one with any
other is refused before it runs, and the machine that runs it can find no class. (torch's own analyzer, and others, call
`pickle.load`: a dump planted where any user may write runs as whoever reads it.)
"""

from __future__ import annotations

import gc
import io
import json
import pickle
import re
import resource
import struct
import sys
from typing import Any, BinaryIO, Final, NoReturn

from wattwatch.watcher.diagnosis.flight_recorder.schema import MalformedRecord, build_record_table

MAX_PROTOCOL: Final = 5
MAX_NUMBER_BYTES: Final = 9  # bytes; 64 bits and a sign
# A place in the memo ("r") lies below 2**22: the machine makes room for all places before it, for a file of few bytes.
# Instructions of a fixed length, eaten at the speed of C. ("X" and "\x8c" are text: its length says where it ends.)
FIXED_LENGTH_INSTRUCTIONS: Final = re.compile(
    rb"(?:[hqK].|[}\])(\x88\x89Nt\x85\x86\x87aesu\x94]|M..|[Jj].{4}|r..[\x00-\x3f]\x00|\x8a\x08.{8}|[G\x95].{8})*+",
    re.DOTALL,
)
ARGUMENT_BYTES: Final = {
    ord(c): n for chars, n in (("hqK", 1), ("M", 2), ("JrjX", 4), ("G\x95", 8), ("\x8c\x8a", 1)) for c in chars
}
CODE_INSTRUCTIONS: Final = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ", "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
PROTO, STOP, TEXT, SHORT_TEXT, LONG1 = 0x80, ord("."), ord("X"), 0x8C, 0x8A


class RefusedRecord(ValueError):
    """A whole sentence: what was found."""


class TruncatedRecord(ValueError):
    """The pickle ends before its end."""


def check_instructions(data: bytes) -> None:
    """Raises `Refused` or `CutOff`; then every instruction up to the first STOP is one of plain data."""
    if len(data) < 2:
        raise TruncatedRecord
    if data[0] != PROTO or data[1] > MAX_PROTOCOL:
        raise RefusedRecord(f"it is no pickle of protocol 2 to {MAX_PROTOCOL}")
    at, end = 2, len(data)
    while True:
        match = FIXED_LENGTH_INSTRUCTIONS.match(data, at)
        at = match.end() if match else at
        code = data[at] if at < end else None
        if code == STOP:
            return
        if code is None or (code in ARGUMENT_BYTES and at + 1 + ARGUMENT_BYTES[code] > end):
            raise TruncatedRecord
        if code == TEXT:
            at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
        elif code == SHORT_TEXT or (code == LONG1 and data[at + 1] <= MAX_NUMBER_BYTES):
            at += 2 + data[at + 1]
        else:
            raise RefusedRecord(_refusal_reason(code, at))
        if at > end:
            raise TruncatedRecord


def _refusal_reason(code: int, at: int) -> str:
    if code == ord("r"):
        return f"its byte {at:,} puts a value farther away than a flight record has values: it is damaged or hostile"
    name = CODE_INSTRUCTIONS.get(chr(code))
    if name is None:
        return f"its byte {at:,} is the pickle instruction 0x{code:02x}, which no flight record has"
    return f"its byte {at:,} is the pickle instruction {name}, which runs code: no flight record has it"


class _PlainDataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise RefusedRecord("it names a class or function: no flight record does")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise RefusedRecord("it refers to something outside: no flight record does")


def load_plain_pickle(data: bytes) -> Any:
    """Plain data. Raises `Refused` or `CutOff`, and `MemoryError` for what grows too large."""
    check_instructions(data)
    try:
        return _PlainDataUnpickler(io.BytesIO(data)).load()
    except (TruncatedRecord, RefusedRecord, MemoryError):
        raise
    except EOFError:
        raise TruncatedRecord from None
    except Exception:  # noqa: BLE001 - the instructions of a damaged one fail in any way: missing marks, wrong types
        raise RefusedRecord("its pickle instructions do not fit together: it is damaged") from None


# The process that reads flight records: files come in, tables go out. Standard library only, and never torch.
#
#     python -I -S -c "..." MEMORY_BYTES SECONDS     (apart.py starts it)
#
# One request: lengths of the data and of the longest answer, launches to keep, then the data. One answer: its length,
# then JSON, either a table or {"why", "incomplete"}. It may use so much memory, so much time a file, and open or write
# nothing. A file that breaks these limits ends this process, and no other.

REQUEST_HEADER: Final = struct.Struct("<QQQ")
ANSWER_HEADER: Final = struct.Struct("<Q")
BYTES_PER_CPU_SECOND: Final = 4 * 2**20  # real records are read twice as fast, on a slow machine
OPEN_FILES: Final = 3  # stdin, stdout, stderr: no other can be opened


def limit_resources(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def limit_cpu_time(seconds: int) -> None:
    """From now on. The kernel counts all that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def decode_record(data: bytes) -> Any:
    """Raises `Refused`, `CutOff`, `MemoryError`."""
    if data[:1] == b"\x80":
        return load_plain_pickle(data)
    whole = data.rstrip()
    try:
        return json.loads(whole)
    except RecursionError:
        raise RefusedRecord("its JSON is nested too deeply for a flight record") from None
    except ValueError as error:
        if not whole.endswith(b"}") or getattr(error, "pos", 0) >= len(whole):
            raise TruncatedRecord from None
        raise RefusedRecord("it is neither a pickle nor JSON that can be read: it is damaged") from None


def parse_record_bytes(data: bytes, keep: int) -> dict[str, Any]:
    try:
        return build_record_table(decode_record(data), keep)
    except TruncatedRecord:
        return {"why": f"it is cut off after {len(data):,} bytes", "incomplete": True}
    except (RefusedRecord, MalformedRecord) as error:
        return {"why": str(error), "incomplete": False}
    except MemoryError:
        return {"why": "it needs more memory than a flight record may: it is damaged or hostile", "incomplete": False}


def serve_requests(requests: BinaryIO, answers: BinaryIO, seconds: int) -> None:
    while len(head := requests.read(REQUEST_HEADER.size)) == REQUEST_HEADER.size:
        size, longest, keep = REQUEST_HEADER.unpack(head)
        limit_cpu_time(seconds + size // BYTES_PER_CPU_SECOND)
        table = parse_record_bytes(requests.read(size), keep)
        if "why" in table:
            gc.collect()  # what refers to itself stays otherwise
        reply = json.dumps(table, separators=(",", ":")).encode()
        if len(reply) > longest:
            reply = json.dumps({"why": f"it says more than {longest:,} bytes can hold", "incomplete": False}).encode()
        answers.write(ANSWER_HEADER.pack(len(reply)) + reply)
        answers.flush()


def main() -> None:
    gc.disable()  # records hold no cycles, and looking for some in a million values takes longer than reading them
    limit_resources(int(sys.argv[1]))
    serve_requests(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]))
