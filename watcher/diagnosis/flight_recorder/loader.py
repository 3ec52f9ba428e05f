"""Flight records from files: one RankRecord per rank, and the reason for each file that cannot be used.

Dumps lie in directories where other users may write, so no file is trusted: nothing that could block is opened, and all
parsing happens in a sandboxed process (`sandbox.py`).
"""

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
from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import CODE_INSTRUCTIONS

READER_PROCESSES: Final = 2  # more would take cores from the watcher itself; chosen
MIN_FILES_FOR_TWO_READERS: Final = 8  # with fewer files, a second process takes longer to start than it saves
# Limits on what all files of one call may occupy in memory together, so that 1,000 hostile files cost no more than one.
# Chosen: 1,024 real ranks with 2,000 launches each stay below them.
MAX_LAUNCHES: Final = 4_000_000
MIN_LAUNCHES_PER_FILE: Final = 200
MAX_ANSWER_BYTES: Final = 512 * 2**20
MIN_ANSWER_BYTES_PER_FILE: Final = 2**20
MAX_ANSWER_BYTES_PER_FILE: Final = 64 * 2**20

MAX_FILE_BYTES: Final = 64 * 2**20
MAX_FILES: Final = 100_000  # a directory with more is not the one that was meant
MAX_RANK: Final = 1_000_000  # a larger number in a file name is a date or a process ID
FILE_ENDINGS: Final = (".json", ".pickle", ".pkl", ".bin", ".recorder")
# Names that PyTorch and wattwatch give: _dump_9, nccl_trace_rank_3, comm_lib_trace_rank_3, fr_trace_json_1.json,
# rank-00003.recorder.json.
RECORD_NAME: Final = re.compile(r"(dump|trace|recorder|flight)", re.IGNORECASE)
OTHER_FILE_NAME: Final = re.compile(
    r"(traceback|stacks?\b|\.(log|txt|html?|py|md|pipe|toml|ya?ml|csv|gz|tmp|part)$)", re.I
)
CPU_RECORDER: Final = "recorder-cpu"  # in the name of a dump of Gloo's recorder, as captures of wattwatch write it
JSON_FIELDS: Final = (
    b'"pg_config"',
    b'"pg_status"',
    b'"nccl_comm_state"',
    b'"comm_lib_version"',
    b'"collective_seq_id"',
)
HEAD_BYTES: Final = 4096
GLOBAL_ARGUMENT: Final = re.compile(r"[\w.]+ [\w.]+")  # of the instructions GLOBAL and INST: "posix system"

RETRY_ADVICE: Final = "request the record from the rank again, or use another copy"
HOSTILE_ADVICE: Final = "do not open the file with other tools; find out which user owns it on its node"

T = TypeVar("T")


class UnusableRecordError(Exception):
    """A file cannot be used. `why`: the reason in words; `incomplete`: requesting it from the rank again may help."""

    def __init__(self, why: str, incomplete: bool = False) -> None:
        super().__init__(why)
        self.why, self.incomplete = why, incomplete


@dataclass(frozen=True, slots=True)
class RecordCandidate:
    """A file that may be a record. `named`: the caller or its name says so; otherwise only its content decides."""

    path: Path
    rank: int | None
    named: bool


def read_flight_records(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> tuple[tuple[RankRecord, ...], tuple[UnreadableRecord, ...]]:
    """Read files, and all files below directories; files in directories that are not flight records are skipped.

    Returns one record per rank, in order of rank: of several files of a rank, the most informative one. The second
    tuple lists every record that could not be used, even if another file of the same rank could. Neither depends on the
    order of `paths`. Raises nothing for what is in the files.
    """
    candidates = find_candidates([paths] if isinstance(paths, str | os.PathLike) else paths)
    if not candidates:
        return (), ()
    # Threads suffice: most of the work is done in their worker processes.
    readers = READER_PROCESSES if len(candidates) >= MIN_FILES_FOR_TWO_READERS else 1
    interner = Interner()
    with ThreadPoolExecutor(readers) as pool:
        shares = list(
            pool.map(lambda i: _read_share(candidates[i::readers], len(candidates), interner), range(readers))
        )
        results = [result for share in shares for result in share]
    unreadable = sorted((each for each in results if isinstance(each, UnreadableRecord)), key=lambda each: each.source)
    return _best_per_rank(each for each in results if isinstance(each, RankRecord)), tuple(unreadable)


def _read_share(
    share: Sequence[RecordCandidate], file_count: int, interner: Interner
) -> list[RankRecord | UnreadableRecord]:
    answer_bytes = min(MAX_ANSWER_BYTES_PER_FILE, max(MIN_ANSWER_BYTES_PER_FILE, MAX_ANSWER_BYTES // file_count))
    launches = max(MIN_LAUNCHES_PER_FILE, MAX_LAUNCHES // file_count)
    with SandboxedReader() as reader:
        results = (_read_one(candidate, reader, answer_bytes, launches, interner) for candidate in share)
        return [result for result in results if result is not None]


def _read_one(
    candidate: RecordCandidate, reader: SandboxedReader, max_answer_bytes: int, max_launches: int, interner: Interner
) -> RankRecord | UnreadableRecord | None:
    source = str(candidate.path)
    try:
        data = read_candidate(candidate)
        if data is None:
            return None
        if candidate.rank is None:
            raise UnusableRecordError(
                "the file name contains no rank: rename the file, for example to nccl_trace_rank_3"
            )
        table = reader.read(data, max_answer_bytes, max_launches)
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


# Which files are records


def rank_from_file_name(name: str) -> int | None:
    """ "trace-node-01_rank_3.json" -> 3: the number after "rank", otherwise the last number; None if there is none."""
    while name.endswith(FILE_ENDINGS):
        name = name[: name.rindex(".")]
    numbers = re.findall(r"rank[-_.]?(\d+)", name, re.IGNORECASE) or re.findall(r"\d+", name)
    if not numbers or len(numbers[-1]) > 9 or int(numbers[-1]) > MAX_RANK:
        return None
    return int(numbers[-1])


def is_record_name(name: str) -> bool:
    """Whether a file of this name is a flight record of some rank, by its name alone."""
    return rank_from_file_name(name) is not None and bool(RECORD_NAME.search(name)) and not OTHER_FILE_NAME.search(name)


def find_candidates(paths: Iterable[str | os.PathLike[str]]) -> list[RecordCandidate]:
    """Given files, and files below given directories, each once, sorted by path."""
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
    for folder, _, names in os.walk(directory):  # does not follow links to directories
        for name in names[:left]:
            yield Path(folder, name)
        left -= len(names)
        if left <= 0:
            return


def read_candidate(candidate: RecordCandidate) -> bytes | None:
    """The bytes of a record. None: it is something else, and was not declared to be a record.

    Raises UnusableRecordError.
    """
    try:
        return _read_regular_file(candidate)
    except OSError as error:
        if not candidate.named:
            return None
        raise UnusableRecordError(f"the file cannot be read: {error.strerror or error}") from None


def _read_regular_file(candidate: RecordCandidate) -> bytes | None:
    try:
        # Checked before open(): opening a device can have side effects, and opening a FIFO can block.
        if not stat.S_ISREG(candidate.path.stat().st_mode):
            raise UnusableRecordError("this is not a regular file")
        # The file may have been replaced since: O_NONBLOCK returns at once even for a FIFO, and fstat() checks again.
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
        raise UnusableRecordError("this is not a regular file")
    head = os.read(file, HEAD_BYTES)
    if not head:
        raise UnusableRecordError("the file is empty: the rank has not written it yet", incomplete=True)
    if not looks_like_record(head):
        raise UnusableRecordError(
            describe_old_pickle(head) or "the file is not a flight record in pickle or JSON format"
        )
    if status.st_size > MAX_FILE_BYTES:
        raise UnusableRecordError(f"the file has {status.st_size:,} bytes, more than the limit of {MAX_FILE_BYTES:,}")
    parts = [head]
    left = MAX_FILE_BYTES - len(head)
    # Read up to the limit, not up to st_size: a rank may still be writing, and a file may also grow on purpose.
    while left and (part := os.read(file, min(left, 1 << 20))):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def looks_like_record(head: bytes) -> bool:
    """A pickle, whatever it contains, or JSON with a field that only flight records have."""
    if head[:1] == b"\x80":
        return len(head) < 2 or head[1] <= 5
    return head.lstrip()[:1] == b"{" and any(field in head for field in JSON_FIELDS)


def describe_old_pickle(head: bytes) -> str | None:
    """The reason to reject a pickle of protocol 0 or 1; None: it is not a pickle.

    These protocols have no marker at the beginning and can only be recognized by their instructions, which are listed
    here, not executed. PyTorch does not write them, so one that names or calls something was planted.
    """
    found: list[str] = []
    try:
        for instruction, argument, _ in pickletools.genops(head):
            if instruction.name in ("GLOBAL", "INST") and not GLOBAL_ARGUMENT.fullmatch(str(argument)):
                return None  # text that happens to begin like a pickle
            found.append(instruction.name)
    except (ValueError, OverflowError) as error:
        # A long pickle is cut off by HEAD_BYTES, which is no reason to doubt it; an unknown instruction is.
        if len(head) < HEAD_BYTES or "unknown" in str(error):
            return None
    runs_code = next((name for name in found if name in CODE_INSTRUCTIONS.values()), None)
    if runs_code is None:
        return "the file is a pickle of protocol 0 or 1, which torch does not write" if len(found) > 1 else None
    return (
        f"the file is a pickle of protocol 0 or 1 with the instruction {runs_code}, which runs code; "
        "flight records never contain this instruction"
    )


# From the sandbox worker's table to a record


class Interner:
    """Keeps one object per distinct value over all records of one call: a thousand ranks launch the same operations.

    Shared by the reader threads: `dict.setdefault` is atomic.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}
        # Millions of numbers pass through this one, so it is a bound method instead of a function of ours.
        numbers: dict[int | None, int | None] = {}
        self.intern_number: Callable[[int | None, int | None], int | None] = numbers.setdefault

    def intern(self, value: T) -> T:
        """The first equal value of the same type."""
        kept: T = self._kept.setdefault((type(value), value), value)
        return kept


def build_rank_record(table: dict[str, Any], rank: int, source: str, interner: Interner) -> RankRecord:
    """The record of one rank from the table of `schema.build_record_table`, after its way through JSON."""
    intern, intern_number = interner.intern, interner.intern_number
    frames = [intern(LaunchFrame(intern(name), intern(file), line)) for name, file, line in table["frames"]]
    stacks = [intern(tuple(frames[index] for index in stack)) for stack in table["stacks"]]
    operations = [intern(_build_operation(row, interner)) for row in table["operations"]]
    groups, records, slots, operation, started, completed, retired, stack, created, timeouts = table["columns"]
    launches: list[list[OperationLaunch]] = [[] for _ in table["groups"]]
    rows = zip(
        map(intern_number, records, records),
        map(intern_number, slots, slots),
        map(operations.__getitem__, operation),
        started,
        completed,
        retired,
        map(stacks.__getitem__, stack),
        created,
        map(intern_number, timeouts, timeouts),
        strict=True,
    )
    for index, launch in zip(groups, map(OperationLaunch._make, rows), strict=True):
        launches[index].append(launch)
    parts = []
    for (name, description, members, *counts), own_launches in zip(table["groups"], launches, strict=True):
        group = intern(ProcessGroup(name, tuple(members), description))
        last_enqueued, last_started, last_completed, unrecorded_point_to_point = counts
        parts.append(
            GroupRecord(
                group, last_enqueued, last_started, last_completed, tuple(own_launches), unrecorded_point_to_point
            )
        )
    return RankRecord(rank, source, table["version"], table["library"], tuple(parts))


def _build_operation(row: list[Any], interner: Interner) -> Operation:
    backend, name, input_sizes, output_sizes, input_types, output_types, source, destination = row
    return Operation(
        interner.intern(backend),
        interner.intern(name),
        interner.intern(tuple(map(tuple, input_sizes))),
        interner.intern(tuple(map(tuple, output_sizes))),
        interner.intern(tuple(input_types)),
        interner.intern(tuple(output_types)),
        source,
        destination,
    )


# Several files of one rank


def _best_per_rank(records: Iterable[RankRecord]) -> tuple[RankRecord, ...]:
    best: dict[tuple[int, bool], RankRecord] = {}
    # A directory often contains the same rank twice: as pickle and JSON, or dumps of an earlier timeout.
    for record in sorted(records, key=_usefulness, reverse=True):
        best.setdefault((record.rank, _is_cpu_record(record)), record)
    return tuple(_merge_recorders(best, rank) for rank in sorted({rank for rank, _ in best}))


def _usefulness(record: RankRecord) -> tuple[int, int, int, bool, str]:
    """Newest first, then most launches, then the one with stacks (pickle). The source makes the order unique."""
    launches = [launch for group in record.groups for launch in group.launches]
    return (
        max((launch.created_ns or 0 for launch in launches), default=0),
        sum(group.last_enqueued or 0 for group in record.groups),
        len(launches),
        any(launch.frames for launch in launches),
        record.source,
    )


def _is_cpu_record(record: RankRecord) -> bool:
    """A process with GPUs has two recorders: NCCL's, and one for its groups on the CPU (Gloo)."""
    return CPU_RECORDER in os.path.basename(record.source)


def _merge_recorders(best: Mapping[tuple[int, bool], RankRecord], rank: int) -> RankRecord:
    """Both recorders of a rank as one record.

    Each recorder counts the operations of a group separately, so the same group becomes two groups.
    """
    gpu, cpu = best.get((rank, False)), best.get((rank, True))
    if cpu is None:
        return best[rank, False]
    groups = tuple(replace(part, group=_as_cpu_group(part.group)) for part in cpu.groups)
    return replace(cpu, groups=groups) if gpu is None else replace(gpu, groups=(*gpu.groups, *groups))


def _as_cpu_group(group: ProcessGroup) -> ProcessGroup:
    return group._replace(name=f"{group.name} on the host", description=f"{group} on the host")
