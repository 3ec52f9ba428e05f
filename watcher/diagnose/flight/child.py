"""The process that reads flight records: files come in, tables go out. Standard library only, and never torch.

    python -I -S -c "..." MEMORY_BYTES SECONDS     (apart.py starts it)

One request: lengths of the data and of the longest answer, launches to keep, then the data. One answer: its length,
then JSON, either a table or {"why", "incomplete"}. It may use so much memory, so much time a file, and open or write
nothing. A file that breaks these limits ends this process, and no other.
"""

from __future__ import annotations

import gc
import json
import resource
import struct
import sys
from typing import Any, BinaryIO, Final

from watcher.diagnose.flight.formats import table_of
from watcher.diagnose.flight.pickled import CutOff, Refused, load
from watcher.diagnose.flight.shapes import Malformed

REQUEST: Final = struct.Struct("<QQQ")
ANSWER: Final = struct.Struct("<Q")
BYTES_A_SECOND: Final = 4 * 2**20  # real records are read twice as fast, on a slow machine
FILES: Final = 3  # stdin, stdout, stderr: no other can be opened


def limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


def limit_time(seconds: int) -> None:
    """From now on. The kernel counts all that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1 + seconds, hard))


def decode(data: bytes) -> Any:
    """Raises `Refused`, `CutOff`, `MemoryError`."""
    if data[:1] == b"\x80":
        return load(data)
    whole = data.rstrip()
    try:
        return json.loads(whole)
    except RecursionError:
        raise Refused("its JSON is nested too deeply for a flight record") from None
    except ValueError as error:
        if not whole.endswith(b"}") or getattr(error, "pos", 0) >= len(whole):
            raise CutOff from None
        raise Refused("it is neither a pickle nor JSON that can be read: it is damaged") from None


def answer(data: bytes, keep: int) -> dict[str, Any]:
    try:
        return table_of(decode(data), keep)
    except CutOff:
        return {"why": f"it is cut off after {len(data):,} bytes", "incomplete": True}
    except (Refused, Malformed) as error:
        return {"why": str(error), "incomplete": False}
    except MemoryError:
        return {"why": "it needs more memory than a flight record may: it is damaged or hostile", "incomplete": False}


def serve(requests: BinaryIO, answers: BinaryIO, seconds: int) -> None:
    while len(head := requests.read(REQUEST.size)) == REQUEST.size:
        size, longest, keep = REQUEST.unpack(head)
        limit_time(seconds + size // BYTES_A_SECOND)
        table = answer(requests.read(size), keep)
        if "why" in table:
            gc.collect()  # what refers to itself stays otherwise
        reply = json.dumps(table, separators=(",", ":")).encode()
        if len(reply) > longest:
            reply = json.dumps({"why": f"it says more than {longest:,} bytes can hold", "incomplete": False}).encode()
        answers.write(ANSWER.pack(len(reply)) + reply)
        answers.flush()


def main() -> None:
    gc.disable()  # records hold no cycles, and looking for some in a million values takes longer than reading them
    limit(int(sys.argv[1]))
    serve(sys.stdin.buffer, sys.stdout.buffer, int(sys.argv[2]))
