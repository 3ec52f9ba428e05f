"""GPUs wait for data: on what, as far as the evidence from their hosts shows.

Strongest evidence first: a call on the job's paths that hangs, a process of the job that sleeps in a file system,
memory pressure, disk pressure, cores that are all in use, loader workers that use a whole core each. Where ranks
report that they wait while their host is idle, the cause is outside the host. Otherwise the result says that nothing
was found.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any, Final

from wattwatch.collectors.samples import ProcessSample, WorkerSample
from wattwatch.watcher.common.formatting import format_count
from wattwatch.watcher.detection.model import MIN_DATA_WAIT_MS, JobSample, NodeState

# The probe's calls that touch the job's own paths; all others ask the driver or the kernel.
PATH_CALLS: Final = ("list /", "statvfs /", "read /")
NOT_JOB_CALLS: Final = frozenset({"read /proc"})
# Pressure stall information, "some" over 10 s: percentage of time in which at least one task waited (Linux,
# Documentation/accounting/psi.rst). Healthy hosts show a few per cent; these limits were chosen well above that.
CPU_PRESSURE_PERCENT: Final = 25.0
IO_PRESSURE_PERCENT: Final = 20.0
MEMORY_PRESSURE_PERCENT: Final = 10.0
MIN_AVAILABLE_SHARE: Final = 0.03
MAX_LOAD_PER_CORE: Final = 1.0
WHOLE_CORE_PERCENT: Final = 90.0
IDLE_LOAD_PER_CORE: Final = 0.5
IDLE_PRESSURE_PERCENT: Final = 5.0


class BottleneckKind(StrEnum):
    STUCK_CALL = "stuck_call"
    NETWORK_FILE_SYSTEM = "network_file_system"
    STORAGE = "storage"
    MEMORY = "memory"
    CPU = "cpu"
    LOADER = "loader"
    OUTSIDE = "outside"
    UNNAMED = "unnamed"


@dataclass(frozen=True, slots=True)
class InputBottleneck:
    """What the GPUs wait for. `description` has the numbers; `next_step` is the advice."""

    kind: BottleneckKind
    description: str
    next_step: str

    @property
    def is_named(self) -> bool:
        return self.kind is not BottleneckKind.UNNAMED

    @property
    def sentence(self) -> str:
        """Without a full stop. What the hosts show at the same time is likely the cause, and no proof of it."""
        likely = "Likely cause" if self.is_named else "Cause"
        return f"{likely} of the slow input: {self.description}"


@cache
def bottleneck_table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("input_bottleneck.toml").read_text("utf-8"))


def find_input_bottleneck(sample: JobSample) -> InputBottleneck:
    """The strongest evidence over all nodes of the job; UNNAMED where there is none."""
    next_steps = bottleneck_table()["next_step"]
    for find in (
        _stuck_call,
        _blocked_processes,
        _memory_short,
        _disk_pressure,
        _cores_busy,
        _workers_saturated,
        _outside_the_host,
    ):
        for node in sample.nodes:
            found = find(node, sample)
            if found is not None:
                kind, text = found
                return InputBottleneck(kind, f"{node.node}: {text}", next_steps[kind.value])
    load = "; ".join(_describe_load(node) for node in sample.nodes[:1]) or "0 nodes"
    text = f"unknown ({load})"
    return InputBottleneck(BottleneckKind.UNNAMED, text, next_steps["unnamed"])


Evidence = tuple[BottleneckKind, str] | None


def _stuck_call(node: NodeState, _: JobSample) -> Evidence:
    calls = [c for c in node.hung_calls if c.call.startswith(PATH_CALLS) and c.call not in NOT_JOB_CALLS]
    if not calls:
        return None
    oldest = max(calls, key=lambda call: call.age_seconds)
    return BottleneckKind.STUCK_CALL, (
        f"`{oldest.call}` has not returned for {oldest.age_seconds:.0f} s{_mount_type(node, oldest.call)}"
    )


def _blocked_processes(node: NodeState, _: JobSample) -> Evidence:
    """Processes in state D whose wait channel belongs to a file system. A wait in the GPU driver does not count."""
    for group, kind, what in (
        ("network", BottleneckKind.NETWORK_FILE_SYSTEM, "a network file system"),
        ("memory", BottleneckKind.MEMORY, "memory to be freed or swapped in"),
        ("disk", BottleneckKind.STORAGE, "a disk"),
    ):
        channels = sorted({channel for channel in _wait_channels(node) if _is_in_group(channel, group)})
        if channels:
            blocked = sum(_is_in_group(channel, group) for channel in _wait_channels(node))
            total = len(node.processes or ()) + len(node.workers)
            pressure = _pressure("IO", node.load.io_pressure_percent)
            processes = f"{blocked} of {total} process{'' if total == 1 else 'es'} of the job"
            verb = "is" if blocked == 1 else "are"
            return kind, (f"{processes} {verb} waiting for {what} (state D in {', '.join(channels[:2])}{pressure})")
    return None


def _memory_short(node: NodeState, _: JobSample) -> Evidence:
    load = node.load
    pressed = (load.memory_pressure_percent or 0.0) >= MEMORY_PRESSURE_PERCENT
    available, total = load.memory_available_bytes, load.memory_total_bytes
    short = available is not None and total and available < MIN_AVAILABLE_SHARE * total
    if not pressed and not short:
        return None
    numbers = []
    if load.memory_pressure_percent is not None:
        numbers.append(f"memory pressure {load.memory_pressure_percent:.0f} %")
    if available is not None and total:
        numbers.append(f"{available / 1e9:.0f} of {total / 1e9:.0f} GB available")
    if load.swap_used_bytes:
        numbers.append(f"{load.swap_used_bytes / 1e9:.1f} GB in swap")
    return BottleneckKind.MEMORY, f"the host is short of memory ({', '.join(numbers)})"


def _disk_pressure(node: NodeState, _: JobSample) -> Evidence:
    pressure = node.load.io_pressure_percent
    if pressure is None or pressure < IO_PRESSURE_PERCENT:
        return None
    network = [fs for fs in node.filesystems if _is_network(fs.kind)]
    text = f"processes wait for I/O {pressure:.0f} % of the time (IO pressure)"
    if network and len(network) == len(node.filesystems):
        return BottleneckKind.NETWORK_FILE_SYSTEM, f"{text}; {network[0].path} is on {network[0].kind}"
    return BottleneckKind.STORAGE, text


def _cores_busy(node: NodeState, _: JobSample) -> Evidence:
    load = node.load
    pressed = (load.cpu_pressure_percent or 0.0) >= CPU_PRESSURE_PERCENT
    crowded = load.load_1m is not None and load.cpu_count and load.load_1m >= MAX_LOAD_PER_CORE * load.cpu_count
    # Where the kernel reports CPU pressure, a high load alone proves nothing: it includes tasks that wait for a disk.
    if pressed or (crowded and load.cpu_pressure_percent is None):
        return BottleneckKind.CPU, f"all cores of the host are in use ({_describe_load(node)})"
    return None


def _workers_saturated(node: NodeState, sample: JobSample) -> Evidence:
    """A loader worker that uses a whole core cannot go faster. A rank that does may just spin, so it counts only where
    it reports that it waits for data."""
    shares = [w.cpu_percent for w in node.workers if w.cpu_percent is not None]
    full = [share for share in shares if share >= WHOLE_CORE_PERCENT]
    if shares and 2 * len(full) >= len(shares):
        return BottleneckKind.LOADER, (
            f"{len(full)} of {format_count(len(shares), 'data loader worker')} cannot go faster, because each uses a "
            f"whole core ({min(full):.0f} to {max(full):.0f} %); {_describe_load(node)}"
        )
    waits = {s.rank: s.data_wait_ms or 0.0 for s in sample.progress.sources if s.rank is not None}
    loading = [
        (waits[p.rank], p)
        for p in node.processes or ()
        if (p.cpu_percent or 0.0) >= WHOLE_CORE_PERCENT
        and p.rank is not None
        and waits.get(p.rank, 0.0) >= MIN_DATA_WAIT_MS
    ]
    if not loading or node.workers:
        return None
    wait, process = max(loading, key=lambda each: each[0])
    return BottleneckKind.LOADER, (
        f"rank {process.rank} waits {wait:,.0f} ms per step for data, uses {process.cpu_percent:.0f} % of one core "
        f"and has no loader workers, so it reads or tokenizes in its own process; {_describe_load(node)}"
    )


def _outside_the_host(node: NodeState, sample: JobSample) -> Evidence:
    waits = [s.data_wait_ms for s in sample.progress.sources if s.data_wait_ms is not None]
    load = node.load
    if max(waits, default=0.0) < MIN_DATA_WAIT_MS or load.load_1m is None or not load.cpu_count:
        return None
    pressures = (load.cpu_pressure_percent, load.io_pressure_percent, load.memory_pressure_percent)
    if None in pressures or max(p or 0.0 for p in pressures) > IDLE_PRESSURE_PERCENT:
        return None
    if load.load_1m > IDLE_LOAD_PER_CORE * load.cpu_count:
        return None
    return BottleneckKind.OUTSIDE, (
        f"ranks wait up to {max(waits):,.0f} ms per step for data while their host is mostly idle "
        f"({_describe_load(node)}): the data source is slow, or there are too few loader workers"
    )


def _wait_channels(node: NodeState) -> Iterator[str]:
    members: tuple[ProcessSample | WorkerSample, ...] = (*(node.processes or ()), *node.workers)
    for each in members:
        if each.state == "D" and each.wait_channel:
            yield each.wait_channel


def _is_in_group(channel: str, group: str) -> bool:
    """By prefix. Leading underscores do not count: compilers and 64-bit entry points add them to some names."""
    name = channel.lstrip("_")
    return any(name.startswith(start.lstrip("_")) for start in bottleneck_table()["wait_channels"][group])


def _is_network(mount_type: str | None) -> bool:
    return mount_type is not None and mount_type.split(".")[0] in bottleneck_table()["mounts"]["network"]


def _mount_type(node: NodeState, call: str) -> str:
    path = call.partition(" ")[2]
    mount = next((fs.kind for fs in node.filesystems if fs.kind and path.startswith(fs.path.rstrip("/"))), None)
    return "" if mount is None else f" ({mount})"


def _describe_load(node: NodeState) -> str:
    load = node.load
    if load.load_1m is None:
        return f"{node.node} does not report its load"
    text = f"load {load.load_1m:.1f}" + (f" on {load.cpu_count} cores" if load.cpu_count else "")
    for name, percent in (
        ("CPU", load.cpu_pressure_percent),
        ("IO", load.io_pressure_percent),
        ("memory", load.memory_pressure_percent),
    ):
        text += _pressure(name, percent)
    return text


def _pressure(name: str, percent: float | None) -> str:
    return "" if percent is None else f", {name} pressure {percent:.0f} %"
