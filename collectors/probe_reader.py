"""One line of a node's probe (bytes) -> one `NodeSample`. probe/README.md describes the line.

The probe sends large things only when they change, so a reader belongs to one connection: it keeps the last state of
each log, heartbeat and checkpoint directory, and each GPU's energy counter for the mean watts between two lines. It
never raises, whatever the bytes are: what is not a line of the probe is counted in `garbage_bytes` and skipped, and a
line with a value of the wrong type becomes a sample with status PARSE_ERROR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from wattwatch.collectors.checkpoints import (
    CheckpointListing,
    parse_damage,
    parse_folder,
    parse_root_files,
    read_checkpoints,
)
from wattwatch.collectors.nvml import (
    HANDLE_ERROR,
    UNNAMED_COLUMNS,
    gpu_from_nvml,
    host_status_of,
    missing_from_nvml,
    nvml_columns,
)
from wattwatch.collectors.probe.node_probe import TAIL_BYTES
from wattwatch.collectors.probe.request import ProbeRequest
from wattwatch.collectors.progress import continue_progress, find_external_stop, read_heartbeat, read_progress
from wattwatch.collectors.samples import (
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
from wattwatch.collectors.smi import SmiReport, read_query_csv

MAX_LINE_BYTES: Final = 64 * 1024
GPU_CALLS: Final = frozenset({"nvml", "nvidia-smi"})
PROCESS_LIST_MAX_AGE_SECONDS: Final = 10.0
"""The last process list is kept for at most this long while the node prints lines without a new process list."""
CHECKPOINT_REFRESH_SECONDS: Final = 5.0
"""A checkpoint directory without changes is evaluated again at this interval: some checkpoints count as complete only
after a while without changes."""
WRONG_VALUE_ERRORS: Final = (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError)
HEARTBEAT_HOST: Final = re.compile(r'"host":\s*"([^"]*)"')
UNNAMED_OLD_QUERY_FIELDS: Final = (
    "index", "uuid", "pci.bus_id", "name", "power.draw", "power.limit", "utilization.gpu", "utilization.memory",
    "memory.used", "memory.total", "temperature.gpu", "clocks.sm", "pstate",
)  # fmt: skip
UNNAMED_QUERY_FIELDS: Final = (
    "index", "uuid", "pci.bus_id", "name", "power.draw", "enforced.power.limit", "utilization.gpu",
    "utilization.memory", "memory.used", "memory.total", "temperature.gpu", "clocks.sm", "pstate",
    "clocks_event_reasons.active", "mig.mode.current", "power.draw.average", "power.draw.instant",
)  # fmt: skip
"""In recordings made before release 0.2.0, nvidia-smi was asked for these columns. A line of such a recording names its
columns only if the driver refused some of them. Never change this list."""


@dataclass(slots=True)
class GpuQueryResult:
    """The last answer to a GPU query. `read_seconds`: the node's clock when it was asked; None: no answer
    yet."""

    status: HostStatus = HostStatus.SAMPLER_TIMEOUT
    detail: str = "no GPU reading yet"
    source: str = ""
    gpus: tuple[GpuSample, ...] | None = None
    missing: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()
    read_seconds: float | None = None


@dataclass(slots=True)
class ProgressSource:
    """One log or heartbeat: its text, the sample read from it, and when it last changed on the node's clock."""

    sample: ProgressSample
    changed_seconds: float
    host: str = ""  # of a heartbeat
    tail: str = ""  # of a log, with its end in the file, and whether it begins in the middle of a line
    end: int = 0
    cut: bool = False


@dataclass(slots=True)
class CheckpointDirectoryState:
    """One checkpoint directory as the probe last listed it, and the sample made from it."""

    listing: CheckpointListing = CheckpointListing({}, {})
    changed_seconds: dict[str, float] = field(default_factory=dict)  # entry -> when it changed, on the node's clock
    listed_seconds: float = 0.0
    evaluated_seconds: float | None = None
    sample: CheckpointSample | None = None
    initial: frozenset[str] | None = None  # names of the first listing


# The reader ---------------------------------------------------------------------------------------------------------


class ProbeReader:
    """Reads the lines of one connection, in order."""

    def __init__(self, node: str, request: ProbeRequest) -> None:
        self.node = node
        self.garbage_bytes = 0
        self._request = request
        # A call counts as hung after five intervals, but not before 5 s (nvidia-smi without persistence mode takes
        # seconds) and not later than 10 s.
        self._hung_seconds = min(10.0, max(5.0, 5 * request.interval_seconds))
        self._gpu_answer = GpuQueryResult()
        self._energy: dict[str, tuple[float, float]] = {}
        self._progress: dict[str, ProgressSource] = {}
        self._heartbeats: dict[str, ProgressSource] = {}
        self._directories: dict[str, CheckpointDirectoryState] = {}
        self._filesystems: dict[str, FilesystemSample] = {}
        self._processes: tuple[ProcessSample, ...] | None = None
        self._processes_seconds = 0.0
        self._held: frozenset[ProcessKey] = frozenset()  # processes of the last list that held a GPU
        self._exited: frozenset[ProcessKey] = frozenset()
        self._unlisted: frozenset[ProcessKey] = frozenset()
        self._workers: tuple[WorkerSample, ...] = ()
        self._shares = CpuShareTracker()
        self._driver: str | None = None
        self._load = HostLoad()
        self._host = ""
        self._node_warnings: tuple[str, ...] = ()
        self._kernel_warning: tuple[str, ...] = ()

    def read(self, line: bytes, received_seconds: float) -> NodeSample | None:
        """The sample of this line; None if it is not a line of the probe.

        `received_seconds`: the control host's monotonic clock.
        """
        message = self._message(line)
        if message is None:
            return None
        try:
            sequence, now, wall = _to_int(message["seq"]), _to_float(message["t"]), _to_float(message["w"])
        except WRONG_VALUE_ERRORS:
            return self._unreadable(
                'the field "seq", "t" or "w" of the line is missing or not a number', 0, 0.0, 0.0, received_seconds
            )
        try:
            return self._sample(message, sequence, now, wall, received_seconds)
        except WRONG_VALUE_ERRORS as error:
            detail = f"line {sequence} has a value of the wrong type: {type(error).__name__}: {error}"
            return self._unreadable(detail, sequence, now, wall, received_seconds)

    def _message(self, line: bytes) -> dict[str, Any] | None:
        message = None
        # Cheap test first: a login shell may print megabytes that are not worth parsing.
        if line.startswith(b'{"v":1,') and len(line) <= MAX_LINE_BYTES:
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
            self._host = short_host_name(str(hello["host"]))
        if "gpu" in message:
            self._read_gpus(message["gpu"], now)
        for path, changed, text in message.get("beat", ()):
            self._update_heartbeat(str(path), changed, text, now, wall)
        for row in message.get("log", ()):
            self._update_log(row, now, wall)
        for news in message.get("ckpt", ()):
            self._update_directory(news)
        for directory, listed in message.get("listed", ()):
            self._directories.setdefault(str(directory), CheckpointDirectoryState()).listed_seconds = float(listed)
        for path, free, total, error, *kind in message.get("fs", ()):
            mount = _to_optional_text(kind[0]) if kind else None
            self._filesystems[str(path)] = FilesystemSample(
                str(path), _to_optional_int(free), _to_optional_int(total), _to_optional_text(error), mount
            )
        if "load" in message:
            load, cpus, cpu, io, memory, *sizes = message["load"]
            pressures = _to_optional_float(cpu), _to_optional_float(io), _to_optional_float(memory)
            self._load = HostLoad(
                _to_optional_float(load), _to_optional_int(cpus), *pressures, *map(_to_optional_int, sizes[:3])
            )
        if "work" in message:
            self._workers = self._read_workers(message["work"], now)
        # A slow node may print a line before its process list is ready: keep the last one for a while.
        if "proc" in message:
            self._processes, self._processes_seconds = self._read_processes(message["proc"], now), now
            self._follow_exits(message)
        elif now - self._processes_seconds > PROCESS_LIST_MAX_AGE_SECONDS:
            self._processes = None
        if "warn" in message:
            self._node_warnings = tuple(str(text) for text in message["warn"])
        if "kmsg_error" in message:
            self._kernel_warning = (str(message["kmsg_error"]),)

        answer = self._gpu_answer
        status, detail, gpus = answer.status, answer.detail, answer.gpus
        hung: tuple[HungCall, ...] = ()
        for call, age in message.get("busy", ()):
            seconds = _to_float(age)
            if seconds >= self._hung_seconds:
                hung += (HungCall(str(call), seconds),)
            if call in GPU_CALLS:
                # Old readings must not look current: a hung query makes the GPUs unknown.
                if seconds >= self._hung_seconds:
                    status, gpus = HostStatus.SAMPLER_TIMEOUT, None
                    detail = f"{call} has not answered for {seconds:.0f} s"
                elif answer.read_seconds is None:
                    detail = f"{call} has not answered yet ({seconds:.1f} s so far)"
        return NodeSample(
            self.node,
            status,
            detail,
            sequence,
            now,
            wall,
            received,
            answer.source,
            gpus,
            answer.missing,
            answer.warnings + self._node_warnings + self._kernel_warning,
            self._processes,
            self._progress_samples(now),
            self._checkpoint_samples(now),
            self._kernel_events(message),
            hung,
            tuple(self._filesystems.values()),
            self._load,
            max(0.0, now - answer.read_seconds) if answer.read_seconds is not None else 0.0,
            self._workers,
            self._driver,
            self._exited,
            self._unlisted,
            self._kernel_warning[0] if self._kernel_warning else "",
        )

    # GPUs

    def _read_gpus(self, answer: Mapping[str, Any], now: float) -> None:
        asked_seconds = _to_float(answer.get("t", now))
        self._driver = _to_optional_text(answer.get("driver"))
        if answer["src"] == "nvml":
            self._gpu_answer = self._read_nvml(
                answer["rows"], tuple(answer.get("columns", UNNAMED_COLUMNS)), asked_seconds
            )
            return
        report = self._read_smi(answer)
        gpus = report.snapshots[-1].gpus if report.snapshots else None
        detail = report.detail
        if "nvml" in answer:
            detail = "; ".join(filter(None, (detail, host_status_of(int(answer["nvml"]))[1])))
        failed = report.status is not HostStatus.OK
        source = "shell" if answer["src"] == "shell" else "nvidia-smi"
        self._gpu_answer = GpuQueryResult(
            report.status, detail if failed else "", source, gpus, report.missing_gpus, report.warnings, asked_seconds
        )

    def _read_smi(self, answer: Mapping[str, Any]) -> SmiReport:
        if "fields" in answer:
            fields: Sequence[str] = tuple(str(name) for name in answer["fields"])
        else:
            fields = UNNAMED_OLD_QUERY_FIELDS if answer.get("few") else UNNAMED_QUERY_FIELDS
        out, err = str(answer["out"]).encode(), str(answer.get("err", "")).encode()
        return read_query_csv(out, err, int(answer["rc"]), fields)

    def _read_nvml(self, rows: Sequence[Sequence[Any]], names: tuple[str, ...], asked_seconds: float) -> GpuQueryResult:
        gpus: list[GpuSample] = []
        missing: list[MissingGpu] = []
        energy: dict[str, tuple[float, float]] = {}
        columns, uuid = nvml_columns(names), names.index("uuid")
        for entry in rows:
            row, errors = entry[0], entry[1] if len(entry) > 1 else None
            if errors and HANDLE_ERROR in errors:
                unopened = missing_from_nvml(row, errors, columns)
                if unopened is not None:
                    missing.append(unopened)
                    continue
            gpu = gpu_from_nvml(row, errors, self._energy.get(row[uuid]), asked_seconds, columns)
            if gpu.energy_joules is not None and gpu.uuid is not None:
                energy[gpu.uuid] = (asked_seconds, gpu.energy_joules)
            gpus.append(gpu)
        self._energy = energy  # only GPUs of this line: one that disappears and returns starts a new interval
        if gpus:
            return GpuQueryResult(HostStatus.OK, "", "nvml", tuple(gpus), tuple(missing), (), asked_seconds)
        if missing:
            status, detail = host_status_of(int(rows[0][1][HANDLE_ERROR]))
            return GpuQueryResult(
                status, f"NVML cannot open any GPU: {detail}", "nvml", None, tuple(missing), (), asked_seconds
            )
        return GpuQueryResult(HostStatus.NO_DEVICES, "NVML reports no GPU", "nvml", None, (), (), asked_seconds)

    # Processes

    def _read_processes(self, rows: Sequence[Sequence[Any]] | None, now: float) -> tuple[ProcessSample, ...] | None:
        if rows is None:
            return None
        index_of = {gpu.uuid: gpu.index for gpu in self._gpu_answer.gpus or () if gpu.index is not None}
        rank_of = {each.sample.pid: each.sample.rank for each in self._heartbeats.values() if each.host == self._host}
        samples = []
        for pid, started, state, name, cpu_seconds, held, *waits_in in rows:
            indexes = tuple(
                index for index in (one if type(one) is int else index_of.get(one) for one in held) if index is not None
            )
            samples.append(
                ProcessSample(
                    _to_int(pid), str(name), str(state), _to_float(started), _to_optional_float(cpu_seconds), indexes,
                    rank_of.get(pid), self._shares.share((pid, started), _to_optional_float(cpu_seconds), now),
                    _to_optional_text(waits_in[0]) if waits_in else None,
                )
            )  # fmt: skip
        self._shares.forget(now)
        return tuple(samples)

    def _follow_exits(self, message: Mapping[str, Any]) -> None:
        if "exited" in message:
            self._exited = frozenset((_to_int(pid), _to_float(started)) for pid, started in message["exited"])
            self._unlisted = frozenset(
                (_to_int(pid), _to_float(started)) for pid, started in message.get("unlisted", ())
            )
            return
        # Python probes of releases before 0.3.0 send no such list. They send null once none of the processes that
        # held a GPU exists; if some of them existed before, these have exited.
        if message["proc"] is None:
            self._exited |= self._held
        else:
            held = (row for row in message["proc"] if row[5])
            self._held = frozenset((_to_int(row[0]), _to_float(row[1])) for row in held)

    def _read_workers(self, rows: Sequence[Sequence[Any]], now: float) -> tuple[WorkerSample, ...]:
        return tuple(
            WorkerSample(
                _to_int(pid), _to_int(parent), str(name), str(state),
                self._shares.share((pid, _to_float(started)), _to_optional_float(cpu_seconds), now),
                _to_optional_text(waits_in),
            )
            for parent, pid, started, state, name, cpu_seconds, waits_in in rows
        )  # fmt: skip

    # Progress

    def _update_heartbeat(self, path: str, changed: Any, text: Any, now: float, wall: float) -> None:
        if text is None:
            self._heartbeats.pop(path, None)
            return
        sample = read_heartbeat(str(text), path)
        since = _change_time(self._heartbeats.get(path), _to_float(changed), now, wall)
        self._heartbeats[path] = ProgressSource(sample, since, host=heartbeat_host(str(text)))

    def _update_log(self, row: Sequence[Any], now: float, wall: float) -> None:
        place, path, start, end, changed, text = row
        if start is None:
            self._progress.pop(path, None)
            return
        known = self._progress.get(path)
        # Appended to what we have, or a new tail of a file that was rotated, truncated or not seen before.
        if known is not None and known.end == start:
            tail, cut = known.tail + str(text), known.cut
        else:
            tail, cut = str(text), start > 0
        if len(tail) > TAIL_BYTES:
            tail, cut = tail[-TAIL_BYTES:], True
        pattern = self._request.logs[place].pattern if 0 <= place < len(self._request.logs) else None
        world = next((each.sample.world for each in self._heartbeats.values() if each.sample.world), None)
        previous = known.sample if known is not None and known.end == start else None
        sample = continue_progress(read_progress(tail, str(path), pattern, world, cut, previous=previous), previous)
        sample = _with_stop(sample, tail, pattern)
        since = _change_time(known, _to_float(changed), now, wall)
        self._progress[str(path)] = ProgressSource(sample, since, "", tail, _to_int(end), cut)

    def _progress_samples(self, now: float) -> tuple[ProgressSample, ...]:
        return tuple(
            _with_age(source.sample, max(0.0, now - source.changed_seconds))
            for sources in (self._heartbeats, self._progress)
            for source in sources.values()
        )

    # Checkpoints

    def _update_directory(self, news: Mapping[str, Any]) -> None:
        listed, wall = _to_float(news["t"]), _to_float(news["w"])
        known = self._directories.setdefault(str(news["dir"]), CheckpointDirectoryState())
        folders = dict(known.listing.folders)
        root, error, damaged = known.listing.root, known.listing.error, known.listing.damaged
        if "names" in news:
            names, error = frozenset(map(str, news["names"])), news["error"]
            folders = {name: facts for name, facts in folders.items() if name in names}
            if known.initial is None:
                known.initial = names | frozenset(news.get("root", ()))
        initial = known.initial or frozenset()

        def note_change(name: str, stamp: float) -> None:
            """On first sight the modification time is all there is. Later, the moment at which the change was noticed
            counts: that does not depend on the clock of a file server."""
            first = name in initial and name not in known.changed_seconds
            known.changed_seconds[name] = listed - max(0.0, wall - stamp) if first else listed

        if "root" in news:
            before, root, damaged = root, parse_root_files(news["root"]), parse_damage(news)
            for name, file in root.items():
                if before.get(name) != file:
                    note_change(name, file.changed_seconds)
        for name, raw in news.get("entries", {}).items():
            facts = folders[str(name)] = parse_folder(raw)
            note_change(str(name), facts.changed_seconds)
        known.listing = CheckpointListing(root, folders, _to_optional_text(error), damaged)
        known.listed_seconds = listed
        known.evaluated_seconds = None

    def _checkpoint_samples(self, now: float) -> tuple[CheckpointSample, ...]:
        samples = []
        for path, known in self._directories.items():
            due = (
                known.evaluated_seconds is None
                or known.listed_seconds - known.evaluated_seconds > CHECKPOINT_REFRESH_SECONDS
            )
            if known.sample is None or due:
                ages = {name: max(0.0, known.listed_seconds - at) for name, at in known.changed_seconds.items()}
                known.sample = read_checkpoints(path, known.listing, ages)
                known.evaluated_seconds = known.listed_seconds
            age = max(0.0, now - known.listed_seconds)
            samples.append(CheckpointSample(path, known.sample.entries, age, known.sample.error))
        return tuple(samples)

    # Kernel log

    def _kernel_events(self, message: Mapping[str, Any]) -> tuple[KernelEvent, ...]:
        events = (parse_kernel_line(str(text), _to_float(age)) for age, text in message.get("kmsg", ()))
        return tuple(event for event in events if event is not None)


def short_host_name(host: str) -> str:
    return host.split(".")[0]


def heartbeat_host(text: str) -> str:
    """The host that wrote it: a pid identifies a process only together with its host."""
    found = HEARTBEAT_HOST.search(text)
    return "" if found is None else short_host_name(found[1])


def _change_time(known: ProgressSource | None, stamp: float, now: float, wall: float) -> float:
    """When the source last changed, on the node's monotonic clock: now, or by its modification time on first sight."""
    return now if known is not None else now - max(0.0, wall - stamp)


def _with_age(sample: ProgressSample, age_seconds: float) -> ProgressSample:
    """The same sample with its current age. `dataclasses.replace` would cost four times as much, for every rank."""
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
        sample.epoch,
        sample.epochs,
        sample.epoch_step,
        sample.epoch_steps,
        sample.samples_per_second,
        sample.seconds_per_step,
        sample.eta_seconds,
        sample.guessed,
    )


def _with_stop(sample: ProgressSample, tail: str, pattern: str | None) -> ProgressSample:
    """With what the log says about an external stop. Steps after that line belong to the next run."""
    stop = find_external_stop(tail)
    if stop is None and sample.stopped is None:
        return sample
    ended = stop is not None and read_progress(stop.after, pattern=pattern, cut=True).step is None
    return replace(sample, stopped=stop.description if stop is not None and ended else None)


def _is_number(value: object) -> bool:
    return type(value) is float or type(value) is int


def _to_float(value: Any) -> float:
    if not _is_number(value):
        raise TypeError(f"expected a number, got {value!r:.60}")
    return float(value)


def _to_optional_float(value: Any) -> float | None:
    return None if value is None else _to_float(value)


def _to_int(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"expected a whole number, got {value!r:.60}")
    return value


def _to_optional_int(value: Any) -> int | None:
    return None if value is None else _to_int(value)


def _to_optional_text(value: Any) -> str | None:
    return None if value is None else str(value)


# CPU share of processes
# -------------------------------------------------------------------------------------------------

WINDOW_SECONDS: Final = 10.0
MIN_SPAN_SECONDS: Final = 4.0
"""A CPU share is computed over at least this span: over a shorter span, it would vary too much from moment to moment.
Data loader workers are reported every 5 s, so two reports are enough."""
FORGET_SECONDS: Final = 60.0

ProcessKey = tuple[int, float]  # pid and start time: the kernel reuses pids


@dataclass(slots=True)
class CpuUsage:
    """CPU seconds at the start of the previous and of the current window."""

    previous: tuple[float, float]  # node's monotonic seconds, CPU seconds
    current: tuple[float, float]
    last_seen_seconds: float


class CpuShareTracker:
    """CPU seconds of the processes of one node -> percent of one core over the last seconds."""

    def __init__(self) -> None:
        self._usage: dict[ProcessKey, CpuUsage] = {}
        self._next_cleanup_seconds = 0.0

    def share(self, process: ProcessKey, cpu_seconds: float | None, now: float) -> float | None:
        """Percent of one core over the last one or two windows; None until it was observed for MIN_SPAN_SECONDS."""
        if cpu_seconds is None:
            return None
        known = self._usage.get(process)
        if known is None or cpu_seconds < known.current[1] or now < known.current[0]:
            self._usage[process] = CpuUsage((now, cpu_seconds), (now, cpu_seconds), now)
            return None
        known.last_seen_seconds = now
        start, used = known.previous
        share = 100.0 * (cpu_seconds - used) / (now - start) if now - start >= MIN_SPAN_SECONDS else None
        if now - known.current[0] >= WINDOW_SECONDS:
            known.previous, known.current = known.current, (now, cpu_seconds)
        return share

    def forget(self, now: float) -> None:
        """Drop processes that have not been reported for a while."""
        if now < self._next_cleanup_seconds:
            return
        self._next_cleanup_seconds = now + FORGET_SECONDS
        self._usage = {
            process: usage for process, usage in self._usage.items() if now - usage.last_seen_seconds <= FORGET_SECONDS
        }


# Kernel log ---------------------------------------------------------------------------------------------------------
#
# Sources: NVIDIA's Xid messages ("NVRM: Xid (PCI:0000:9b:00): 119, pid=2024380, name=nvidia-smi, ..."; pid and name
# since driver 510, also "pid='<unknown>'"); Linux mm/oom_kill.c; arch/x86/mm/fault.c. What each Xid means is decided
# downstream.

XID: Final = re.compile(
    r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F:.]+)\): (?P<xid>\d+)"
    r"(?:, pid='?(?P<pid>\d+|<unknown>)'?)?(?:, name='?(?P<process>[^,']*)'?)?"
)
OOM_KILLED: Final = re.compile(r"(?:Killed|Kill) process (?P<pid>\d+)(?:,)? \((?P<process>[^)]*)\)")
OOM_CHOICE: Final = re.compile(r"oom-kill:.*\btask=(?P<process>[^,]+),pid=(?P<pid>\d+)")
SEGFAULT: Final = re.compile(r"(?P<process>[^\s\[\]]+)\[(?P<pid>\d+)\]:? (?:segfault at|general protection fault)")


def parse_kernel_line(text: str, age_seconds: float | None = None) -> KernelEvent | None:
    """The fault that a line of the kernel log reports (Xid, out of memory, segmentation fault); None for any other."""
    found = XID.search(text)
    if found is not None:
        pid = found["pid"]
        return KernelEvent(
            "xid",
            text,
            age_seconds,
            xid=int(found["xid"]),
            pci_bus_id=full_bus_id(found["bus"]),
            pid=int(pid) if pid is not None and pid.isdigit() else None,
            process=found["process"] or None,
        )
    for kind, pattern in (("oom", OOM_KILLED), ("oom", OOM_CHOICE), ("segfault", SEGFAULT)):
        found = pattern.search(text)
        if found is not None:
            return KernelEvent(kind, text, age_seconds, pid=int(found["pid"]), process=found["process"])
    return None


def full_bus_id(bus: str) -> str:
    """ "0000:9b:00" -> "00000000:9B:00.0", as nvidia-smi and NVML print it."""
    parts = bus.split(":")
    if len(parts) != 3:
        return bus
    domain, number, device = parts
    return f"{domain.zfill(8)}:{number}:{device if '.' in device else device + '.0'}".upper()
