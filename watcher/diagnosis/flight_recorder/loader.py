"""Which files are flight records, and of which rank. Opens nothing that could block."""

from __future__ import annotations

import os
import pickletools
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from wattwatch.watcher.diagnosis.flight_recorder.model import (
    GroupRecord,
    LaunchFrame,
    Operation,
    OperationLaunch,
    ProcessGroup,
    RankRecord,
    UnreadableRecord,
)
from wattwatch.watcher.diagnosis.flight_recorder.sandbox import SandboxedReader
from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import CODE_INSTRUCTIONS as NAMING_INSTRUCTIONS

MAX_FILE_BYTES: Final = 64 * 2**20
MAX_FILES: Final = 100_000  # of a directory: somebody named the wrong one
MAX_RANK: Final = 1_000_000  # a larger number in a name is a date or a process
FILE_ENDINGS: Final = (".json", ".pickle", ".pkl", ".bin", ".recorder")
# Ours, and those of torch: _dump_9, nccl_trace_rank_3, comm_lib_trace_rank_3, fr_trace_json_1.json.
RECORD_NAME: Final = re.compile(r"(dump|trace|recorder|flight)", re.IGNORECASE)
OTHER_FILE_NAME: Final = re.compile(
    r"(traceback|stacks?\b|\.(log|txt|html?|py|md|pipe|toml|ya?ml|csv|gz|tmp|part)$)", re.I
)
JSON_FIELDS: Final = (
    b'"pg_config"',
    b'"pg_status"',
    b'"nccl_comm_state"',
    b'"comm_lib_version"',
    b'"collective_seq_id"',
)
HEAD_BYTES: Final = 4096
GLOBAL_ARGUMENT: Final = re.compile(r"[\w.]+ [\w.]+")  # "posix system"


class UnusableRecordError(Exception):
    """Why a file is no record that can be read, in words. `incomplete`: asking the rank again may help."""

    def __init__(self, why: str, incomplete: bool = False) -> None:
        super().__init__(why)
        self.why, self.incomplete = why, incomplete


@dataclass(frozen=True, slots=True)
class RecordCandidate:
    """`named`: somebody said, or its name says, that it is a record; else only its bytes can tell."""

    path: Path
    rank: int | None
    named: bool


def rank_from_file_name(name: str) -> int | None:
    """ "trace-node-01_rank_3.json" -> 3. The number after "rank", else the last one; None where there is none."""
    while name.endswith(FILE_ENDINGS):
        name = name[: name.rindex(".")]
    numbers = re.findall(r"rank[-_.]?(\d+)", name, re.IGNORECASE) or re.findall(r"\d+", name)
    if not numbers or len(numbers[-1]) > 9 or int(numbers[-1]) > MAX_RANK:
        return None
    return int(numbers[-1])


def is_record_name(name: str) -> bool:
    return rank_from_file_name(name) is not None and bool(RECORD_NAME.search(name)) and not OTHER_FILE_NAME.search(name)


def find_candidates(paths: Iterable[str | os.PathLike[str]]) -> list[RecordCandidate]:
    """Files named, and those below directories named, each once, in the order of their paths."""
    found: dict[Path, RecordCandidate] = {}
    for path in map(Path, paths):
        for file in _files_below(path) if path.is_dir() else (path,):
            named = file == path or is_record_name(file.name)
            if not named and OTHER_FILE_NAME.search(file.name):
                continue
            found.setdefault(file, RecordCandidate(file, rank_from_file_name(file.name), named))
    return [found[path] for path in sorted(found)]


def _files_below(directory: Path) -> Iterator[Path]:
    left = MAX_FILES
    for place, _, names in os.walk(directory):  # follows no links to directories
        for name in names[:left]:
            yield Path(place, name)
        left -= len(names)
        if left <= 0:
            return


def read_candidate(candidate: RecordCandidate) -> bytes | None:
    """None: it is something else, of which nobody said that it be a record. Raises `NotUsable`."""
    try:
        return _read_regular_file(candidate)
    except OSError as error:
        if not candidate.named:
            return None
        raise UnusableRecordError(f"it cannot be read: {error.strerror or error}") from None


def _read_regular_file(candidate: RecordCandidate) -> bytes | None:
    try:
        if not stat.S_ISREG(candidate.path.stat().st_mode):  # first: opening a device may do things
            raise UnusableRecordError("it is no regular file")
        file = os.open(candidate.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            return _read_open_file(file)
        finally:
            os.close(file)
    except UnusableRecordError:
        if candidate.named:
            raise
        return None


def _read_open_file(file: int) -> bytes:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise UnusableRecordError("it is no regular file")
    head = os.read(file, HEAD_BYTES)
    if not head:
        raise UnusableRecordError("it is empty: the rank has not written it yet", incomplete=True)
    if not looks_like_record(head):
        raise UnusableRecordError(describe_old_pickle(head) or "it is neither a pickle nor JSON of a flight record")
    if status.st_size > MAX_FILE_BYTES:
        raise UnusableRecordError(f"it has {status.st_size:,} bytes where at most {MAX_FILE_BYTES:,} are read")
    parts = [head]
    left = MAX_FILE_BYTES - len(head)
    while left and (part := os.read(file, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def looks_like_record(head: bytes) -> bool:
    """A pickle, whatever it holds, or JSON with a field that only flight records have."""
    if head[:1] == b"\x80":
        return len(head) < 2 or head[1] <= 5
    return head.lstrip()[:1] == b"{" and any(field in head for field in JSON_FIELDS)


def describe_old_pickle(head: bytes) -> str | None:
    """A pickle of protocol 0 or 1 has no mark at its beginning, and is told by its instructions alone: listed, not run.
    torch writes none; one that names or calls something was put there. None: it is no pickle."""
    found: list[str] = []
    try:
        for instruction, told, _ in pickletools.genops(head):
            if instruction.name in ("GLOBAL", "INST") and not GLOBAL_ARGUMENT.fullmatch(str(told)):
                return None  # a text that begins like one
            found.append(instruction.name)
    except (ValueError, OverflowError) as error:
        if len(head) < HEAD_BYTES or "unknown" in str(error):  # else the head ends before the pickle does
            return None
    runs = next((name for name in found if name in NAMING_INSTRUCTIONS.values()), None)
    if runs is None:
        return "it is a pickle of protocol 0 or 1, which torch does not write" if len(found) > 1 else None
    return f"it is a pickle of protocol 0 or 1 with the instruction {runs}, which runs code: no flight record has it"


# A table, as the child sends it -> a `RankRecord`. Equal operations, stacks, groups and numbers become one object.

T = TypeVar("T")


class Interner:
    """What several records of one reading have in common is kept once: a thousand ranks launch alike."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        numbers: dict[int | None, int | None] = {}
        self.number: Callable[[int | None, int | None], int | None] = numbers.setdefault  # of millions

    def one(self, value: T) -> T:
        kept: T = self._kept.setdefault((type(value), value), value)  # atomic: threads share it
        return kept


def build_rank_record(table: dict[str, Any], rank: int, source: str, interner: Interner) -> RankRecord:
    frames = [
        interner.one(LaunchFrame(interner.one(name), interner.one(file), line)) for name, file, line in table["frames"]
    ]
    stacks = [interner.one(tuple(frames[place] for place in stack)) for stack in table["stacks"]]
    operations = [interner.one(_build_operation(row, interner)) for row in table["operations"]]
    groups, records, slots, operation, started, completed, retired, stack, created, timeouts = table["columns"]
    launches: list[list[OperationLaunch]] = [[] for _ in table["groups"]]
    rows = zip(
        map(interner.number, records, records),
        map(interner.number, slots, slots),
        map(operations.__getitem__, operation),
        started,
        completed,
        retired,
        map(stacks.__getitem__, stack),
        created,
        map(interner.number, timeouts, timeouts),
        strict=True,
    )
    for place, launch in zip(groups, map(OperationLaunch._make, rows), strict=True):
        launches[place].append(launch)
    parts = []
    for (name, description, members, *counts), own in zip(table["groups"], launches, strict=True):
        group = interner.one(ProcessGroup(name, tuple(members), description))
        enqueued, begun, done, unrecorded_point_to_point = counts
        parts.append(GroupRecord(group, enqueued, begun, done, tuple(own), unrecorded_point_to_point))
    return RankRecord(rank, source, table["version"], table["library"], tuple(parts))


def _build_operation(row: list[Any], interner: Interner) -> Operation:
    backend, name, sizes_in, sizes_out, types_in, types_out, source, destination = row
    return Operation(
        interner.one(backend),
        interner.one(name),
        interner.one(tuple(map(tuple, sizes_in))),
        interner.one(tuple(map(tuple, sizes_out))),
        interner.one(tuple(types_in)),
        interner.one(tuple(types_out)),
        source,
        destination,
    )


# Flight records from files: all that can be read, in the order of ranks, and why the others cannot.

READER_PROCESSES: Final = 2
MIN_FILES_FOR_TWO_READERS: Final = 8  # below this many, a second process takes longer to start than it saves
# Shared by all files of one reading, so that a thousand hostile ones take no more than one.
MAX_LAUNCHES: Final = 4_000_000
MIN_LAUNCHES_PER_FILE: Final = 200
MAX_ANSWER_BYTES: Final = 512 * 2**20
CPU_RECORDER: Final = "recorder-cpu"
MIN_ANSWER_BYTES_PER_FILE: Final = 2**20
MAX_ANSWER_BYTES_PER_FILE: Final = 64 * 2**20

RETRY_ADVICE: Final = "ask the rank again, or take it from another copy"
HOSTILE_ADVICE: Final = "do not open it with other tools; see which user owns it on its node"


def read_flight_records(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> tuple[tuple[RankRecord, ...], tuple[UnreadableRecord, ...]]:
    """Directories, with what is below them, or files. In directories what is no flight record is passed over.

    One record a rank: of several files the one that tells the most. A file that cannot be used is named also where
    another one of its rank can. Raises nothing for what is in files.
    """
    found = find_candidates([paths] if isinstance(paths, str | os.PathLike) else paths)
    if not found:
        return (), ()
    readers = READER_PROCESSES if len(found) >= MIN_FILES_FOR_TWO_READERS else 1
    interner = Interner()
    with ThreadPoolExecutor(readers) as pool:
        shares = list(pool.map(lambda i: _read_share(found[i::readers], len(found), interner), range(readers)))
    results = [result for share in shares for result in share]
    unread = sorted((each for each in results if isinstance(each, UnreadableRecord)), key=lambda each: each.source)
    return _best_per_rank(each for each in results if isinstance(each, RankRecord)), tuple(unread)


def _read_share(
    share: Sequence[RecordCandidate], files: int, interner: Interner
) -> list[RankRecord | UnreadableRecord]:
    answer = min(MAX_ANSWER_BYTES_PER_FILE, max(MIN_ANSWER_BYTES_PER_FILE, MAX_ANSWER_BYTES // files))
    keep = max(MIN_LAUNCHES_PER_FILE, MAX_LAUNCHES // files)
    with SandboxedReader() as reader:
        results = (_read_one(candidate, reader, answer, keep, interner) for candidate in share)
        return [result for result in results if result is not None]


def _read_one(
    candidate: RecordCandidate, reader: SandboxedReader, longest_answer: int, keep: int, interner: Interner
) -> RankRecord | UnreadableRecord | None:
    source = str(candidate.path)
    try:
        data = read_candidate(candidate)
        if data is None:
            return None
        if candidate.rank is None:
            raise UnusableRecordError("its name does not tell the rank: name it like nccl_trace_rank_3")
        table = reader.read(data, longest_answer, keep)
    except UnusableRecordError as error:
        return UnreadableRecord(source, candidate.rank, _with_advice(error.why, error.incomplete), error.incomplete)
    if "why" in table:
        return UnreadableRecord(
            source, candidate.rank, _with_advice(table["why"], table["incomplete"]), table["incomplete"]
        )
    return build_rank_record(table, candidate.rank, source, interner)


def _with_advice(why: str, incomplete: bool) -> str:
    if incomplete:
        return f"{why}; {RETRY_ADVICE}"
    return f"{why}; {HOSTILE_ADVICE}" if "runs code" in why or "hostile" in why else why


def _best_per_rank(records: Iterable[RankRecord]) -> tuple[RankRecord, ...]:
    best: dict[tuple[int, bool], RankRecord] = {}
    for record in sorted(records, key=_usefulness, reverse=True):
        best.setdefault((record.rank, _is_cpu_record(record)), record)
    return tuple(_merge_recorders(best, rank) for rank in sorted({rank for rank, _ in best}))


def _is_cpu_record(record: RankRecord) -> bool:
    """A process with boards has two recorders: NCCL's, and one of what its groups do on the host (gloo)."""
    return CPU_RECORDER in os.path.basename(record.source)


def _merge_recorders(best: Mapping[tuple[int, bool], RankRecord], rank: int) -> RankRecord:
    """Both recorders of the rank as one record. Each counts the slots of a group for itself, so they are two groups."""
    first, second = best.get((rank, False)), best.get((rank, True))
    if second is None:
        return best[rank, False]
    groups = tuple(replace(part, group=_as_cpu_group(part.group)) for part in second.groups)
    return replace(second, groups=groups) if first is None else replace(first, groups=(*first.groups, *groups))


def _as_cpu_group(group: ProcessGroup) -> ProcessGroup:
    return group._replace(name=f"{group.name} on the host", description=f"{group} on the host")


def _usefulness(record: RankRecord) -> tuple[int, int, int, bool, str]:
    """Newest first, then the most complete, then the one with stacks (pickle)."""
    launches = [launch for group in record.groups for launch in group.launches]
    return (
        max((launch.created_ns or 0 for launch in launches), default=0),
        sum(group.last_enqueued or 0 for group in record.groups),
        len(launches),
        any(launch.frames for launch in launches),
        record.source,
    )
