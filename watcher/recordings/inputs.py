"""Files that hold GPU readings -> node samples in order of time: tool output, logs of it, JSON samples, recordings.

A log knows no connection and no job: it is read as one node under the file's name, at the log's own pace.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import statistics
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from wattwatch.collectors.progress import read_progress
from wattwatch.collectors.samples import GpuSample, HostStatus, NodeSample
from wattwatch.collectors.smi import SmiReport, read_gpu_output
from wattwatch.collectors.smi.columns import read_header
from wattwatch.collectors.smi.csv_format import split_cells
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.recordings.format import RecordedEvent, Recording, is_recording, open_recording, parse_recording

MEBIBYTE: Final = 1024.0**2
MAX_FILE_BYTES: Final = 512 * 1024**2
GZIP_MAGIC: Final = b"\x1f\x8b"
MAX_SILENT_TICKS: Final = 7200  # into one silence: whatever it means has been said by then


class InputError(Exception):
    """The source cannot be read at all: which, why, what to do."""


@dataclass(frozen=True, slots=True)
class GpuLog:
    """Samples of one or more nodes in order of time. Ranks are told where the file tells them."""

    specs: tuple[JobSpec, ...]
    moments: tuple[RecordedEvent, ...]
    status: HostStatus  # of the source as a whole: its last word
    detail: str
    ranks: Mapping[tuple[str, int], int]  # (node, index) -> rank, from JSON samples
    warnings: tuple[str, ...] = ()
    advice: str = ""  # what to do about a source that holds no readings


def split_by_job(log: GpuLog) -> tuple[GpuLog, ...]:
    """One log a job: the jobs of a collection ended at different times, and none is stale because another goes on."""
    if len(log.specs) == 1:
        return (log,)
    return tuple(
        replace(log, specs=(spec,), moments=tuple(m for m in log.moments if m.sample and m.sample.node in spec.nodes))
        for spec in log.specs
    )


def read_input(name: str, data: bytes) -> GpuLog | Recording:
    """What the bytes are decides; the name is only for people. Nothing readable is a status, not an exception."""
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{name}: {len(data) / 1e9:.1f} GB is more than is read at once; give its last part")
    if is_recording(data[:512]):
        return parse_recording(name, io.BytesIO(data))
    if data.startswith(GZIP_MAGIC):
        data = _unzipped(name, data)
    if is_headless_recording(data):
        raise InputError(f"{name}: a wattwatch recording without its beginning: its first line names the jobs")
    pictures = _parse_json_jobs(name, data)
    if pictures is not None:
        return _from_json(name, pictures)
    if hosts := split_by_host_prefix(data):
        return _from_hosts(hosts)
    report = read_gpu_output(data)
    if (trouble := find_mixed_hosts(report)) is not None:
        raise InputError(f"{name}: {trouble}")
    if not any(_has_reading(gpu) for snapshot in report.snapshots for gpu in snapshot.gpus) and describe_training_log(
        data
    ):
        # Its own words ("timeout", a name and a number side by side) are no word of a GPU tool.
        report = SmiReport("", HostStatus.PARSE_ERROR, "")
    log = _from_report(name, report)
    if report.snapshots or report.status is not HostStatus.PARSE_ERROR:
        return log
    detail, advice = describe_source_without_readings(data)
    return replace(log, detail=detail or log.detail, advice=advice)


def _has_reading(gpu: GpuSample) -> bool:
    return gpu.power_watts is not None or gpu.utilization_percent is not None or bool(gpu.reasons)


def _from_hosts(hosts: Mapping[str, bytes]) -> GpuLog:
    """One job a host. Only the first that ends in trouble gives its last word to the whole."""
    logs = [_from_report(host, read_gpu_output(data)) for host, data in hosts.items()]
    moments = sorted((moment for log in logs for moment in log.moments), key=lambda moment: moment.seconds)
    last = next((log for log in logs if log.status is not HostStatus.OK), logs[0])
    return GpuLog(tuple(spec for log in logs for spec in log.specs), tuple(moments), last.status, last.detail, {})


def _unzipped(name: str, data: bytes) -> bytes:
    """A file that is cut short is read up to the cut; what is no gzip stays as it is. Raises SourceError."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(data, MAX_FILE_BYTES)
    except zlib.error:
        return data
    if unzip.unconsumed_tail:
        raise InputError(f"{name}: holds more than {MAX_FILE_BYTES / 1e9:.1f} GB; unpack it and give its last part")
    return text


def read_input_file(path: Path, *, only_the_end: bool = False) -> GpuLog | Recording:
    """Raises SourceError, or RecordingError for a recording that cannot be read. A pipe is as good as a file.

    `only_the_end`: of a long log, the last rounds and the boards of the first.
    """
    try:
        with path.open("rb") as file:
            start = file.read(512)
            if path.is_file() and is_recording(start):
                return open_recording(path)
            data = start + file.read(MAX_FILE_BYTES)
            if only_the_end and not data.startswith(GZIP_MAGIC):
                data = head_and_tail_of_log(data)
            return read_input(path.name, data)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def _from_report(name: str, report: SmiReport) -> GpuLog:
    """Each snapshot is one sample of one node; what the tool said last, if it is trouble, is one more."""
    count = len(report.snapshots)
    stamps = [s.time_seconds for s in report.snapshots]
    told = [t for t in stamps if t is not None]
    steps = [b - a for a, b in itertools.pairwise(told) if b > a]
    interval = statistics.median(steps) if steps else 1.0
    moments: list[RecordedEvent] = []
    seconds = 0.0
    for i, snapshot in enumerate(report.snapshots):
        # A stamp that goes back (another log appended, a clock set) starts anew, one interval on.
        delta = interval
        if i and (now := stamps[i]) is not None and (before := stamps[i - 1]) is not None:
            delta = now - before if now > before else interval
        seconds = seconds + delta if i else 0.0
        sample = NodeSample(
            node=name,
            status=HostStatus.OK,
            detail="",
            sequence=i,
            node_seconds=seconds,
            wall_seconds=snapshot.time_seconds or 0.0,
            received_seconds=seconds,
            gpu_source=report.source,
            gpus=snapshot.gpus,
            missing_gpus=report.missing_gpus if i == count - 1 else (),
            warnings=report.warnings if i == count - 1 else (),
        )
        moments.append(RecordedEvent(seconds, sample=sample))
    if report.status is not HostStatus.OK:
        seconds += interval if count else 0.0
        trouble = NodeSample(
            name, report.status, report.detail, count, seconds, 0.0, seconds, missing_gpus=report.missing_gpus
        )
        moments.append(RecordedEvent(seconds, sample=trouble))
    spec = JobSpec(name=name, nodes=(name,), interval_seconds=interval)
    return GpuLog((spec,), tuple(moments), report.status, report.detail, {}, report.warnings)


class JsonGpu(BaseModel):
    """One board of a JSON sample. None is "not read"."""

    model_config = ConfigDict(extra="ignore")
    index: int | None = None
    node: str | None = None
    rank: int | None = None
    name: str | None = None
    util_pct: float | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    mem_used_mib: float | None = None
    mem_total_mib: float | None = None
    temp_c: float | None = None


class JsonSample(BaseModel):
    model_config = ConfigDict(extra="ignore")
    t_seconds: float | None = None
    gpus: list[JsonGpu]


class JsonSamples(BaseModel):
    """JSON samples: {"gpu_model", "power_limit_w", "samples": [{"t_seconds", "gpus": [{"index", "util_pct"}]}]}."""

    model_config = ConfigDict(extra="ignore")
    name: str | None = None
    gpu_model: str | None = None
    power_limit_w: float | None = None
    samples: list[JsonSample]


class JsonCollection(BaseModel):
    """Several of them in one file: each is a job of its own."""

    model_config = ConfigDict(extra="ignore")
    samples: list[JsonSamples]


def _parse_json_jobs(name: str, data: bytes) -> dict[str, JsonSamples] | None:
    """Jobs by name if the bytes are JSON of that form: a list of samples, one sample, an object with `samples`, or a
    collection of such objects. One job has the name of its source."""
    if data.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        content: Any = orjson.loads(data)
        if isinstance(content, list):
            content = {"samples": content}
        elif "gpus" in content:
            content = {**content, "samples": [content]}
        if any("samples" in each for each in content["samples"]):
            return _by_name(JsonCollection.model_validate(content).samples)
        return {name: JsonSamples.model_validate(content)}
    except (orjson.JSONDecodeError, ValidationError, TypeError, KeyError):
        return None


def _by_name(jobs: list[JsonSamples]) -> dict[str, JsonSamples]:
    named: dict[str, JsonSamples] = {}
    for i, job in enumerate(jobs, 1):
        name = job.name or str(i)
        named[name if name not in named else f"{name} ({i})"] = job
    return named


def _from_json(name: str, pictures: Mapping[str, JsonSamples]) -> GpuLog:
    """A node of one of several jobs is called by its job too: the same node may be in each."""
    moments: list[RecordedEvent] = []
    ranks: dict[tuple[str, int], int] = {}
    specs: list[JobSpec] = []
    for job, content in pictures.items():
        nodes: dict[str, None] = {}
        stamps = [s.t_seconds for s in content.samples if s.t_seconds is not None]
        steps = [b - a for a, b in itertools.pairwise(stamps) if b > a]
        interval = statistics.median(steps) if steps else 1.0
        for i, sample in enumerate(content.samples):
            seconds = sample.t_seconds if sample.t_seconds is not None else i * interval
            boards: dict[str, list[GpuSample]] = {}
            for board in sample.gpus:
                node = board.node or job
                if board.node and len(pictures) > 1:
                    node = f"{job}/{node}"
                nodes[node] = None
                boards.setdefault(node, []).append(_gpu(board, content))
                if board.rank is not None and board.index is not None:
                    ranks[(node, board.index)] = board.rank
            for node, gpus in boards.items():
                said = NodeSample(
                    node, HostStatus.OK, "", i, seconds, 0.0, seconds, gpu_source="json", gpus=tuple(gpus)
                )  # fmt: skip
                moments.append(RecordedEvent(seconds, sample=said))
        specs.append(JobSpec(name=job, nodes=tuple(nodes) or (job,), interval_seconds=interval))
    if len(specs) > 1:
        moments.sort(key=lambda moment: moment.seconds)
    status, detail = (HostStatus.OK, "") if moments else (HostStatus.PARSE_ERROR, "no board in these JSON samples")
    return GpuLog(tuple(specs) or (JobSpec(name, (name,)),), tuple(moments), status, detail, ranks)


def _gpu(board: JsonGpu, content: JsonSamples) -> GpuSample:
    return GpuSample(
        index=board.index,
        name=board.name or content.gpu_model,
        power_watts=board.power_w,
        power_limit_watts=board.power_limit_w or content.power_limit_w,
        utilization_percent=board.util_pct,
        memory_used_bytes=None if board.mem_used_mib is None else board.mem_used_mib * MEBIBYTE,
        memory_total_bytes=None if board.mem_total_mib is None else board.mem_total_mib * MEBIBYTE,
        temperature_celsius=board.temp_c,
    )


class SourcePlayer:
    """A NodeSource that plays moments: `play` gives them in groups of one instant; the engine drains each group."""

    def __init__(self, specs: tuple[JobSpec, ...], moments: Iterator[RecordedEvent]) -> None:
        self._moments = moments
        self._links = {
            node: NodeLink(node, HostStatus.OK, "", last_line_age_seconds=0.0) for spec in specs for node in spec.nodes
        }
        self._pending: list[NodeSample] = []

    def play(self, within_seconds: float, look_every_seconds: float | None = None) -> Iterator[float]:
        """Each instant at which something came; moments within `within_seconds` of a group's first are one round.
        Silence is seen only by looking: with `look_every_seconds`, instants at which nothing came are given too."""
        first: float | None = None
        last = 0.0
        for moment in self._moments:
            # Lines are stamped by the reader and links by the engine: the two may cross by a moment.
            seconds = moment.seconds if first is None else max(last, moment.seconds)
            if first is not None and seconds - first > within_seconds:
                yield last
                if look_every_seconds is not None:
                    yield from _between(last, seconds, look_every_seconds)
                first = None
            first = seconds if first is None else first
            last = seconds
            if moment.link is not None:
                self._links[moment.link.node] = moment.link
            if moment.sample is not None:
                self._pending.append(moment.sample)
        if first is not None:
            yield last

    def drain(self) -> list[NodeSample]:
        pending, self._pending = self._pending, []
        return pending

    def links(self) -> Mapping[str, NodeLink]:
        return self._links


def _between(start: float, end: float, step: float) -> Iterator[float]:
    """Instants after `start` and before `end`, `step` apart; of a very long silence, its beginning."""
    for i in range(1, min(MAX_SILENT_TICKS, math.ceil((end - start) / step))):
        yield start + i * step


# The end of a long GPU log, with what it takes to read it: for who asks only how things stand now.
#
# A day of eight boards is 60 MB, and its last round a kilobyte. The beginning stays too: a board that was there then and
# is not at the end was lost in between.

LOG_HEAD_BYTES: Final = 64 << 10
LOG_TAIL_BYTES: Final = 1 << 20
# JSON and XML are read whole or not at all; UTF-16 is full of NUL.
NEVER_CUT_PREFIXES: Final = (b"{", b"[", b"<")
# One of these stands in each header, and in no row below it.
HEADER_WORDS: Final = (b"utilization", b"power", b"memory", b"temperature", b"index", b"uuid", b"# gpu", b"#gpu")
MAX_HEADER_SEARCHES: Final = 50


def head_and_tail_of_log(data: bytes) -> bytes:
    """The first rounds, the header that holds at the end, and the last rounds; all of it where that may not do."""
    if (
        len(data) <= 2 * (LOG_HEAD_BYTES + LOG_TAIL_BYTES)
        or data[:4000].lstrip()[:1] in NEVER_CUT_PREFIXES
        or b"\0" in data[:4000]
    ):
        return data
    if b"<nvidia_smi_log" in data[:LOG_HEAD_BYTES]:
        return data
    first = data.rfind(b"\n", 0, LOG_HEAD_BYTES) + 1
    last = data.find(b"\n", len(data) - LOG_TAIL_BYTES) + 1
    if not first or not last:
        return data  # no lines: whoever reads it shall say so
    header = _header_before(data, first, last)
    return data if header is None else data[:first] + header + data[last:]


def _header_before(data: bytes, first: int, last: int) -> bytes | None:
    """The last header in between, with its line end; empty where there is none, None where that cannot be told."""
    end = last
    for _ in range(MAX_HEADER_SEARCHES):
        place = max(data.rfind(word, first, end) for word in HEADER_WORDS)
        if place < 0:
            return b""
        start = data.rfind(b"\n", 0, place) + 1
        line = data[start : data.find(b"\n", place) + 1]
        if line.startswith(b"#") or read_header(split_cells(line.decode("utf-8", "replace"))) is not None:
            return line
        end = start
        if end <= first:
            return b""
    return None


# Outputs of several hosts in one paste: told apart where each line names its host, else refused in words.

HOST_PREFIX_PATTERN: Final = re.compile(rb"([A-Za-z][\w.\-]*): (?=\S)")  # what pdsh and clush put before each line
MIN_PREFIXED_FRACTION: Final = 0.9
# A board's place may change over a long log (a driver that was loaded anew); in a paste of a few it does not.
MAX_PASTED_ROUNDS: Final = 16


def split_by_host_prefix(data: bytes) -> Mapping[str, bytes]:
    """By host, its lines without the prefix; empty where lines have none, or all name the same host."""
    head = [line for line in data[:65536].split(b"\n") if line.strip()]
    if not head or sum(HOST_PREFIX_PATTERN.match(line) is not None for line in head) < MIN_PREFIXED_FRACTION * len(
        head
    ):
        return {}
    lines: dict[str, list[bytes]] = {}
    for line in data.split(b"\n"):
        if (found := HOST_PREFIX_PATTERN.match(line)) is not None:
            lines.setdefault(found[1].decode("ascii", "replace"), []).append(line[found.end() :])
    hosts = {host: b"\n".join(mine) + b"\n" for host, mine in lines.items()}
    return hosts if 1 < len(hosts) <= len(head) / 2 else {}


def find_mixed_hosts(report: SmiReport) -> str | None:
    """A sentence where one place holds two boards: what was pasted is not of one host."""
    places: dict[int, tuple[str | None, str | None]] = {}
    for snapshot in report.snapshots if len(report.snapshots) <= MAX_PASTED_ROUNDS else ():
        for gpu in snapshot.gpus:
            if gpu.index is None or gpu.mig:
                continue
            name, bus = places.setdefault(gpu.index, (gpu.name, gpu.pci_bus_id))
            if any(_differ(a, b) for a, b in zip((name, bus), (gpu.name, gpu.pci_bus_id), strict=True)):
                return (
                    f"these are boards of several hosts: GPU {gpu.index} is {name or 'a board'} at {bus or '?'} and "
                    f"{gpu.name or 'a board'} at {gpu.pci_bus_id or '?'}. Give each host's output by itself, or name "
                    "the hosts: `wattwatch triage HOST ...`"
                )
    return None


def _differ(a: str | None, b: str | None) -> bool:
    """The last cell of a log that was cut may hold the beginning of a name."""
    return a is not None and b is not None and not a.startswith(b) and not b.startswith(a)


# What a file is that holds no GPU readings, and what reads it: the fault is the file's, not the node's.

INSPECTED_BYTES: Final = 256 << 10
EXPECTED_INPUT: Final = (
    "Give what nvidia-smi prints: its table, -q -x, or "
    "`nvidia-smi --query-gpu=index,name,power.draw,power.limit,utilization.gpu,memory.used --format=csv`"
)
RECORDING_KEYS: Final = ({"n", "t", "line"}, {"n", "t", "link"})


def describe_source_without_readings(data: bytes) -> tuple[str, str]:
    """What it is ("": text that may be a GPU tool's, of a kind that we do not know), and what to do."""
    if not data.strip():
        return "it is empty: no output at all, of a query that printed nothing or never returned", f"{EXPECTED_INPUT}."
    end = data[-INSPECTED_BYTES:]
    odd = sum(end.count(bytes((code,))) for code in (*range(7), *range(14, 27)))
    if b"\0" in end and odd * 20 > len(end):
        return "this is binary, not text", f"{EXPECTED_INPUT}."
    return describe_training_log(data) or ("", f"{EXPECTED_INPUT}.")


def describe_training_log(data: bytes) -> tuple[str, str] | None:
    """That it is a log of training steps, and what reads it; None where no step is told."""
    end = data[-INSPECTED_BYTES:]
    sample = read_progress(end.decode("utf-8", "replace"), cut=len(data) > len(end))
    if sample.step is None:
        return None
    return (
        f"this is a log of training steps ({sample.format}, step {sample.step:,}), not of GPUs",
        "`wattwatch progress FILE` reads it. For a verdict give what nvidia-smi prints, and say with --progress "
        "stalled or --progress advancing what the steps do.",
    )


def is_headless_recording(data: bytes) -> bool:
    """Records of a recording whose first line, which names the jobs, is gone."""
    lines = [line for line in data[: 4 << 20].split(b"\n", 3)[:3] if line]
    records = 0
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the first may be torn
        records += isinstance(record, dict) and any(keys <= record.keys() for keys in RECORDING_KEYS)
    return records > 0
