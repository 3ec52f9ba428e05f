"""One line of a node's probe (bytes) -> one `NodeSample`. The line's fields are described in probe/README.md.

The probe ships what is large only when it changes, so a reader belongs to one connection: it keeps the last state of
each log, heartbeat and checkpoint directory, and each board's energy counter for the mean watts between two lines.
Whatever the bytes are, nothing is raised: what is no line of ours is counted in `garbage_bytes` and skipped; a line
of ours with a value of the wrong kind becomes a sample with status PARSE_ERROR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from collectors.checkpoints import Listing, facts_from_json, read_checkpoints, root_from_json
from collectors.cpu_share import CpuShares
from collectors.kernel_log import read_kernel_line
from collectors.nvml import HANDLE, gpu_from_nvml, host_status_of, missing_from_nvml
from collectors.probe.node_probe import TAIL_BYTES
from collectors.probe.request import ProbeRequest
from collectors.progress import read_heartbeat, read_progress
from collectors.samples import (
    CheckpointSample,
    FilesystemSample,
    GpuSample,
    HostLoad,
    HostStatus,
    HungCall,
    KernelEvent,
    MissingGpu,
    NodeSample,
    ProcessSample,
    ProgressSample,
    WorkerSample,
)
from collectors.smi import FALLBACK_QUERY_FIELDS, QUERY_FIELDS, SmiReport, read_query_csv
from collectors.stop_lines import read_stop

LONGEST_LINE_BYTES: Final = 64 * 1024
GPU_CALLS: Final = frozenset({"nvml", "nvidia-smi"})
KEPT_SECONDS: Final = 10.0
"""How long the last process list and load stand in for a line that came before the node had read them."""
JUDGE_CHECKPOINTS_SECONDS: Final = 5.0
WRONG: Final = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
HOST: Final = re.compile(r'"host":\s*"([^"]*)"')


@dataclass(slots=True)
class Gpus:
    """The last answer about boards. `read_seconds`: the node's clock when it was asked for; None: never yet."""

    status: HostStatus = HostStatus.SAMPLER_TIMEOUT
    detail: str = "no GPU reading yet"
    source: str = ""
    boards: tuple[GpuSample, ...] | None = None
    missing: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()
    read_seconds: float | None = None


@dataclass(slots=True)
class Source:
    """One log or heartbeat: its text, the sample read from it, and since when it is unchanged on the node's clock."""

    sample: ProgressSample
    changed_seconds: float
    host: str = ""  # of a heartbeat
    tail: str = ""  # of a log, with its end in the file, and whether it begins within a line
    end: int = 0
    cut: bool = False


@dataclass(slots=True)
class Directory:
    """One checkpoint directory as the probe last listed it."""

    listing: Listing = Listing({}, {})
    changed_seconds: dict[str, float] = field(default_factory=dict)  # entry -> when seen to change, node's clock
    listed_seconds: float = 0.0
    judged_seconds: float | None = None
    judged: CheckpointSample | None = None
    initial: frozenset[str] | None = None  # names of the first listing


class LineReader:
    """Reads the lines of one connection, in their order."""

    def __init__(self, node: str, request: ProbeRequest) -> None:
        self.node = node
        self.garbage_bytes = 0
        self._request = request
        # A call is hung after five intervals, but not before 5 s (nvidia-smi without persistence) nor after 10 s.
        self._hung_seconds = min(10.0, max(5.0, 5 * request.interval_seconds))
        self._gpus = Gpus()
        self._energy: dict[str, tuple[float, float]] = {}
        self._progress: dict[str, Source] = {}
        self._heartbeats: dict[str, Source] = {}
        self._directories: dict[str, Directory] = {}
        self._filesystems: dict[str, FilesystemSample] = {}
        self._processes: tuple[ProcessSample, ...] | None = None
        self._processes_seconds = 0.0
        self._workers: tuple[WorkerSample, ...] = ()
        self._shares = CpuShares()
        self._driver: str | None = None
        self._load = HostLoad()
        self._host = ""
        self._node_warnings: tuple[str, ...] = ()
        self._kernel_warning: tuple[str, ...] = ()

    def read(self, line: bytes, received_seconds: float) -> NodeSample | None:
        """The sample of this line; None where it is none of ours. `received_seconds`: control host's monotonic."""
        message = self._message(line)
        if message is None:
            return None
        try:
            sequence, now, wall = _integer(message["seq"]), _real(message["t"]), _real(message["w"])
        except WRONG:
            return self._unreadable("seq, t or w is missing or no number", 0, 0.0, 0.0, received_seconds)
        try:
            return self._sample(message, sequence, now, wall, received_seconds)
        except WRONG as error:
            detail = f"line {sequence} has a value of the wrong kind: {type(error).__name__}: {error}"
            return self._unreadable(detail, sequence, now, wall, received_seconds)

    def _message(self, line: bytes) -> dict[str, Any] | None:
        message = None
        if line.startswith(b'{"v":1,') and len(line) <= LONGEST_LINE_BYTES:
            try:
                message = orjson.loads(line)
            except orjson.JSONDecodeError:
                message = None
        if isinstance(message, dict):
            return message
        self.garbage_bytes += len(line.strip())
        return None

    def _unreadable(self, detail: str, sequence: int, now: float, wall: float, received: float) -> NodeSample:
        return NodeSample(self.node, HostStatus.PARSE_ERROR, detail, sequence, now, wall, received)

    def _sample(
        self, message: Mapping[str, Any], sequence: int, now: float, wall: float, received: float
    ) -> NodeSample:
        hello = message.get("hello")
        if hello is not None:
            self._host = short_name(str(hello["host"]))
        if "gpu" in message:
            self._read_gpus(message["gpu"], now)
        for path, changed, text in message.get("beat", ()):
            self._take_heartbeat(str(path), changed, text, now, wall)
        for row in message.get("log", ()):
            self._take_log(row, now, wall)
        for news in message.get("ckpt", ()):
            self._take_listing(news)
        for directory, listed in message.get("listed", ()):
            self._directories.setdefault(str(directory), Directory()).listed_seconds = float(listed)
        for path, free, total, error, *kind in message.get("fs", ()):
            mount = _text(kind[0]) if kind else None
            self._filesystems[str(path)] = FilesystemSample(str(path), _whole(free), _whole(total), _text(error), mount)
        if "load" in message:
            load, cpus, cpu, io, memory, *sizes = message["load"]
            pressures = _maybe_real(cpu), _maybe_real(io), _maybe_real(memory)
            self._load = HostLoad(_maybe_real(load), _whole(cpus), *pressures, *map(_whole, sizes[:3]))
        if "work" in message:
            self._workers = self._read_workers(message["work"], now)
        if "proc" in message:
            self._processes, self._processes_seconds = self._read_processes(message["proc"], now), now
        elif now - self._processes_seconds > KEPT_SECONDS:
            self._processes = None
        if "warn" in message:
            self._node_warnings = tuple(str(text) for text in message["warn"])
        if "kmsg_error" in message:
            self._kernel_warning = (str(message["kmsg_error"]),)

        gpus = self._gpus
        status, detail, boards = gpus.status, gpus.detail, gpus.boards
        hung: tuple[HungCall, ...] = ()
        for call, age in message.get("busy", ()):
            seconds = _real(age)
            if seconds >= self._hung_seconds:
                hung += (HungCall(str(call), seconds),)
            if call in GPU_CALLS:
                if seconds >= self._hung_seconds:
                    status, boards = HostStatus.SAMPLER_TIMEOUT, None
                    detail = f"{call} has not answered for {seconds:.0f} s"
                elif gpus.read_seconds is None:
                    detail = f"{call} has not answered yet, after {seconds:.1f} s"
        return NodeSample(
            self.node,
            status,
            detail,
            sequence,
            now,
            wall,
            received,
            gpus.source,
            boards,
            gpus.missing,
            gpus.warnings + self._node_warnings + self._kernel_warning,
            self._processes,
            self._progress_samples(now),
            self._checkpoint_samples(now),
            self._kernel_events(message),
            hung,
            tuple(self._filesystems.values()),
            self._load,
            max(0.0, now - gpus.read_seconds) if gpus.read_seconds is not None else 0.0,
            self._workers,
            self._driver,
        )

    # GPUs

    def _read_gpus(self, answer: Mapping[str, Any], now: float) -> None:
        asked = _real(answer.get("t", now))
        self._driver = _text(answer.get("driver"))
        if answer["src"] == "nvml":
            self._gpus = self._read_nvml(answer["rows"], asked)
            return
        report = self._read_smi(answer)
        boards = report.snapshots[-1].gpus if report.snapshots else None
        detail = report.detail
        if "nvml" in answer:
            detail = "; ".join(filter(None, (detail, host_status_of(int(answer["nvml"]))[1])))
        failed = report.status is not HostStatus.OK
        source = "shell" if answer["src"] == "shell" else "nvidia-smi"
        self._gpus = Gpus(
            report.status, detail if failed else "", source, boards, report.missing_gpus, report.warnings, asked
        )

    def _read_smi(self, answer: Mapping[str, Any]) -> SmiReport:
        fields: Sequence[str] = QUERY_FIELDS
        if answer.get("few"):
            fields = FALLBACK_QUERY_FIELDS
        elif "fields" in answer:
            fields = tuple(str(name) for name in answer["fields"])
        out, err = str(answer["out"]).encode(), str(answer.get("err", "")).encode()
        return read_query_csv(out, err, int(answer["rc"]), fields)

    def _read_nvml(self, rows: Sequence[Sequence[Any]], asked: float) -> Gpus:
        boards: list[GpuSample] = []
        missing: list[MissingGpu] = []
        energy: dict[str, tuple[float, float]] = {}
        for entry in rows:
            row, errors = entry[0], entry[1] if len(entry) > 1 else None
            if errors and HANDLE in errors:
                lost = missing_from_nvml(row, errors)
                if lost is not None:
                    missing.append(lost)
                    continue
            board = gpu_from_nvml(row, errors, self._energy.get(row[1]), asked)
            if board.energy_joules is not None and board.uuid is not None:
                energy[board.uuid] = (asked, board.energy_joules)
            boards.append(board)
        self._energy = energy
        if boards:
            return Gpus(HostStatus.OK, "", "nvml", tuple(boards), tuple(missing), (), asked)
        if missing:
            status, detail = host_status_of(int(rows[0][1][HANDLE]))
            return Gpus(status, f"no board gave a handle: {detail}", "nvml", None, tuple(missing), (), asked)
        return Gpus(HostStatus.NO_DEVICES, "NVML counts no board", "nvml", None, (), (), asked)

    # Processes

    def _read_processes(self, rows: Sequence[Sequence[Any]] | None, now: float) -> tuple[ProcessSample, ...] | None:
        if rows is None:
            return None
        index_of = {board.uuid: board.index for board in self._gpus.boards or () if board.index is not None}
        rank_of = {beat.sample.pid: beat.sample.rank for beat in self._heartbeats.values() if beat.host == self._host}
        samples = []
        for pid, started, state, name, cpu_seconds, held, *waits_in in rows:
            indexes = tuple(
                index for index in (one if type(one) is int else index_of.get(one) for one in held) if index is not None
            )
            samples.append(
                ProcessSample(
                    _integer(pid), str(name), str(state), _real(started), _maybe_real(cpu_seconds), indexes,
                    rank_of.get(pid), self._shares.of((pid, started), _maybe_real(cpu_seconds), now),
                    _text(waits_in[0]) if waits_in else None,
                )
            )  # fmt: skip
        self._shares.forget(now)
        return tuple(samples)

    def _read_workers(self, rows: Sequence[Sequence[Any]], now: float) -> tuple[WorkerSample, ...]:
        return tuple(
            WorkerSample(
                _integer(pid), _integer(parent), str(name), str(state),
                self._shares.of((pid, _real(started)), _maybe_real(cpu_seconds), now), _text(waits_in),
            )
            for parent, pid, started, state, name, cpu_seconds, waits_in in rows
        )  # fmt: skip

    # Progress

    def _take_heartbeat(self, path: str, changed: Any, text: Any, now: float, wall: float) -> None:
        if text is None:
            self._heartbeats.pop(path, None)
            return
        sample = read_heartbeat(str(text), path)
        since = _changed(self._heartbeats.get(path), _real(changed), now, wall)
        self._heartbeats[path] = Source(sample, since, host=heartbeat_host(str(text)))

    def _take_log(self, row: Sequence[Any], now: float, wall: float) -> None:
        place, path, start, end, changed, text = row
        if start is None:
            self._progress.pop(path, None)
            return
        known = self._progress.get(path)
        if known is not None and known.end == start:
            tail, cut = known.tail + str(text), known.cut
        else:
            tail, cut = str(text), start > 0
        if len(tail) > TAIL_BYTES:
            tail, cut = tail[-TAIL_BYTES:], True
        pattern = self._request.logs[place].pattern if 0 <= place < len(self._request.logs) else None
        world = next((beat.sample.world for beat in self._heartbeats.values() if beat.sample.world), None)
        sample = read_progress(tail, str(path), pattern, world, cut)
        if sample.step is None and known is not None and known.sample.step is not None and known.end == start:
            sample = known.sample  # 8 KB of other output have pushed the last step line out: it still stands
        sample = _with_stop(sample, tail, pattern)
        since = _changed(known, _real(changed), now, wall)
        self._progress[str(path)] = Source(sample, since, "", tail, _integer(end), cut)

    def _progress_samples(self, now: float) -> tuple[ProgressSample, ...]:
        return tuple(
            _aged(source.sample, max(0.0, now - source.changed_seconds))
            for sources in (self._heartbeats, self._progress)
            for source in sources.values()
        )

    # Checkpoints

    def _take_listing(self, news: Mapping[str, Any]) -> None:
        listed, wall = _real(news["t"]), _real(news["w"])
        known = self._directories.setdefault(str(news["dir"]), Directory())
        folders = dict(known.listing.folders)
        root, error = known.listing.root, known.listing.error
        if "names" in news:
            names, error = frozenset(map(str, news["names"])), news["error"]
            folders = {name: facts for name, facts in folders.items() if name in names}
            if known.initial is None:
                known.initial = names | frozenset(news.get("root", ()))
        initial = known.initial or frozenset()

        def seen_change(name: str, stamp: float) -> None:
            """First sight: the file's own stamp is all there is. Later the change itself was seen, which needs no
            agreement with the clock of a file server."""
            first = name in initial and name not in known.changed_seconds
            known.changed_seconds[name] = listed - max(0.0, wall - stamp) if first else listed

        if "root" in news:
            before, root = root, root_from_json(news["root"])
            for name, file in root.items():
                if before.get(name) != file:
                    seen_change(name, file.changed_seconds)
        for name, raw in news.get("entries", {}).items():
            facts = folders[str(name)] = facts_from_json(raw)
            seen_change(str(name), facts.changed_seconds)
        known.listing = Listing(root, folders, _text(error))
        known.listed_seconds = listed
        known.judged_seconds = None

    def _checkpoint_samples(self, now: float) -> tuple[CheckpointSample, ...]:
        samples = []
        for path, known in self._directories.items():
            due = (
                known.judged_seconds is None or known.listed_seconds - known.judged_seconds > JUDGE_CHECKPOINTS_SECONDS
            )
            if known.judged is None or due:
                ages = {name: max(0.0, known.listed_seconds - at) for name, at in known.changed_seconds.items()}
                known.judged = read_checkpoints(path, known.listing, ages)
                known.judged_seconds = known.listed_seconds
            age = max(0.0, now - known.listed_seconds)
            samples.append(CheckpointSample(path, known.judged.entries, age, known.judged.error))
        return tuple(samples)

    # Kernel log

    def _kernel_events(self, message: Mapping[str, Any]) -> tuple[KernelEvent, ...]:
        events = (read_kernel_line(str(text), _real(age)) for age, text in message.get("kmsg", ()))
        return tuple(event for event in events if event is not None)


def short_name(host: str) -> str:
    return host.split(".")[0]


def heartbeat_host(text: str) -> str:
    """Which host wrote it, for matching pids: the same pid means another process elsewhere."""
    found = HOST.search(text)
    return "" if found is None else short_name(found[1])


def _changed(known: Source | None, stamp: float, now: float, wall: float) -> float:
    """When the source last changed, on the node's monotonic clock: as seen, or by its stamp at first sight."""
    return now if known is not None else now - max(0.0, wall - stamp)


def _aged(sample: ProgressSample, age_seconds: float) -> ProgressSample:
    """The same with its age of now. Spelled out: `dataclasses.replace` costs four times as much, for each rank."""
    return ProgressSample(
        sample.source,
        sample.format,
        sample.step,
        sample.total_steps,
        sample.loss,
        sample.tokens_per_second,
        sample.line_interval_seconds,
        age_seconds,
        sample.rank,
        sample.world,
        sample.pid,
        sample.restart,
        sample.phase,
        sample.data_wait_ms,
        sample.why,
        sample.stopped,
    )


def _with_stop(sample: ProgressSample, tail: str, pattern: str | None) -> ProgressSample:
    """With what the log says of a stop; steps behind that line are of the run after it."""
    stop = read_stop(tail)
    if stop is None and sample.stopped is None:
        return sample
    ended = stop is not None and read_progress(stop.after, pattern=pattern, cut=True).step is None
    return replace(sample, stopped=stop.words if stop is not None and ended else None)


def _is_number(value: object) -> bool:
    return type(value) is float or type(value) is int


def _real(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"expected a number, got {value!r:.60}")
    return float(value)


def _maybe_real(value: Any) -> float | None:
    return None if value is None else _real(value)


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {value!r:.60}")
    return value


def _whole(value: Any) -> int | None:
    return None if value is None else _integer(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)
