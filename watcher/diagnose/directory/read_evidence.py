"""A directory -> `Evidence`: a capture, a run of wattwatch-train, or dumps that somebody put together. Rim.

A foreign directory needs no names of ours: what a file is, is seen from its content.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from watcher.diagnose.directory.file_kinds import MANIFEST, SEEN, FileKind
from watcher.diagnose.directory.listing import Found, list_directory, read_bytes, read_object
from watcher.diagnose.directory.run_evidence import read_ending, read_run
from watcher.diagnose.evidence import Evidence, RankEnding, RankLog, RankProcess, RankStacks, Seen
from watcher.diagnose.flight.files import rank_of
from watcher.diagnose.flight.read import read_records
from watcher.diagnose.flight.record import RankRecord, Unread
from watcher.diagnose.ras.parse import parse_polls
from watcher.diagnose.ras.report import RasPolls
from watcher.diagnose.traces.rank_logs import read_log
from watcher.diagnose.traces.stacks import read_stacks

SEEN_JSON: Final = TypeAdapter(Seen)
PROCESS: Final = TypeAdapter(RankProcess)
PROCESSES: Final = TypeAdapter(list[dict[str, Any]])
NODE_OF_RANK: Final = TypeAdapter(dict[int, str])
SENTENCES: Final = TypeAdapter(list[str])
POLL_NAME: Final = re.compile(r"(?P<series>.*?)(?:\.ras-|[._-]poll[._-]?)\d+\.(?:json|txt)")
PACKED: Final = (".gz", ".tgz", ".tar", ".zip", ".bz2", ".xz", ".zst", ".7z")


class NoEvidence(Exception):
    """There is nothing that a diagnosis could rest on; the sentence says what was looked for."""


def read_evidence(directory: Path) -> Evidence:
    """Raises NoEvidence. What is there and cannot be used is told in `unread` and `missing`."""
    try:
        listing = list_directory(directory)
    except NotADirectoryError:
        raise NoEvidence(f"{directory}: not a directory; name the directory that the dumps lie in") from None
    except OSError as error:
        raise NoEvidence(f"{directory}: cannot be read: {error.strerror or error}") from None
    missing = [*listing.missing, *_packed(listing.files)]
    kinds: dict[FileKind, list[Found]] = defaultdict(list)
    for found in listing.files:
        kinds[found.kind].append(found)
    _one_set_only(directory, kinds[FileKind.RECORD])
    manifest = read_object(directory / MANIFEST, missing)
    run = read_run(directory)
    records, unread = _records(kinds[FileKind.RECORD])
    stacks = tuple(_stacks(kinds[FileKind.STACKS], missing))
    processes = tuple(_processes(kinds[FileKind.PROCESSES], missing))
    ras = tuple(_ras(directory, kinds[FileKind.RAS], missing))
    seen = _seen(directory / SEEN, missing) or run.seen
    endings = (*run.endings, *_endings(directory, kinds[FileKind.ENDING], missing))
    logs = (*run.logs, *_logs(kinds[FileKind.LOG], manifest, missing))
    if not (records or unread or stacks or processes or ras or seen or endings or any(log.failure for log in logs)):
        raise NoEvidence(_nothing(directory, len(listing.files), missing))
    used = (FileKind.RECORD, FileKind.STACKS, FileKind.PROCESSES, FileKind.RAS, FileKind.ENDING, FileKind.LOG)
    return Evidence(
        records,
        unread,
        stacks,
        processes,
        ras,
        seen,
        endings,
        run.node_of_rank | _nodes(manifest),
        tuple(found.name for kind in used for found in kinds[kind]),
        (*_sentences(manifest), *run.missing, *missing),
        logs,
    )


def _one_set_only(directory: Path, records: Sequence[Found]) -> None:
    """Records of one rank in two folders are of two hangs; to mix them would name the wrong one. Folders that each hold
    some ranks are one set: dumps are often fetched node by node."""
    folder_of: dict[int, Path] = {}
    for found in records:
        rank = rank_of(found.name)
        if rank is not None and folder_of.setdefault(rank, found.path.parent) != found.path.parent:
            folders = sorted({str(each.path.parent.relative_to(directory)) for each in records})
            more = f" and {len(folders) - 4} more" if len(folders) > 4 else ""
            raise NoEvidence(
                f"{directory}: rank {rank} has records in several folders: {', '.join(folders[:4])}{more}; name one of "
                "them"
            )


def _nothing(directory: Path, files: int, missing: Sequence[str]) -> str:
    if missing:
        return f"{directory}: nothing in it can be used: {'; '.join(missing[:3])}"
    held = "it is empty" if not files else f"none of its {files:,} files is one"
    return (
        f"{directory}: no flight records, stacks or NCCL RAS reports: {held}. Name a directory of torch's dumps "
        "(TORCH_FR_DUMP_TEMP_FILE), a capture of wattwatch, or a run directory"
    )


def _packed(files: Sequence[Found]) -> Iterable[str]:
    packed = [found.name for found in files if found.name.lower().endswith(PACKED)]
    if packed:
        number = "1 file is" if len(packed) == 1 else f"{len(packed):,} files are"
        yield f"{number} packed, the first is {packed[0]}: unpack what is packed, then run this again"


def _records(files: Sequence[Found]) -> tuple[tuple[RankRecord, ...], tuple[Unread, ...]]:
    """With names relative to the directory, as all other sources have them."""
    if not files:
        return (), ()
    names = {str(found.path): found.name for found in files}
    records, unread = read_records([found.path for found in files])
    return (
        tuple(replace(record, source=names.get(record.source, record.source)) for record in records),
        tuple(replace(each, source=names.get(each.source, each.source)) for each in unread),
    )


def _nodes(manifest: dict[str, Any]) -> dict[int, str]:
    try:
        return NODE_OF_RANK.validate_python(manifest.get("node_of_rank") or {})
    except ValidationError:
        return {}


def _sentences(manifest: dict[str, Any]) -> list[str]:
    try:
        return SENTENCES.validate_python(manifest.get("missing") or [])
    except ValidationError:
        return []


def _seen(path: Path, missing: list[str]) -> Seen | None:
    if not path.exists():
        return None
    try:
        return SEEN_JSON.validate_json(read_bytes(path) or b"")
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror or error}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        missing.append(f"{path.name}: {where}: {first['msg']}")
    return None


def _data(found: Found, missing: list[str]) -> bytes | None:
    try:
        return read_bytes(found.path)
    except OSError as error:
        missing.append(f"{found.name}: cannot be read: {error.strerror or error}")
        return None


def _stacks(files: Iterable[Found], missing: list[str]) -> Iterable[RankStacks]:
    for found in files:
        data, rank = _data(found, missing), rank_of(found.name)
        if data is None:
            continue
        if rank is None:
            missing.append(f"{found.name}: stacks of an unknown rank: put the rank into its name, as in rank-3.txt")
        elif stacks := read_stacks(data.decode("utf-8", "replace"), rank, found.name):
            yield stacks
        else:
            missing.append(f"{found.name}: no Python stacks in it")


def _endings(directory: Path, files: Iterable[Found], missing: list[str]) -> Iterable[RankEnding]:
    for found in files:
        if (ending := read_ending(found.path, directory, missing)) is not None:
            yield ending


def _logs(files: Iterable[Found], manifest: dict[str, Any], missing: list[str]) -> Iterable[RankLog]:
    listed = manifest.get("files")
    for found in files:
        data, rank = _data(found, missing), rank_of(found.name)
        log = None if data is None or rank is None else read_log(data, rank, found.name)
        if log is not None:
            told = listed.get(found.path.name) if isinstance(listed, dict) else None
            age = told.get("age_seconds") if isinstance(told, dict) else None
            yield replace(log, age_seconds=float(age) if isinstance(age, (int, float)) else None)


def _processes(files: Iterable[Found], missing: list[str]) -> Iterable[RankProcess]:
    for found in files:
        node = Path(found.name).name.removeprefix("node-").removesuffix(".processes.json")
        try:
            rows = PROCESSES.validate_json(_data(found, missing) or b"[]")
            yield from [_process(row, node, found.name) for row in rows]
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            missing.append(f"{found.name}: not a list of processes: {str(error).splitlines()[0]}")


def _process(row: dict[str, Any], node: str, source: str) -> RankProcess:
    fields = {name: row.get(name) for name in ("state", "wait_channel", "cpu_percent")}
    fields["kernel_stack"] = row.get("kernel_stack") or ()
    process: RankProcess = PROCESS.validate_python(
        {"rank": row.get("rank"), "node": node, "pid": row["pid"], "source": source, **fields}
    )
    return process


def _ras(directory: Path, files: Sequence[Found], missing: list[str]) -> Iterable[RasPolls]:
    """Reports whose names differ in the number of the poll only are of one node, oldest first."""
    series: dict[str, list[Found]] = defaultdict(list)
    for found in files:
        match = POLL_NAME.fullmatch(found.path.name)
        series[str(found.path.parent / (match["series"] if match else found.path.name))].append(found)
    for key, group in sorted(series.items()):
        reports = [(found.name, data) for found in group if (data := _data(found, missing)) is not None]
        name = Path(key).name
        meta = read_object(directory / f"{name}.ras.json", missing)
        apart, trouble = meta.get("apart_seconds"), meta.get("trouble")
        node = name.removeprefix("node-") if name.startswith("node-") else ""
        yield parse_polls(
            node,
            reports,
            float(apart) if isinstance(apart, (int, float)) else None,
            str(trouble) if trouble else None,
        )
