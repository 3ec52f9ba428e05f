"""Flight records from files: all that can be read, in the order of ranks, and why the others cannot."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from watcher.diagnose.flight.apart import ApartReader
from watcher.diagnose.flight.files import Candidate, NotUsable, candidates, content
from watcher.diagnose.flight.record import Group, RankRecord, Unread
from watcher.diagnose.flight.tables import Interner, record_of

READERS: Final = 2
FILES_FOR_TWO: Final = 8  # below this many, a second process takes longer to start than it saves
# Shared by all files of one reading, so that a thousand hostile ones take no more than one.
MOST_LAUNCHES: Final = 4_000_000
FEWEST_LAUNCHES: Final = 200
ANSWER_BYTES: Final = 512 * 2**20
SECOND_RECORDER: Final = "recorder-cpu"
SMALLEST_ANSWER: Final = 2**20
LARGEST_ANSWER: Final = 64 * 2**20

AGAIN: Final = "ask the rank again, or take it from another copy"
LEAVE: Final = "do not open it with other tools; see which user owns it on its node"


def read_records(
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
) -> tuple[tuple[RankRecord, ...], tuple[Unread, ...]]:
    """Directories, with what is below them, or files. In directories what is no flight record is passed over.

    One record a rank: of several files the one that tells the most. A file that cannot be used is named also where
    another one of its rank can. Raises nothing for what is in files.
    """
    found = candidates([paths] if isinstance(paths, str | os.PathLike) else paths)
    if not found:
        return (), ()
    readers = READERS if len(found) >= FILES_FOR_TWO else 1
    interner = Interner()
    with ThreadPoolExecutor(readers) as pool:
        shares = list(pool.map(lambda i: _read_share(found[i::readers], len(found), interner), range(readers)))
    results = [result for share in shares for result in share]
    unread = sorted((each for each in results if isinstance(each, Unread)), key=lambda each: each.source)
    return _best(each for each in results if isinstance(each, RankRecord)), tuple(unread)


def _read_share(share: Sequence[Candidate], files: int, interner: Interner) -> list[RankRecord | Unread]:
    answer = min(LARGEST_ANSWER, max(SMALLEST_ANSWER, ANSWER_BYTES // files))
    keep = max(FEWEST_LAUNCHES, MOST_LAUNCHES // files)
    with ApartReader() as reader:
        results = (_read(candidate, reader, answer, keep, interner) for candidate in share)
        return [result for result in results if result is not None]


def _read(
    candidate: Candidate, reader: ApartReader, longest_answer: int, keep: int, interner: Interner
) -> RankRecord | Unread | None:
    source = str(candidate.path)
    try:
        data = content(candidate)
        if data is None:
            return None
        if candidate.rank is None:
            raise NotUsable("its name does not tell the rank: name it like nccl_trace_rank_3")
        table = reader.read(data, longest_answer, keep)
    except NotUsable as error:
        return Unread(source, candidate.rank, _sentence(error.why, error.incomplete), error.incomplete)
    if "why" in table:
        return Unread(source, candidate.rank, _sentence(table["why"], table["incomplete"]), table["incomplete"])
    return record_of(table, candidate.rank, source, interner)


def _sentence(why: str, incomplete: bool) -> str:
    if incomplete:
        return f"{why}; {AGAIN}"
    return f"{why}; {LEAVE}" if "runs code" in why or "hostile" in why else why


def _best(records: Iterable[RankRecord]) -> tuple[RankRecord, ...]:
    best: dict[tuple[int, bool], RankRecord] = {}
    for record in sorted(records, key=_tells, reverse=True):
        best.setdefault((record.rank, _of_the_host(record)), record)
    return tuple(_joined(best, rank) for rank in sorted({rank for rank, _ in best}))


def _of_the_host(record: RankRecord) -> bool:
    """A process with boards has two recorders: NCCL's, and one of what its groups do on the host (gloo)."""
    return SECOND_RECORDER in os.path.basename(record.source)


def _joined(best: Mapping[tuple[int, bool], RankRecord], rank: int) -> RankRecord:
    """Both recorders of the rank as one record. Each counts the slots of a group for itself, so they are two groups."""
    first, second = best.get((rank, False)), best.get((rank, True))
    if second is None:
        return best[rank, False]
    groups = tuple(replace(part, group=_on_the_host(part.group)) for part in second.groups)
    return replace(second, groups=groups) if first is None else replace(first, groups=(*first.groups, *groups))


def _on_the_host(group: Group) -> Group:
    return group._replace(name=f"{group.name} on the host", description=f"{group} on the host")


def _tells(record: RankRecord) -> tuple[int, int, int, bool, str]:
    """Newest first, then the most complete, then the one with stacks (pickle)."""
    launches = [launch for group in record.groups for launch in group.launches]
    return (
        max((launch.created_ns or 0 for launch in launches), default=0),
        sum(group.last_enqueued or 0 for group in record.groups),
        len(launches),
        any(launch.frames for launch in launches),
        record.source,
    )
