"""Reads files with GPU readings: output of nvidia-smi, logs of it, JSON samples, recordings.

Content decides what a file is, never its name. A log knows neither connections nor jobs: it is read as one node with
the name of the file, at the log's own pace. What has no readings is still a result: a status and what to do about it.
"""

from __future__ import annotations

import errno
import io
import itertools
import math
import os
import re
import select
import stat
import statistics
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from wattwatch.collectors.progress import read_progress
from wattwatch.collectors.samples import GpuSample, HostStatus, MissingGpu, NodeSample
from wattwatch.collectors.smi import GpuSnapshot, SmiReport, read_gpu_output
from wattwatch.collectors.smi.columns import read_column, read_header
from wattwatch.collectors.smi.csv_format import NO_HEADER, split_cells
from wattwatch.collectors.smi.messages import is_about_a_gpu
from wattwatch.collectors.ssh.model import NodeLink
from wattwatch.watcher.common.formatting import describe_invalid_value
from wattwatch.watcher.detection.model import JobSpec, normalized_pci_id
from wattwatch.watcher.recordings.format import RecordedEvent, Recording, is_recording, open_recording, parse_recording
from wattwatch.watcher.recordings.pasted_hosts import (
    HostOutputs,
    count_undated_outputs,
    find_mixed_hosts,
    separate_outputs,
    split_by_host,
)

MEBIBYTE: Final = 1024.0**2
MAX_FILE_BYTES: Final = 512 * 1024**2  # chosen: a week of eight GPUs, and no danger to the memory of a laptop
GZIP_MAGIC: Final = b"\x1f\x8b"
# Inputs without a name of their own: their readings are of some host, which messages call by this name.
UNNAMED_INPUTS: Final[Mapping[str, str]] = {"-": "host", "text": "host"}
ASSUMED_INTERVAL_SECONDS: Final = 1.0
ASSUMED_INTERVAL_TEXT: Final = (
    f"{ASSUMED_INTERVAL_SECONDS:g} s between two samples, because the input has no time stamps"
)
MAX_SILENT_TICKS: Final = 7200  # during one silence: whatever it means has been detected long before


class InputError(Exception):
    """The input cannot be read at all. One sentence: which one, why, what to do."""


class HostOrder(StrEnum):
    """How the hosts of one text follow each other. Ranks are counted over the nodes of a job in their order."""

    GIVEN = "given"  # as the person, or the list of hosts, has it
    ARRIVAL = "arrival"  # as the hosts happened to answer: says nothing


@dataclass(frozen=True, slots=True)
class LogPart:
    """One of several logs in one input: of another host, of another job, or of a logger that was started again."""

    job: str
    number: int  # from 1
    begins: str  # why another log begins here, in a clause; "" for the first
    begins_seconds: float  # in the time of the events
    ends_wall_seconds: float | None  # by its own time stamps; None without one


@dataclass(frozen=True, slots=True)
class GpuLog:
    """GPU readings of one or more jobs, as samples in order of time."""

    specs: tuple[JobSpec, ...]
    events: tuple[RecordedEvent, ...]
    status: HostStatus  # of the input as a whole: how it ends
    detail: str
    ranks: Mapping[tuple[str, int], int]  # (node, GPU index) -> rank; only JSON samples can name ranks
    warnings: tuple[str, ...] = ()
    advice: str = ""  # what to do about an input without readings
    host_order: HostOrder | None = None  # each spec is a host, of which several were in the text; None: a job
    undated_outputs: int = 0  # outputs that may be of one host or of several: nothing in them says which
    remarks: tuple[str, ...] = ()  # what a reader must know to trust a verdict on it, a sentence each
    parts: tuple[LogPart, ...] = ()  # of an input that holds several logs, each of which is a job and a node of its own
    assumptions: tuple[str, ...] = ()  # what the input does not say and was assumed, one clause each


# A log that ended this long before the newest one is of the past. Both are chosen.
PAST_SECONDS: Final = 60.0
PAST_INTERVALS: Final = 10.0


def current_parts(log: GpuLog) -> GpuLog:
    """The same input without the logs in it that had ended well before the newest one did, by their time stamps."""
    ends = [part.ends_wall_seconds for part in log.parts if part.ends_wall_seconds is not None]
    if not ends:
        return log
    intervals = {spec.name: spec.interval_seconds for spec in log.specs}
    past = {
        part.job
        for part in log.parts
        if part.ends_wall_seconds is not None
        and max(ends) - part.ends_wall_seconds > max(PAST_SECONDS, PAST_INTERVALS * intervals[part.job])
    }
    specs = tuple(spec for spec in log.specs if spec.name not in past)
    nodes = {node for spec in specs for node in spec.nodes}
    return replace(log, specs=specs, events=tuple(e for e in log.events if e.sample and e.sample.node in nodes))


def split_by_job(log: GpuLog) -> tuple[GpuLog, ...]:
    """One log per job. Jobs of a collection end at different times, and none is stale because another goes on."""
    if len(log.specs) == 1 and not log.parts:
        return (log,)
    remarks = {part.job: (part_text(part, len(log.parts)),) for part in log.parts}
    return tuple(
        replace(
            log,
            specs=(spec,),
            events=tuple(e for e in log.events if e.sample and e.sample.node in spec.nodes),
            remarks=(*log.remarks, *remarks.get(spec.name, ())),
            parts=(),
        )
        for spec in log.specs
    )


def part_text(part: LogPart, count: int) -> str:
    """Which of several logs in one input this is, in a sentence."""
    begins = f" This log begins where {part.begins}." if part.begins else ""
    return f"The verdict is about log {part.number} of {count} in this input.{begins}"


def read_input(name: str, data: bytes, *, several_hosts: bool = False) -> GpuLog | Recording:
    """Reads any supported content. `name` is used in messages and as the name of the job and node of a log.

    `several_hosts`: the user says that the content is of several hosts, so outputs that nothing tells apart are of one
    host each, not samples of one host.

    Raises InputError or RecordingError if nothing can be said about the content. Content without readings is no error:
    the log has a status other than OK, with a detail and advice.
    """
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{name}: too large ({len(data) / 1e9:.1f} GB). Give only the last part of the file")
    if is_recording(data[:512]):
        return parse_recording(name, io.BytesIO(data))
    if data.startswith(GZIP_MAGIC):
        data, cut = _unzipped(name, data)
        if cut:
            source = read_input(name, data, several_hosts=several_hosts)
            return replace(source, remarks=(*source.remarks, CUT)) if isinstance(source, GpuLog) else source
    if is_headless_recording(data):
        raise InputError(
            f"{name}: the beginning of this wattwatch recording is missing. Give the whole file: the first line names "
            "the jobs"
        )
    host = UNNAMED_INPUTS.get(name, name)
    try:
        jobs = _parse_json_jobs(host, data)
    except ValidationError as error:
        return _unread_json(host, error)
    if jobs is not None:
        return _from_json(host, jobs)
    if (hosts := split_by_host(data)) is not None and (log := _from_hosts(hosts)) is not None:
        return log
    report = read_gpu_output(data)
    if (problem := find_mixed_hosts(report)) is not None:
        raise InputError(f"{name}: {problem}")
    has_readings = any(_has_reading(gpu) for snapshot in report.snapshots for gpu in snapshot.gpus)
    if not has_readings and describe_training_log(data):
        # A training log may contain "timeout", or a name beside a number: that is not an answer of nvidia-smi.
        report = SmiReport("", HostStatus.PARSE_ERROR, "")
    undated = count_undated_outputs(data) if has_readings else 0
    if undated and several_hosts:
        outputs = {f"host {i}": output for i, output in enumerate(separate_outputs(data), 1)}
        if (log := _from_hosts(HostOutputs(outputs, ordered=True))) is not None:
            return replace(log, undated_outputs=undated)
    log = replace(_from_report(host, report), undated_outputs=undated)
    if report.snapshots or report.status is not HostStatus.PARSE_ERROR:
        return log
    detail, advice = describe_source_without_readings(data)
    return replace(log, detail=detail or log.detail, advice=advice)


def _has_reading(gpu: GpuSample) -> bool:
    return gpu.power_watts is not None or gpu.utilization_percent is not None or bool(gpu.reasons)


def _from_hosts(hosts: HostOutputs) -> GpuLog | None:
    """One job per host; None if there are no readings at all. The status of the whole is that of the first host that
    does not end well."""
    logs = [_from_report(host, read_gpu_output(data)) for host, data in hosts.outputs.items()]
    if all(event.sample is None or event.sample.gpus is None for log in logs for event in log.events):
        return None
    events = sorted((event for log in logs for event in log.events), key=lambda event: event.seconds)
    last = next((log for log in logs if log.status is not HostStatus.OK), logs[0])
    return GpuLog(
        tuple(spec for log in logs for spec in log.specs),
        tuple(events),
        last.status,
        last.detail,
        {},
        host_order=HostOrder.GIVEN if hosts.ordered else HostOrder.ARRIVAL,
        remarks=tuple(dict.fromkeys(text for log in logs for text in log.remarks)),
        parts=tuple(part for log in logs for part in log.parts),
        assumptions=tuple(dict.fromkeys(text for log in logs for text in log.assumptions)),
    )


CUT: Final = "The compressed file is cut off; only what comes before the cut was read."


def _unzipped(name: str, data: bytes) -> tuple[bytes, bool]:
    """The unpacked content, up to the cut of a truncated file, and whether it is cut; the data itself if it is not gzip
    after all."""
    unzip = zlib.decompressobj(wbits=31)
    try:
        text = unzip.decompress(data, MAX_FILE_BYTES)
    except zlib.error:
        return data, False
    if unzip.unconsumed_tail:
        raise InputError(
            f"{name}: too large (more than {MAX_FILE_BYTES / 1e9:.1f} GB unpacked). Unpack it, and give only the last "
            "part"
        )
    return text, not unzip.eof


def read_input_file(path: Path, *, only_the_end: bool = False, several_hosts: bool = False) -> GpuLog | Recording:
    """Reads a file or a pipe. Raises InputError or RecordingError, as `read_input` does.

    `only_the_end`: of a long log, read only the last rounds, and the first ones for the GPUs that were there then; of a
    pipe that does not end, what comes within MAX_PIPE_SECONDS.
    """
    try:
        if not path.is_file():
            with open_pipe(path) as file:
                return read_stream(path.name, file, only_the_end=only_the_end, several_hosts=several_hosts)
        with path.open("rb") as file:
            start = file.read(512)
            if is_recording(start):
                return open_recording(path)
            data = start + file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot read the file: {error.strerror}") from None
    read = read_end_of_log if only_the_end and not data.startswith(GZIP_MAGIC) else read_input
    return read(path.name, data, several_hosts=several_hosts)


# Pipes. A program that hangs while it holds the other end, such as nvidia-smi on a broken driver, must not hang the
# reader too; and `nvidia-smi -l 1` never ends.

MAX_PIPE_SECONDS: Final = 60.0  # chosen: nvidia-smi without persistence mode takes up to 20 s on eight GPUs
PIPE_POLL_SECONDS: Final = 0.2
NOT_ENDED: Final = f"The input was still open after {MAX_PIPE_SECONDS:.0f} s; only the data received by then was read."
DESCRIPTOR_PATH: Final = re.compile(r"/dev/fd/(\d+)|/proc/self/fd/(\d+)|/dev/std(in)")


def read_stream(
    name: str, file: BinaryIO, *, only_the_end: bool = False, several_hosts: bool = False
) -> GpuLog | Recording:
    """Reads standard input or a pipe until its end. Raises InputError if nothing comes for MAX_PIPE_SECONDS, and as
    `read_input` does. `only_the_end`: read what has come after MAX_PIPE_SECONDS, even if there may be more."""
    data, ended = read_pipe(file, MAX_PIPE_SECONDS, until_silent=not only_the_end)
    if not data and not ended:
        raise InputError(
            f"{name}: {nothing_written(MAX_PIPE_SECONDS)}. If nvidia-smi writes to this pipe, nvidia-smi "
            "hangs: check the kernel log of its host"
        )
    source = read_input(name, data, several_hosts=several_hosts)
    if isinstance(source, GpuLog) and not ended:
        source = replace(source, remarks=(*source.remarks, NOT_ENDED))
    return source


def nothing_written(seconds: float) -> str:
    return f"nothing was written to this pipe within {seconds:.0f} s"


def open_pipe(path: Path) -> BinaryIO:
    """Without waiting for a writer, as an open of a named pipe does otherwise."""
    if (own := DESCRIPTOR_PATH.fullmatch(str(path))) is not None:
        # Opened anew, a pipe whose writer has finished looks like one whose writer has not come yet.
        return os.fdopen(os.dup(int(own[1] or own[2] or 0)), "rb", buffering=0)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, "it is a directory; give the files in it")
    return os.fdopen(descriptor, "rb", buffering=0)


def read_pipe(file: BinaryIO, seconds: float, *, until_silent: bool) -> tuple[bytes, bool]:
    """What comes within `seconds`, or with `until_silent` until nothing has come for that long; and whether the end was
    reached. Reads at most MAX_FILE_BYTES and a byte."""
    try:
        descriptor = file.fileno()
    except (OSError, io.UnsupportedOperation):  # not a file of the operating system
        return file.read(MAX_FILE_BYTES + 1), True
    if stat.S_ISREG(os.fstat(descriptor).st_mode) or os.isatty(descriptor):  # a person takes the time that it takes
        return file.read(MAX_FILE_BYTES + 1), True
    chunks: list[bytes] = []
    size = 0
    deadline = time.monotonic() + seconds
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN | select.POLLHUP)
    while size <= MAX_FILE_BYTES and (left := deadline - time.monotonic()) > 0:
        if not waiting.poll(min(left, PIPE_POLL_SECONDS) * 1000):
            continue
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            continue
        if not chunk:
            return b"".join(chunks), True
        chunks.append(chunk)
        size += len(chunk)
        deadline = time.monotonic() + seconds if until_silent else deadline
    return b"".join(chunks), size > MAX_FILE_BYTES


def _from_report(name: str, report: SmiReport) -> GpuLog:
    """One sample per snapshot, of one node; where another log begins in it, of the next node and job.

    An error that the tool printed at the end becomes one more sample.
    """
    logs = _logs_of(report.snapshots)
    names = [name] if len(logs) == 1 else [f"{name} part {number}" for number in range(1, len(logs) + 1)]
    events: list[RecordedEvent] = []
    specs: list[JobSpec] = []
    parts: list[LogPart] = []
    assumptions: dict[str, None] = {}
    remarks: dict[str, None] = {}
    seconds = interval = 0.0
    before: float | None = None
    for number, (part, snapshots) in enumerate(zip(names, logs, strict=True), 1):
        last = number == len(logs)
        stamps = [snapshot.time_seconds for snapshot in snapshots]
        usual = usual_interval_seconds(stamps)
        interval = usual or ASSUMED_INTERVAL_SECONDS
        if usual is None and len(snapshots) > 1:
            assumptions[ASSUMED_INTERVAL_TEXT] = None
        begins_seconds = seconds
        for i, snapshot in enumerate(snapshots):
            # A time stamp that goes back (a second log appended, a clock set) continues one interval later.
            now, delta = snapshot.time_seconds, interval
            if before is not None and now is not None and now > before:
                delta = now - before
            seconds += delta if events else 0.0
            before = now
            begins_seconds = begins_seconds if i else seconds
            if snapshot.counted_by:
                remarks[f"The rows do not show which GPU they are from; they were read as {snapshot.counted_by}."] = (
                    None
                )
            is_end = last and i == len(snapshots) - 1
            sample = NodeSample(
                node=part,
                status=HostStatus.OK,
                detail="",
                sequence=i,
                node_seconds=seconds,
                wall_seconds=snapshot.time_seconds or 0.0,
                received_seconds=seconds,
                gpu_source=report.source,
                gpus=snapshot.gpus,
                missing_gpus=_still_missing(report.missing_gpus, snapshot.gpus) if is_end else (),
                warnings=report.warnings if is_end else (),
            )
            events.append(RecordedEvent(seconds, sample=sample))
        specs.append(JobSpec(name=part, nodes=(part,), interval_seconds=interval, interval_assumed=usual is None))
        ends = max((stamp for stamp in stamps if stamp is not None), default=None)
        parts.append(LogPart(part, number, snapshots[0].begins if snapshots else "", begins_seconds, ends))
    if report.status is not HostStatus.OK:
        count = len(events)
        seconds += interval if count else 0.0
        failed = NodeSample(
            names[-1], report.status, report.detail, count, seconds, 0.0, seconds, missing_gpus=report.missing_gpus
        )
        events.append(RecordedEvent(seconds, sample=failed))
    return GpuLog(
        tuple(specs),
        tuple(events),
        report.status,
        report.detail,
        {},
        report.warnings,
        remarks=(*remarks, *_no_header(report), *_tool_messages(report)),
        parts=tuple(parts) if len(parts) > 1 else (),
        assumptions=tuple(assumptions),
    )


def _logs_of(snapshots: Sequence[GpuSnapshot]) -> list[list[GpuSnapshot]]:
    """The snapshots of each log in an input; of an input without any, one log without snapshots."""
    logs: list[list[GpuSnapshot]] = [[]]
    for snapshot in snapshots:
        if snapshot.begins:
            logs.append([])
        logs[-1].append(snapshot)
    return logs


def usual_interval_seconds(stamps: Sequence[float | None]) -> float | None:
    """The usual time between two samples; None if no time stamps show it."""
    known = [stamp for stamp in stamps if stamp is not None]
    steps = [after - before for before, after in itertools.pairwise(known) if after > before]
    return statistics.median(steps) if steps else None


def _still_missing(missing: Sequence[MissingGpu], gpus: Sequence[GpuSample]) -> tuple[MissingGpu, ...]:
    """Without GPUs that could not be opened at some time and are listed now."""
    indexes = {gpu.index for gpu in gpus} - {None}
    buses = {normalized_pci_id(gpu.pci_bus_id) for gpu in gpus if gpu.pci_bus_id is not None}
    return tuple(
        each
        for each in missing
        if (each.index not in indexes if each.pci_bus_id is None else normalized_pci_id(each.pci_bus_id) not in buses)
    )


PCI_ID_IN_TEXT: Final = re.compile(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]")


def _tool_messages(report: SmiReport) -> Iterator[str]:
    """What the tool itself said about a GPU beside its rows, which may show nothing of it."""
    gpus = report.snapshots[-1].gpus if report.snapshots else ()
    still_missing = _still_missing(report.missing_gpus, gpus)
    listed = [missing.text for missing in report.missing_gpus if missing not in still_missing]
    for text in (*(text for text in report.warnings if is_about_a_gpu(text)), *listed):
        named = next((found for found in PCI_ID_IN_TEXT.findall(text)), None)
        where = [gpu.index for gpu in gpus if named and gpu.pci_bus_id and _same_slot(named, gpu.pci_bus_id)]
        place = f" (this is GPU {where[0]})" if where and where[0] is not None else ""
        also = ", although the output lists that GPU" if text in listed and where else ""
        yield f'The tool that wrote the output warns: "{text.strip().rstrip(".")}"{place}{also}.'


def _same_slot(named: str, pci_bus_id: str) -> bool:
    return normalized_pci_id(named) == normalized_pci_id(pci_bus_id)


def _no_header(report: SmiReport) -> Iterator[str]:
    """That a reading may be missing only because no header names its column."""
    gpus = report.snapshots[-1].gpus if report.snapshots else ()
    if any(gpu.power_watts is None or gpu.utilization_percent is None for gpu in gpus):
        yield from (f"{text[0].upper()}{text[1:]}." for text in report.warnings if text.startswith(NO_HEADER))


class JsonGpu(BaseModel):
    """One GPU of a JSON sample. None: not read."""

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
    """One job: {"gpu_model", "power_limit_w", "samples": [{"t_seconds", "gpus": [{"util_pct", "power_w"}]}]}."""

    model_config = ConfigDict(extra="ignore")
    name: str | None = None
    gpu_model: str | None = None
    power_limit_w: float | None = None
    samples: list[JsonSample]


class JsonCollection(BaseModel):
    """Several jobs in one file."""

    model_config = ConfigDict(extra="ignore")
    samples: list[JsonSamples]


def _parse_json_jobs(name: str, data: bytes) -> dict[str, JsonSamples] | None:
    """Jobs by name if the data is JSON of one of these forms: one sample, a list of samples, an object with `samples`,
    or a collection of such objects. A single job gets the name of the input. None: other content.

    Raises ValidationError for samples of this form with a value that is none: no other reader knows which GPU belongs
    to which node in them.
    """
    if data.lstrip()[:1] not in (b"{", b"["):
        return None
    try:
        content: Any = orjson.loads(data)
        if isinstance(content, list):
            content = {"samples": content}
        elif "gpus" in content:
            content = {**content, "samples": [content]}
        if _is_of_a_tool(content["samples"]):
            return None
        if any("samples" in each for each in content["samples"]):
            return _by_name(JsonCollection.model_validate(content).samples)
        return {name: JsonSamples.model_validate(content)}
    except ValidationError:
        if _has_own_keys(content["samples"]):
            raise
        return None
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None


def _has_own_keys(samples: Any) -> bool:
    """Whether some GPU has a reading under a name of `JsonGpu`."""
    rows = [row for row in samples if isinstance(row, dict)] if isinstance(samples, list) else []
    if any(_has_own_keys(row["samples"]) for row in rows if "samples" in row):
        return True
    gpus = [gpu for row in rows if isinstance(row.get("gpus"), list) for gpu in row["gpus"] if isinstance(gpu, dict)]
    return any(gpu.keys() & JsonGpu.model_fields.keys() - {"index", "node", "rank", "name"} for gpu in gpus)


def _unread_json(name: str, error: ValidationError) -> GpuLog:
    first = error.errors()[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    return GpuLog(
        (JobSpec(name, (name,)),),
        (),
        HostStatus.PARSE_ERROR,
        f"the JSON samples cannot be read: {place}: {describe_invalid_value(first)}",
        {},
        advice=CHECK_JSON,
    )


def _is_of_a_tool(samples: Any) -> bool:
    """Whether GPUs have readings under the names that a GPU tool gives them (gpustat --json), and none under ours."""
    gpus = [gpu for sample in samples if "gpus" in sample for gpu in sample["gpus"]]
    keys = {key for gpu in gpus for key in gpu}
    return (
        bool(keys)
        and not keys & JsonGpu.model_fields.keys() - {"index", "node", "rank", "name"}
        and any(read_column(key).field for key in keys - {"index", "name"})
    )


def _by_name(jobs: list[JsonSamples]) -> dict[str, JsonSamples]:
    named: dict[str, JsonSamples] = {}
    for i, job in enumerate(jobs, 1):
        name = job.name or str(i)
        named[name if name not in named else f"{name} ({i})"] = job
    return named


CHECK_JSON: Final = "Check the program that wrote this file: each sample needs a list of GPUs with their readings."


def _from_json(name: str, jobs: Mapping[str, JsonSamples]) -> GpuLog:
    """With several jobs, the name of a node begins with its job: the same node may occur in each of them."""
    events: list[RecordedEvent] = []
    ranks: dict[tuple[str, int], int] = {}
    specs: list[JobSpec] = []
    is_assumed = False
    for job, content in jobs.items():
        nodes: dict[str, None] = {}
        usual = usual_interval_seconds([s.t_seconds for s in content.samples])
        interval = usual or ASSUMED_INTERVAL_SECONDS
        is_assumed = is_assumed or (usual is None and len(content.samples) > 1)
        for i, sample in enumerate(content.samples):
            seconds = sample.t_seconds if sample.t_seconds is not None else i * interval
            gpus_by_node: dict[str, list[GpuSample]] = {}
            for json_gpu in sample.gpus:
                node = json_gpu.node or job
                if json_gpu.node and len(jobs) > 1:
                    node = f"{job}/{node}"
                nodes[node] = None
                gpus_by_node.setdefault(node, []).append(_gpu(json_gpu, content))
                if json_gpu.rank is not None and json_gpu.index is not None:
                    ranks[(node, json_gpu.index)] = json_gpu.rank
            for node, gpus in gpus_by_node.items():
                node_sample = NodeSample(
                    node, HostStatus.OK, "", i, seconds, 0.0, seconds, gpu_source="json", gpus=tuple(gpus)
                )  # fmt: skip
                events.append(RecordedEvent(seconds, sample=node_sample))
        specs.append(
            JobSpec(name=job, nodes=tuple(nodes) or (job,), interval_seconds=interval, interval_assumed=usual is None)
        )
    if len(specs) > 1:
        events.sort(key=lambda event: event.seconds)
    status, detail = (HostStatus.OK, "") if events else (HostStatus.PARSE_ERROR, "the JSON samples contain no GPUs")
    advice = "" if events else CHECK_JSON
    return GpuLog(
        tuple(specs) or (JobSpec(name, (name,)),),
        tuple(events),
        status,
        detail,
        ranks,
        advice=advice,
        assumptions=(ASSUMED_INTERVAL_TEXT,) if is_assumed else (),
    )


def _gpu(json_gpu: JsonGpu, content: JsonSamples) -> GpuSample:
    return GpuSample(
        index=json_gpu.index,
        name=json_gpu.name or content.gpu_model,
        power_watts=json_gpu.power_w,
        power_limit_watts=json_gpu.power_limit_w or content.power_limit_w,
        utilization_percent=json_gpu.util_pct,
        memory_used_bytes=None if json_gpu.mem_used_mib is None else json_gpu.mem_used_mib * MEBIBYTE,
        memory_total_bytes=None if json_gpu.mem_total_mib is None else json_gpu.mem_total_mib * MEBIBYTE,
        temperature_celsius=json_gpu.temp_c,
    )


class SourcePlayer:
    """Plays the events of an input in place of the live fleet: `play` steps through time, and at each step `drain`
    returns the new samples and `links` the state of the links."""

    def __init__(self, specs: tuple[JobSpec, ...], events: Iterator[RecordedEvent]) -> None:
        self._events = events
        self._links = {
            node: NodeLink(node, HostStatus.OK, "", last_line_age_seconds=0.0) for spec in specs for node in spec.nodes
        }
        self._pending: list[NodeSample] = []

    def play(self, within_seconds: float, tick_every_seconds: float | None = None) -> Iterator[float]:
        """The times of the rounds: events within `within_seconds` of the first one of a round belong to it.

        Silence can only be detected by a tick without an event: with `tick_every_seconds`, gaps between events are
        filled with such ticks.
        """
        first: float | None = None
        last = 0.0
        for event in self._events:
            # Two threads stamp lines and links, so neighboring stamps may be in the wrong order by a moment.
            seconds = event.seconds if first is None else max(last, event.seconds)
            if first is not None and seconds - first > within_seconds:
                yield last
                if tick_every_seconds is not None:
                    yield from _between(last, seconds, tick_every_seconds)
                first = None
            first = seconds if first is None else first
            last = seconds
            if event.link is not None:
                self._links[event.link.node] = event.link
            if event.sample is not None:
                self._pending.append(event.sample)
        if first is not None:
            yield last

    def drain(self) -> list[NodeSample]:
        pending, self._pending = self._pending, []
        return pending

    def links(self) -> Mapping[str, NodeLink]:
        return self._links


def _between(start: float, end: float, step: float) -> Iterator[float]:
    """Times after `start` and before `end`, `step` apart; only the beginning of a very long gap."""
    for i in range(1, min(MAX_SILENT_TICKS, math.ceil((end - start) / step))):
        yield start + i * step


# The head and tail of a long log: a day of eight GPUs is 60 MB, of which a verdict needs the last kilobyte. The head is
# kept too, because a GPU that is in it and not in the tail was lost in between.

LOG_HEAD_BYTES: Final = 64 << 10
LOG_TAIL_BYTES: Final = 1 << 20
# JSON and XML can only be parsed whole. So can UTF-16, which is recognized by its NUL bytes.
NEVER_CUT_PREFIXES: Final = (b"{", b"[", b"<")
# Each header contains one of these, and no row does.
HEADER_WORDS: Final = (b"utilization", b"power", b"memory", b"temperature", b"index", b"uuid", b"# gpu", b"#gpu")
MAX_HEADER_SEARCHES: Final = 50


def read_end_of_log(name: str, data: bytes, *, several_hosts: bool = False) -> GpuLog | Recording:
    """As `read_input`, from the first and the last rounds of a long log. If they seem to be of several logs, what lies
    between them shows whether they are, and whether a GPU was lost: then everything is read."""
    end = head_and_tail_of_log(data)
    source = read_input(name, end, several_hosts=several_hosts)
    if end is not data and isinstance(source, GpuLog) and source.parts:
        return read_input(name, data, several_hosts=several_hosts)
    return source


def head_and_tail_of_log(data: bytes) -> bytes:
    """The first rounds, the header that applies to the last ones, and the last rounds; everything if in doubt."""
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
        return data  # no lines at all; the parser reports that
    header = _header_before(data, first, last)
    return data if header is None else data[:first] + header + data[last:]


def _header_before(data: bytes, first: int, last: int) -> bytes | None:
    """The last header in between, with its line end; empty if there is none, None if that is not certain."""
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


# Content without GPU readings: what it is and what to do, so that nobody looks for the fault on the node.

INSPECTED_BYTES: Final = 256 << 10
EXPECTED_INPUT: Final = (
    "Give the output of nvidia-smi: its table, the text or XML of -q, or the CSV of "
    "`nvidia-smi --query-gpu=index,name,power.draw,power.limit,utilization.gpu,memory.used --format=csv`"
)
RECORDING_KEYS: Final = ({"n", "t", "line"}, {"n", "t", "link"})


def describe_source_without_readings(data: bytes) -> tuple[str, str]:
    """What the content is (empty: text that may be of an unknown GPU tool), and what to do."""
    if not data.strip():
        return "the input is empty: the query printed nothing, or did not return", f"{EXPECTED_INPUT}."
    end = data[-INSPECTED_BYTES:]
    control_characters = sum(end.count(bytes((code,))) for code in (*range(7), *range(14, 27)))
    if b"\0" in end and control_characters * 20 > len(end):
        return "the input is binary data, not text", f"{EXPECTED_INPUT}."
    return describe_training_log(data) or ("", f"{EXPECTED_INPUT}.")


def describe_training_log(data: bytes) -> tuple[str, str] | None:
    """What the content is and what to do, if it is a log of training steps; None if no step can be found in it."""
    end = data[-INSPECTED_BYTES:]
    sample = read_progress(end.decode("utf-8", "replace"), cut=len(data) > len(end))
    if sample.step is None:
        return None
    return (
        f"the input is a log of training steps ({sample.format}, step {sample.step:,}), not of GPU readings",
        "To see the steps, run `wattwatch progress FILE`. For a verdict, give the output of nvidia-smi, and add "
        "--progress advancing if steps advance, or --progress stalled if they do not.",
    )


def is_headless_recording(data: bytes) -> bool:
    """Whether the content is a recording that lacks its first line."""
    lines = [line for line in data[: 4 << 20].split(b"\n", 3)[:3] if line]
    records = 0
    for line in lines:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue  # the first one may be half a line
        records += isinstance(record, dict) and any(keys <= record.keys() for keys in RECORDING_KEYS)
    return records > 0
