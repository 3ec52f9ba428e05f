"""The sandboxed process that parses flight records: bytes in, plain tables out. Standard library only, never torch.

    python -I -S -c WORKER_PROGRAM MEMORY_BYTES CPU_SECONDS     (started by `sandbox.py`)

A pickle is a program: PyTorch's own analyzer, and others, call `pickle.load`, so a dump planted in a directory that any
user may write to runs code as the person who analyzes it. PyTorch's dumps need 25 pickle instructions, none of which
can name or call anything. A file with any other instruction is rejected before it runs (`check_instructions`), and the
unpickler that runs the rest cannot look up any class.

Protocol. Request: REQUEST_HEADER (length of the data, longest allowed answer, launches to keep), then the data. Answer:
ANSWER_HEADER (length), then JSON: a table, or {"why", "incomplete"}.

Memory and CPU time are limited, and the process cannot open or write any file. A file that exceeds a limit kills this
process and nothing else.
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

REQUEST_HEADER: Final = struct.Struct("<QQQ")
ANSWER_HEADER: Final = struct.Struct("<Q")
BYTES_PER_CPU_SECOND: Final = 4 * 2**20  # half the rate at which real records are parsed on a slow machine
OPEN_FILES: Final = 3  # stdin, stdout and stderr: no other file can be opened

MAX_PROTOCOL: Final = 5
MAX_NUMBER_BYTES: Final = 9  # a LONG1 argument: 64 bits and a sign
# Instructions of a fixed length, skipped at the speed of C. ("X" and "\x8c" are strings with a length of their own.)
# "r" stores a value at a memo index. The unpickler allocates all memo entries before that index, so that a file of a
# few bytes could claim gigabytes: only indices below 2**22 pass.
FIXED_LENGTH_INSTRUCTIONS: Final = re.compile(
    rb"(?:[hqK].|[}\])(\x88\x89Nt\x85\x86\x87aesu\x94]|M..|[Jj].{4}|r..[\x00-\x3f]\x00|\x8a\x08.{8}|[G\x95].{8})*+",
    re.DOTALL,
)
ARGUMENT_BYTES: Final = {
    ord(c): n for chars, n in (("hqK", 1), ("M", 2), ("JrjX", 4), ("G\x95", 8), ("\x8c\x8a", 1)) for c in chars
}
# The instructions that name or call something, for the message.
CODE_INSTRUCTIONS: Final = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ", "\x81": "NEWOBJ",
    "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4", "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
PROTO, STOP, TEXT, SHORT_TEXT, LONG1 = 0x80, ord("."), ord("X"), 0x8C, 0x8A


class RejectedRecord(ValueError):
    """The file is not plain data. The message says what was found."""


class TruncatedRecord(ValueError):
    """The data ends before the pickle or the JSON document does."""


def check_instructions(data: bytes) -> None:
    """Make sure that every pickle instruction up to the first STOP only builds plain data.

    Raises RejectedRecord or TruncatedRecord.
    """
    if len(data) < 2:
        raise TruncatedRecord
    if data[0] != PROTO or data[1] > MAX_PROTOCOL:
        raise RejectedRecord(f"the file is not a pickle of protocol 2 to {MAX_PROTOCOL}")
    position, end = 2, len(data)
    while True:
        match = FIXED_LENGTH_INSTRUCTIONS.match(data, position)
        position = match.end() if match else position
        code = data[position] if position < end else None
        if code == STOP:
            return
        if code is None or (code in ARGUMENT_BYTES and position + 1 + ARGUMENT_BYTES[code] > end):
            raise TruncatedRecord
        if code == TEXT:
            position += 5 + int.from_bytes(data[position + 1 : position + 5], "little")
        elif code == SHORT_TEXT or (code == LONG1 and data[position + 1] <= MAX_NUMBER_BYTES):
            position += 2 + data[position + 1]
        else:
            raise RejectedRecord(_rejection_reason(code, position))
        if position > end:
            raise TruncatedRecord


def _rejection_reason(code: int, position: int) -> str:
    if code == ord("r"):
        return (
            f"byte {position:,} of the file stores a value at an index that no flight record needs: "
            "the file is damaged or hostile"
        )
    name = CODE_INSTRUCTIONS.get(chr(code))
    if name is None:
        return f"byte {position:,} of the file is the pickle instruction 0x{code:02x}, which no flight record contains"
    return (
        f"byte {position:,} of the file is the pickle instruction {name}, which runs code; "
        "flight records never contain this instruction"
    )


class _PlainDataUnpickler(pickle.Unpickler):
    """Second line of defense, should `check_instructions` ever miss an instruction: there is no class to find."""

    def find_class(self, module: str, name: str, /) -> NoReturn:
        raise RejectedRecord("the file refers to a class or function, which no valid flight record does")

    def persistent_load(self, pid: Any, /) -> NoReturn:
        raise RejectedRecord("the file refers to an external object, which no valid flight record does")


def load_plain_pickle(data: bytes) -> Any:
    """The plain data in a pickle. Raises RejectedRecord, TruncatedRecord, or MemoryError if it grows too large."""
    check_instructions(data)
    try:
        return _PlainDataUnpickler(io.BytesIO(data)).load()
    except (TruncatedRecord, RejectedRecord, MemoryError):
        raise
    except EOFError:
        raise TruncatedRecord from None
    except Exception:  # noqa: BLE001 - a damaged pickle can fail in any way: missing marks, wrong types, ...
        raise RejectedRecord("the pickle instructions of the file contradict each other: the file is damaged") from None


def decode_record(data: bytes) -> Any:
    """Pickle or JSON to plain data. Raises RejectedRecord, TruncatedRecord or MemoryError."""
    if data[:1] == b"\x80":
        return load_plain_pickle(data)
    document = data.rstrip()
    try:
        return json.loads(document)
    except RecursionError:
        raise RejectedRecord("the JSON is nested too deeply for a flight record") from None
    except ValueError as error:
        # A dump that was cut off fails at its very end, or has lost its closing brace.
        if not document.endswith(b"}") or getattr(error, "pos", 0) >= len(document):
            raise TruncatedRecord from None
        raise RejectedRecord("the file is not a pickle and not valid JSON: it is damaged") from None


def parse_record_bytes(data: bytes, max_launches: int) -> dict[str, Any]:
    """The table of a record, or {"why": sentence, "incomplete": bool}. Raises nothing for what is in the data."""
    try:
        return build_record_table(decode_record(data), max_launches)
    except TruncatedRecord:
        return {"why": f"the file is cut off after {len(data):,} bytes", "incomplete": True}
    except (RejectedRecord, MalformedRecord) as error:
        return {"why": str(error), "incomplete": False}
    except MemoryError:
        return {
            "why": "parsing the file takes more memory than any valid flight record needs: the file is damaged or "
            "hostile",
            "incomplete": False,
        }


def limit_resources(memory_bytes: int) -> None:
    """No core dump, no written byte, no further open file, and at most `memory_bytes` of address space."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, OPEN_FILES))


def limit_cpu_time(seconds: int) -> None:
    """Allow `seconds` from now on. The kernel counts from the start of the process, so the used time is added."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def serve_requests(requests: BinaryIO, answers: BinaryIO, cpu_seconds: int) -> None:
    """Answer requests until the parent closes the pipe."""
    while len(head := requests.read(REQUEST_HEADER.size)) == REQUEST_HEADER.size:
        size, max_answer_bytes, max_launches = REQUEST_HEADER.unpack(head)
        limit_cpu_time(cpu_seconds + size // BYTES_PER_CPU_SECOND)
        table = parse_record_bytes(requests.read(size), max_launches)
        if "why" in table:
            gc.collect()  # only a hostile file holds reference cycles; with the collector off they would never be freed
        answer = json.dumps(table, separators=(",", ":")).encode()
        if len(answer) > max_answer_bytes:
            why = f"the parsed content is larger than {max_answer_bytes:,} bytes"
            answer = json.dumps({"why": why, "incomplete": False}).encode()
        answers.write(ANSWER_HEADER.pack(len(answer)) + answer)
        answers.flush()


def main() -> None:
    """Entry point of WORKER_PROGRAM in `sandbox.py`."""
    # Real records hold no reference cycles, and scanning a million values for some takes longer than parsing them.
    gc.disable()
    limit_resources(int(sys.argv[1]))
    serve_requests(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]))
