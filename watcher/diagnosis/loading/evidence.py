"""Loads `Evidence` from a directory: a capture, a run directory of wattwatch-train, or dumps copied from nodes.

Files need no particular names: what a file is, is recognized from its content (`directory.py`).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from wattwatch.watcher.common.formatting import describe_invalid_value
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

# A run directory of wattwatch-train

MAX_OBJECT_BYTES: Final = 1024 * 1024  # of a heartbeat, an exit report or run.json


@dataclass(frozen=True, slots=True)
class RunEvidence:
    live: LiveEvidence | None
    exit_reports: tuple[RankExitReport, ...]
    node_of_rank: dict[int, str]
    missing: tuple[str, ...]
    logs: tuple[RankLog, ...] = ()


def load_run_evidence(directory: Path) -> RunEvidence:
    """Exit reports, logs and heartbeats; empty if the directory is not (below) a run directory. Never raises.

    `directory`: RUN, RUN/flight or RUN/flight/attempt-NN.
    """
    run = next(
        (place for place in (directory, *directory.resolve().parents[:2]) if (place / "run.json").exists()), None
    )
    if run is None:
        return RunEvidence(None, (), {}, ())
    missing: list[str] = []
    record = read_json_object(run / "run.json", missing, MAX_OBJECT_BYTES)
    attempt = _attempt(directory, run)
    exit_reports = tuple(
        report
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.ending.json"))
        if (report := load_exit_report(path, run, missing)) is not None
    )
    logs = tuple(
        log
        for path in sorted((run / "logs" / f"attempt-{attempt:02d}").glob("rank-*.log"))
        if (log := _load_run_log(path, run, missing)) is not None
    )
    heartbeats = [
        read_json_object(path, missing, MAX_OBJECT_BYTES) for path in sorted((run / "heartbeat").glob("rank-*.json"))
    ]
    readings = (_readings_from_heartbeat(heartbeat, attempt) for heartbeat in heartbeats)
    ranks = tuple(each for each in readings if each is not None)
    nodes = _nodes_from_run_record(record) | {each.rank: each.node for each in ranks if each.node}
    if not ranks:
        return RunEvidence(None, exit_reports, nodes, tuple(missing), logs)
    # The slowest rank decides how far the job is.
    steps = [each.step for each in ranks if each.step is not None]
    wall_times = [wall for heartbeat in heartbeats if (wall := _as_finite_float(heartbeat.get("t_wall"))) is not None]
    name = str(record.get("run") or run.name)
    live = LiveEvidence(name, max(wall_times, default=0.0), "unknown", "unknown", min(steps, default=None), ranks)
    return RunEvidence(live, exit_reports, nodes, tuple(missing), logs)


def _attempt(directory: Path, run: Path) -> int:
    """The attempt that `directory` names, else the newest one with dumps or logs."""
    if match := ATTEMPT_DIRECTORY.fullmatch(directory.resolve().name):
        return int(match[1])
    names = [path.name for folder in ("flight", "logs") for path in (run / folder).glob("attempt-*")]
    return max((int(match[1]) for name in names if (match := ATTEMPT_DIRECTORY.fullmatch(name))), default=1)


def _load_run_log(path: Path, run: Path, missing: list[str]) -> RankLog | None:
    """The end of a log. Its age is left unknown: the rank may still be writing to it."""
    rank = rank_from_file_name(path.name)
    try:
        data = None if rank is None else read_file_tail(path, MAX_TAIL_BYTES)
    except OSError as error:
        missing.append(f"{path.name}: cannot be read: {error.strerror or error}")
        return None
    return None if rank is None or data is None else parse_rank_log(data, rank, str(path.relative_to(run)))


def load_exit_report(path: Path, run: Path, missing: list[str]) -> RankExitReport | None:
    """None if the file is not an exit report. `run`: directory that its name is shown relative to."""
    data, rank = read_json_object(path, missing, MAX_OBJECT_BYTES), rank_from_file_name(path.name)
    code = _as_int(data.get("code"))
    if rank is None or code is None:
        return None
    why = str(data.get("why", ""))[:500]
    source = str(path.relative_to(run))
    return RankExitReport(rank, code, why, _as_int(data.get("step")), data.get("follows") is True, source)


def _readings_from_heartbeat(heartbeat: dict[str, Any], attempt: int) -> RankReadings | None:
    """None for the heartbeat of an earlier attempt."""
    rank = _as_int(heartbeat.get("rank"))
    if rank is None or _as_int(heartbeat.get("restart")) not in (None, attempt - 1):
        return None
    phase = heartbeat.get("phase")
    return RankReadings(
        rank,
        str(heartbeat.get("host") or ""),
        step=_as_int(heartbeat.get("step")),
        phase=phase if isinstance(phase, str) else None,
        data_wait_ms=_as_finite_float(heartbeat.get("data_wait_ms")),
        blocks_left=_as_int(heartbeat.get("blocks_left")),
    )


def _nodes_from_run_record(record: dict[str, Any]) -> dict[int, str]:
    nodes, world = record.get("nodes"), _as_int(record.get("world"))
    # torchrun numbers the ranks node by node, with equally many on each.
    if not isinstance(nodes, list) or not nodes or not world or not 0 < world <= 1_000_000 or world % len(nodes):
        return {}
    return {rank: str(nodes[rank * len(nodes) // world]) for rank in range(world)}


def _as_int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _as_finite_float(value: object) -> float | None:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return number if number is not None and math.isfinite(number) else None


# Any directory

LIVE_EVIDENCE_ADAPTER: Final = TypeAdapter(LiveEvidence)
PROCESS_ADAPTER: Final = TypeAdapter(RankProcess)
PROCESS_ROWS_ADAPTER: Final = TypeAdapter(list[dict[str, Any]])
NODE_OF_RANK_ADAPTER: Final = TypeAdapter(dict[int, str])
SENTENCES_ADAPTER: Final = TypeAdapter(list[str])
# `node-n1.ras-2.json` as captured, `ras_poll2.json` as people name them
POLL_NAME: Final = re.compile(r"(?P<series>.*?)(?:\.ras-|[._-]poll[._-]?)\d+\.(?:json|txt)")
ARCHIVE_SUFFIXES: Final = (".gz", ".tgz", ".tar", ".zip", ".bz2", ".xz", ".zst", ".7z")


class NoEvidenceError(Exception):
    """The directory holds no usable evidence; the text says what was expected, in a sentence."""


def load_evidence(directory: Path) -> Evidence:
    """Raises NoEvidenceError. Files that cannot be used are listed in `unreadable` and `missing` of the result."""
    try:
        listing = list_evidence_files(directory)
    except NotADirectoryError:
        raise NoEvidenceError(
            f"{directory}: this is not a directory; give the directory that contains the dumps"
        ) from None
    except OSError as error:
        raise NoEvidenceError(f"{directory}: cannot be read: {error.strerror or error}") from None
    missing = [*listing.missing, *_archive_warnings(listing.files)]
    kinds: dict[EvidenceKind, list[ListedFile]] = defaultdict(list)
    for file in listing.files:
        kinds[file.kind].append(file)
    # Before anything is read: the answer is that the directory holds two hangs.
    _require_one_record_per_rank(directory, kinds[EvidenceKind.RECORD])
    manifest = read_json_object(directory / MANIFEST_NAME, missing)
    run = load_run_evidence(directory)
    records, unreadable = _load_records(kinds[EvidenceKind.RECORD])
    stacks = tuple(_load_stacks(kinds[EvidenceKind.STACKS], missing))
    processes = tuple(_load_processes(kinds[EvidenceKind.PROCESSES], missing))
    ras = tuple(_load_ras_polls(directory, kinds[EvidenceKind.RAS], missing))
    # A capture knows more than heartbeats: power, faults and suspects.
    live = _load_live_evidence(directory / LIVE_EVIDENCE_NAME, missing) or run.live
    exit_reports = (*run.exit_reports, *_load_exit_reports(directory, kinds[EvidenceKind.EXIT_REPORT], missing))
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
        EvidenceKind.EXIT_REPORT,
        EvidenceKind.LOG,
    )
    return Evidence(
        records=records,
        unreadable=unreadable,
        stacks=stacks,
        processes=processes,
        ras=ras,
        live=live,
        exit_reports=exit_reports,
        node_of_rank=run.node_of_rank | _nodes_from_manifest(manifest),
        sources=tuple(file.name for kind in used for file in kinds[kind]),
        missing=(*_missing_from_manifest(manifest), *run.missing, *missing),
        logs=logs,
    )


def _require_one_record_per_rank(directory: Path, records: Sequence[ListedFile]) -> None:
    """Records of one rank in two directories are of two hangs, and mixing them would blame the wrong rank.

    Directories that hold different ranks are one set: dumps are often copied node by node.
    """
    folder_of: dict[int, Path] = {}
    for file in records:
        rank = rank_from_file_name(file.name)
        if rank is not None and folder_of.setdefault(rank, file.path.parent) != file.path.parent:
            folders = sorted({str(each.path.parent.relative_to(directory)) for each in records})
            more = f" and {len(folders) - 4} more" if len(folders) > 4 else ""
            raise NoEvidenceError(
                f"{directory}: rank {rank} has records in several directories: {', '.join(folders[:4])}{more}; "
                "choose one of them"
            )


def _no_evidence_message(directory: Path, files: int, missing: Sequence[str]) -> str:
    if missing:
        return f"{directory}: it contains no usable evidence: {'; '.join(missing[:3])}"
    held = f"none of the {files:,} files was recognized"
    if files < 2:
        held = "the only file was not recognized" if files else "the directory is empty"
    return (
        f"{directory}: no flight records, stacks or NCCL RAS reports were found: {held}. Give a directory of torch's "
        "dumps (TORCH_FR_DUMP_TEMP_FILE), a capture of wattwatch, or a run directory"
    )


def _archive_warnings(files: Sequence[ListedFile]) -> Iterable[str]:
    packed = [file.name for file in files if file.name.lower().endswith(ARCHIVE_SUFFIXES)]
    if packed:
        if len(packed) == 1:
            yield f"{packed[0]} is an archive: unpack it and run this command again"
        else:
            yield (
                f"{len(packed):,} files are archives, for example {packed[0]}: unpack all of them and run this command "
                "again"
            )


def _load_records(files: Sequence[ListedFile]) -> tuple[tuple[RankRecord, ...], tuple[UnreadableRecord, ...]]:
    """With file names relative to the directory, like those of all other evidence."""
    if not files:
        return (), ()
    names = {str(file.path): file.name for file in files}
    records, unreadable = read_flight_records([file.path for file in files])
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
        missing.append(f"{path.name}: {where}: {describe_invalid_value(first)}")
    return None


def _data(file: ListedFile, missing: list[str]) -> bytes | None:
    try:
        return read_regular_file(file.path)
    except OSError as error:
        missing.append(f"{file.name}: cannot be read: {error.strerror or error}")
        return None


def _load_stacks(files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankStacks]:
    for file in files:
        data, rank = _data(file, missing), rank_from_file_name(file.name)
        if data is None:
            continue
        if rank is None:
            missing.append(f"{file.name}: the file name contains no rank: rename the file, for example to rank-3.txt")
        elif stacks := parse_stacks(data.decode("utf-8", "replace"), rank, file.name):
            yield stacks
        else:
            missing.append(f"{file.name}: it contains no stack dump of faulthandler or py-spy")


def _load_exit_reports(directory: Path, files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankExitReport]:
    for file in files:
        if (report := load_exit_report(file.path, directory, missing)) is not None:
            yield report


def _load_logs(files: Iterable[ListedFile], manifest: dict[str, Any], missing: list[str]) -> Iterable[RankLog]:
    listed = manifest.get("files")
    for file in files:
        data, rank = _data(file, missing), rank_from_file_name(file.name)
        log = None if data is None or rank is None else parse_rank_log(data, rank, file.name)
        if log is not None:
            # Copying a capture changes modification times, so the age at the time of the capture is in its manifest.
            entry = listed.get(file.path.name) if isinstance(listed, dict) else None
            age = entry.get("age_seconds") if isinstance(entry, dict) else None
            yield replace(log, age_seconds=float(age) if isinstance(age, (int, float)) else None)


def _load_processes(files: Iterable[ListedFile], missing: list[str]) -> Iterable[RankProcess]:
    for file in files:
        node = Path(file.name).name.removeprefix("node-").removesuffix(".processes.json")
        try:
            rows = PROCESS_ROWS_ADAPTER.validate_json(_data(file, missing) or b"[]")
            yield from [_process(row, node, file.name) for row in rows]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            problem = f"{where + ': ' if where else ''}{describe_invalid_value(first)}"
            missing.append(f"{file.name}: it is not a list of processes: {problem}")
        except (KeyError, TypeError, ValueError) as error:
            missing.append(f"{file.name}: it is not a list of processes: {str(error).splitlines()[0]}")


def _process(row: dict[str, Any], node: str, source: str) -> RankProcess:
    fields = {name: row.get(name) for name in ("state", "wait_channel", "cpu_percent")}
    fields["kernel_stack"] = row.get("kernel_stack") or ()
    process: RankProcess = PROCESS_ADAPTER.validate_python(
        {"rank": row.get("rank"), "node": node, "pid": row["pid"], "source": source, **fields}
    )
    return process


def _load_ras_polls(directory: Path, files: Sequence[ListedFile], missing: list[str]) -> Iterable[RasPolls]:
    """Reports whose names differ only in the number of the poll are of one node, oldest first."""
    series: dict[str, list[ListedFile]] = defaultdict(list)
    for file in files:
        match = POLL_NAME.fullmatch(file.path.name)
        series[str(file.path.parent / (match["series"] if match else file.path.name))].append(file)
    for key, group in sorted(series.items()):
        reports = [(file.name, data) for file in group if (data := _data(file, missing)) is not None]
        name = Path(key).name
        # Captures note how far apart the two reports are; reports that people saved have no such file.
        meta = read_json_object(directory / f"{name}.ras.json", missing)
        interval_seconds, problem = meta.get("apart_seconds"), meta.get("trouble")
        node = name.removeprefix("node-") if name.startswith("node-") else ""
        yield parse_polls(
            node,
            reports,
            float(interval_seconds) if isinstance(interval_seconds, (int, float)) else None,
            str(problem) if problem else None,
        )
