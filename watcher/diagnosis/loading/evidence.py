"""What a run directory of wattwatch-train tells beside flight records: how ranks ended, and where each was. Rim."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from wattwatch.watcher.diagnosis.flight_recorder.loader import rank_from_file_name, read_flight_records
from wattwatch.watcher.diagnosis.flight_recorder.model import RankRecord, UnreadableRecord
from wattwatch.watcher.diagnosis.loading.directory import (
    ATTEMPT_DIRECTORY,
    LIVE_EVIDENCE_NAME,
    MANIFEST_NAME,
    EvidenceKind,
    ListedFile,
    list_evidence_files,
    read_file_tail,
    read_json_object,
    read_regular_file,
)
from wattwatch.watcher.diagnosis.model import (
    Evidence,
    LiveEvidence,
    RankExitReport,
    RankLog,
    RankProcess,
    RankReadings,
    RankStacks,
)
from wattwatch.watcher.diagnosis.nccl_ras.model import RasPolls
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls
from wattwatch.watcher.diagnosis.stacks.log_errors import MAX_TAIL_BYTES, parse_rank_log
from wattwatch.watcher.diagnosis.stacks.python_stacks import parse_stacks

MAX_OBJECT_BYTES: Final = 1024 * 1024  # a heartbeat, an ending, run.json


@dataclass(frozen=True, slots=True)
class RunEvidence:
    live: LiveEvidence | None
    exit_reports: tuple[RankExitReport, ...]
    node_of_rank: dict[int, str]
    missing: tuple[str, ...]
    logs: tuple[RankLog, ...] = ()


def load_run_evidence(directory: Path) -> RunEvidence:
    """Of RUN, or of RUN/flight and RUN/flight/attempt-02; of any other directory nothing. Never raises."""
    run = next(
        (place for place in (directory, *directory.resolve().parents[:2]) if (place / "run.json").exists()), None
    )
    if run is None:
        return RunEvidence(None, (), {}, ())
    missing: list[str] = []
    record = read_json_object(run / "run.json", missing, MAX_OBJECT_BYTES)
    attempt = _attempt(directory, run)
    exit_reports = tuple(
        ending
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.ending.json"))
        if (ending := load_exit_report(path, run, missing)) is not None
    )
    logs = tuple(
        log
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.log"))
        if (log := _load_run_log(path, run, missing)) is not None
    )
    beats = [
        read_json_object(path, missing, MAX_OBJECT_BYTES) for path in sorted((run / "heartbeat").glob("rank-*.json"))
    ]
    ranks = tuple(each for beat in beats if (each := _readings_from_heartbeat(beat, attempt)) is not None)
    nodes = _nodes_from_run_record(record) | {each.rank: each.node for each in ranks if each.node}
    if not ranks:
        return RunEvidence(None, exit_reports, nodes, tuple(missing), logs)
    steps = [each.step for each in ranks if each.step is not None]
    walls = [wall for beat in beats if (wall := _as_finite_float(beat.get("t_wall"))) is not None]
    name = str(record.get("run") or run.name)
    live = LiveEvidence(name, max(walls, default=0.0), "unknown", "unknown", min(steps, default=None), ranks)
    return RunEvidence(live, exit_reports, nodes, tuple(missing), logs)


def _attempt(directory: Path, run: Path) -> int:
    """The one that was pointed at, else the newest that left anything."""
    if found := ATTEMPT_DIRECTORY.fullmatch(directory.resolve().name):
        return int(found[1])
    names = [path.name for room in ("flight", "logs") for path in (run / room).glob("attempt-*")]
    return max((int(found[1]) for name in names if (found := ATTEMPT_DIRECTORY.fullmatch(name))), default=1)


def _load_run_log(path: Path, run: Path, missing: list[str]) -> RankLog | None:
    """Its end; the age of a log that may still be written tells nothing."""
    rank = rank_from_file_name(path.name)
    try:
        data = None if rank is None else read_file_tail(path, MAX_TAIL_BYTES)
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror or error}")
        return None
    return None if rank is None or data is None else parse_rank_log(data, rank, str(path.relative_to(run)))


def load_exit_report(path: Path, run: Path, missing: list[str]) -> RankExitReport | None:
    """Of the file that a rank left; `run`: what its name is told against. What it cannot read is told in `missing`."""
    data, rank = read_json_object(path, missing, MAX_OBJECT_BYTES), rank_from_file_name(path.name)
    code = _as_int(data.get("code"))
    if rank is None or code is None:
        return None
    why = str(data.get("why", ""))[:500]
    source = str(path.relative_to(run))
    return RankExitReport(rank, code, why, _as_int(data.get("step")), data.get("follows") is True, source)


def _readings_from_heartbeat(beat: dict[str, Any], attempt: int) -> RankReadings | None:
    """An earlier attempt's heartbeat says nothing of this one."""
    rank = _as_int(beat.get("rank"))
    if rank is None or _as_int(beat.get("restart")) not in (None, attempt - 1):
        return None
    phase = beat.get("phase")
    return RankReadings(
        rank,
        str(beat.get("host") or ""),
        step=_as_int(beat.get("step")),
        phase=phase if isinstance(phase, str) else None,
        data_wait_ms=_as_finite_float(beat.get("data_wait_ms")),
        blocks_left=_as_int(beat.get("blocks_left")),
    )


def _nodes_from_run_record(record: dict[str, Any]) -> dict[int, str]:
    nodes, world = record.get("nodes"), _as_int(record.get("world"))
    if not isinstance(nodes, list) or not nodes or not world or not 0 < world <= 1_000_000 or world % len(nodes):
        return {}
    return {rank: str(nodes[rank * len(nodes) // world]) for rank in range(world)}


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_finite_float(value: object) -> float | None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return number if number is not None and math.isfinite(number) else None


# A directory -> `Evidence`: a capture, a run of wattwatch-train, or dumps that somebody put together. Rim.
#
# A foreign directory needs no names of ours: what a file is, is seen from its content.

LIVE_EVIDENCE_ADAPTER: Final = TypeAdapter(LiveEvidence)
PROCESS_ADAPTER: Final = TypeAdapter(RankProcess)
PROCESS_ROWS_ADAPTER: Final = TypeAdapter(list[dict[str, Any]])
NODE_OF_RANK_ADAPTER: Final = TypeAdapter(dict[int, str])
SENTENCES_ADAPTER: Final = TypeAdapter(list[str])
POLL_NAME: Final = re.compile(r"(?P<series>.*?)(?:\.ras-|[._-]poll[._-]?)\d+\.(?:json|txt)")
ARCHIVE_SUFFIXES: Final = (".gz", ".tgz", ".tar", ".zip", ".bz2", ".xz", ".zst", ".7z")


class NoEvidenceError(Exception):
    """There is nothing that a diagnosis could rest on; the sentence says what was looked for."""


def load_evidence(directory: Path) -> Evidence:
    """Raises NoEvidence. What is there and cannot be used is told in `unread` and `missing`."""
    try:
        listing = list_evidence_files(directory)
    except NotADirectoryError:
        raise NoEvidenceError(f"{directory}: not a directory; name the directory that the dumps lie in") from None
    except OSError as error:
        raise NoEvidenceError(f"{directory}: cannot be read: {error.strerror or error}") from None
    missing = [*listing.missing, *_archive_warnings(listing.files)]
    kinds: dict[EvidenceKind, list[ListedFile]] = defaultdict(list)
    for found in listing.files:
        kinds[found.kind].append(found)
    _require_one_record_per_rank(directory, kinds[EvidenceKind.RECORD])
    manifest = read_json_object(directory / MANIFEST_NAME, missing)
    run = load_run_evidence(directory)
    records, unreadable = _load_records(kinds[EvidenceKind.RECORD])
    stacks = tuple(_load_stacks(kinds[EvidenceKind.STACKS], missing))
    processes = tuple(_load_processes(kinds[EvidenceKind.PROCESSES], missing))
    ras = tuple(_load_ras_polls(directory, kinds[EvidenceKind.RAS], missing))
    live = _load_live_evidence(directory / LIVE_EVIDENCE_NAME, missing) or run.live
    exit_reports = (*run.exit_reports, *_load_exit_reports(directory, kinds[EvidenceKind.ENDING], missing))
    logs = (*run.logs, *_load_logs(kinds[EvidenceKind.LOG], manifest, missing))
    if not (
        records or unreadable or stacks or processes or ras or live or exit_reports or any(log.failure for log in logs)
    ):
        raise NoEvidenceError(_no_evidence_message(directory, len(listing.files), missing))
    used = (
        EvidenceKind.RECORD,
        EvidenceKind.STACKS,
        EvidenceKind.PROCESSES,
        EvidenceKind.RAS,
        EvidenceKind.ENDING,
        EvidenceKind.LOG,
    )
    return Evidence(
        records,
        unreadable,
        stacks,
        processes,
        ras,
        live,
        exit_reports,
        run.node_of_rank | _nodes_from_manifest(manifest),
        tuple(found.name for kind in used for found in kinds[kind]),
        (*_missing_from_manifest(manifest), *run.missing, *missing),
        logs,
    )


def _require_one_record_per_rank(directory: Path, records: Sequence[ListedFile]) -> None:
    """Records of one rank in two folders are of two hangs; to mix them would name the wrong one. Folders that each hold
    some ranks are one set: dumps are often fetched node by node."""
    folder_of: dict[int, Path] = {}
    for found in records:
        rank = rank_from_file_name(found.name)
        if rank is not None and folder_of.setdefault(rank, found.path.parent) != found.path.parent:
            folders = sorted({str(each.path.parent.relative_to(directory)) for each in records})
            more = f" and {len(folders) - 4} more" if len(folders) > 4 else ""
            raise NoEvidenceError(
                f"{directory}: rank {rank} has records in several folders: {', '.join(folders[:4])}{more}; name one of "
                "them"
            )


def _no_evidence_message(directory: Path, files: int, missing: Sequence[str]) -> str:
    if missing:
        return f"{directory}: nothing in it can be used: {'; '.join(missing[:3])}"
    held = "it is empty" if not files else f"none of its {files:,} files is one"
    return (
        f"{directory}: no flight records, stacks or NCCL RAS reports: {held}. Name a directory of torch's dumps "
        "(TORCH_FR_DUMP_TEMP_FILE), a capture of wattwatch, or a run directory"
    )


def _archive_warnings(files: Sequence[ListedFile]) -> Iterable[str]:
    packed = [found.name for found in files if found.name.lower().endswith(ARCHIVE_SUFFIXES)]
    if packed:
        number = "1 file is" if len(packed) == 1 else f"{len(packed):,} files are"
        yield f"{number} packed, the first is {packed[0]}: unpack what is packed, then run this again"


def _load_records(files: Sequence[ListedFile]) -> tuple[tuple[RankRecord, ...], tuple[UnreadableRecord, ...]]:
    """With names relative to the directory, as all other sources have them."""
    if not files:
        return (), ()
    names = {str(found.path): found.name for found in files}
    records, unreadable = read_flight_records([found.path for found in files])
    return (
        tuple(replace(record, source=names.get(record.source, record.source)) for record in records),
        tuple(replace(each, source=names.get(each.source, each.source)) for each in unreadable),
    )


def _nodes_from_manifest(manifest: dict[str, Any]) -> dict[int, str]:
    try:
        return NODE_OF_RANK_ADAPTER.validate_python(manifest.get("node_of_rank") or {})
    except ValidationError:
        return {}


def _missing_from_manifest(manifest: dict[str, Any]) -> list[str]:
    try:
        return SENTENCES_ADAPTER.validate_python(manifest.get("missing") or [])
    except ValidationError:
        return []


def _load_live_evidence(path: Path, missing: list[str]) -> LiveEvidence | None:
    if not path.exists():
        return None
    try:
        return LIVE_EVIDENCE_ADAPTER.validate_json(read_regular_file(path) or b"")
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror or error}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        missing.append(f"{path.name}: {where}: {first['msg']}")
    return None


def _data(found: ListedFile, missing: list[str]) -> bytes | None:
    try:
        return read_regular_file(found.path)
    except OSError as error:
        missing.append(f"{found.name}: cannot be read: {error.strerror or error}")
        return None


def _load_stacks(files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankStacks]:
    for found in files:
        data, rank = _data(found, missing), rank_from_file_name(found.name)
        if data is None:
            continue
        if rank is None:
            missing.append(f"{found.name}: stacks of an unknown rank: put the rank into its name, as in rank-3.txt")
        elif stacks := parse_stacks(data.decode("utf-8", "replace"), rank, found.name):
            yield stacks
        else:
            missing.append(f"{found.name}: no Python stacks in it")


def _load_exit_reports(directory: Path, files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankExitReport]:
    for found in files:
        if (ending := load_exit_report(found.path, directory, missing)) is not None:
            yield ending


def _load_logs(files: Iterable[ListedFile], manifest: dict[str, Any], missing: list[str]) -> Iterable[RankLog]:
    listed = manifest.get("files")
    for found in files:
        data, rank = _data(found, missing), rank_from_file_name(found.name)
        log = None if data is None or rank is None else parse_rank_log(data, rank, found.name)
        if log is not None:
            told = listed.get(found.path.name) if isinstance(listed, dict) else None
            age = told.get("age_seconds") if isinstance(told, dict) else None
            yield replace(log, age_seconds=float(age) if isinstance(age, (int, float)) else None)


def _load_processes(files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankProcess]:
    for found in files:
        node = Path(found.name).name.removeprefix("node-").removesuffix(".processes.json")
        try:
            rows = PROCESS_ROWS_ADAPTER.validate_json(_data(found, missing) or b"[]")
            yield from [_process(row, node, found.name) for row in rows]
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            missing.append(f"{found.name}: not a list of processes: {str(error).splitlines()[0]}")


def _process(row: dict[str, Any], node: str, source: str) -> RankProcess:
    fields = {name: row.get(name) for name in ("state", "wait_channel", "cpu_percent")}
    fields["kernel_stack"] = row.get("kernel_stack") or ()
    process: RankProcess = PROCESS_ADAPTER.validate_python(
        {"rank": row.get("rank"), "node": node, "pid": row["pid"], "source": source, **fields}
    )
    return process


def _load_ras_polls(directory: Path, files: Sequence[ListedFile], missing: list[str]) -> Iterable[RasPolls]:
    """Reports whose names differ in the number of the poll only are of one node, oldest first."""
    series: dict[str, list[ListedFile]] = defaultdict(list)
    for found in files:
        match = POLL_NAME.fullmatch(found.path.name)
        series[str(found.path.parent / (match["series"] if match else found.path.name))].append(found)
    for key, group in sorted(series.items()):
        reports = [(found.name, data) for found in group if (data := _data(found, missing)) is not None]
        name = Path(key).name
        meta = read_json_object(directory / f"{name}.ras.json", missing)
        apart, trouble = meta.get("apart_seconds"), meta.get("trouble")
        node = name.removeprefix("node-") if name.startswith("node-") else ""
        yield parse_polls(
            node,
            reports,
            float(apart) if isinstance(apart, (int, float)) else None,
            str(trouble) if trouble else None,
        )
