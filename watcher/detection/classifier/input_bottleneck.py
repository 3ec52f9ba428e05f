"""Boards wait for data: which upstream, as far as the evidence on their hosts names it.

Nearest witness first: a call on the job's paths that hangs, a process of the job that sleeps in a file system, memory,
disks, cores that are all taken, workers that use a whole core each. Where the ranks tell that they wait and their
hosts rest, what they wait for is outside. Else it is said that nothing names it.
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
from wattwatch.watcher.detection.model import JobSample, NodeState

# Of the probe's calls those that touch the job's own paths; the others ask the driver and the kernel.
PATH_CALLS: Final = ("list /", "statvfs /", "read /")
NOT_JOB_CALLS: Final = frozenset({"read /proc"})
# Pressure-stall "some" of 10 s: share of time in which somebody waited. Healthy hosts show single per cents.
CPU_PRESSURE_PERCENT: Final = 25.0
IO_PRESSURE_PERCENT: Final = 20.0
MEMORY_PRESSURE_PERCENT: Final = 10.0
MIN_AVAILABLE_SHARE: Final = 0.03
MAX_LOAD_PER_CORE: Final = 1.0  # load average a core: as many want to run as there are cores
WHOLE_CORE_PERCENT: Final = 90.0
IDLE_LOAD_PER_CORE: Final = 0.5  # a core; and no pressure
IDLE_PRESSURE_PERCENT: Final = 5.0
MIN_DATA_WAIT_MS: Final = 100.0  # a rank that says that it waits less is fed


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
    """What the boards wait for; `words` carry the numbers, `look` is the next step."""

    kind: BottleneckKind
    words: str
    next_step: str

    @property
    def named(self) -> bool:
        return self.kind is not BottleneckKind.UNNAMED


@cache
def bottleneck_table() -> dict[str, Any]:
    return tomllib.loads(resources.files(__package__).joinpath("upstream.toml").read_text("utf-8"))


def find_input_bottleneck(sample: JobSample) -> InputBottleneck:
    """The nearest witness over all nodes in sight of the job."""
    for find in (_stuck_call, _blocked_processes, _memory, _disks, _cores_busy, _workers_saturated, _outside_the_host):
        for node in sample.nodes:
            found = find(node, sample)
            if found is not None:
                kind, words = found
                return InputBottleneck(kind, f"{node.node}: {words}", bottleneck_table()["look"][kind.value])
    told = "; ".join(_describe_load(node) for node in sample.nodes[:1]) or "no node tells its load"
    words = f"nothing on the hosts names what the boards wait for ({told})"
    return InputBottleneck(BottleneckKind.UNNAMED, words, bottleneck_table()["look"]["unnamed"])


Found = tuple[BottleneckKind, str] | None


def _stuck_call(node: NodeState, _: JobSample) -> Found:
    calls = [c for c in node.hung_calls if c.call.startswith(PATH_CALLS) and c.call not in NOT_JOB_CALLS]
    if not calls:
        return None
    worst = max(calls, key=lambda call: call.age_seconds)
    return BottleneckKind.STUCK_CALL, (
        f"{worst.call} has not returned for {worst.age_seconds:.0f} s{_mount_of(node, worst.call)}"
    )


def _blocked_processes(node: NodeState, _: JobSample) -> Found:
    """Processes in state D whose wait channel is known to be of a file system; a driver's is no upstream."""
    for group, kind, what in (
        ("network", BottleneckKind.NETWORK_FILE_SYSTEM, "a network file system"),
        ("memory", BottleneckKind.MEMORY, "memory to be freed or swapped in"),
        ("disk", BottleneckKind.STORAGE, "a disk"),
    ):
        asleep = sorted({where for where in _wait_channels(node) if _is_in_group(where, group)})
        if asleep:
            count = sum(_is_in_group(where, group) for where in _wait_channels(node))
            of = len(node.processes or ()) + len(node.workers)
            pressure = _pressure("IO", node.load.io_pressure_percent)
            return kind, (
                f"{count} of {of} processes of the job wait for {what} (state D in {', '.join(asleep[:2])}{pressure})"
            )
    return None


def _memory(node: NodeState, _: JobSample) -> Found:
    load = node.load
    pressed = (load.memory_pressure_percent or 0.0) >= MEMORY_PRESSURE_PERCENT
    available, total = load.memory_available_bytes, load.memory_total_bytes
    short = available is not None and total and available < MIN_AVAILABLE_SHARE * total
    if not pressed and not short:
        return None
    words = ["the host is short of memory"]
    if load.memory_pressure_percent is not None:
        words.append(f"memory pressure {load.memory_pressure_percent:.0f} %")
    if available is not None and total:
        words.append(f"{available / 1e9:.0f} of {total / 1e9:.0f} GB available")
    if load.swap_used_bytes:
        words.append(f"{load.swap_used_bytes / 1e9:.1f} GB in swap")
    return BottleneckKind.MEMORY, f"{words[0]} ({', '.join(words[1:])})"


def _disks(node: NodeState, _: JobSample) -> Found:
    pressure = node.load.io_pressure_percent
    if pressure is None or pressure < IO_PRESSURE_PERCENT:
        return None
    network = [fs for fs in node.filesystems if _is_network(fs.kind)]
    words = f"processes wait for input and output {pressure:.0f} % of the time (IO pressure)"
    if network and len(network) == len(node.filesystems):
        return BottleneckKind.NETWORK_FILE_SYSTEM, f"{words}; {network[0].path} is on {network[0].kind}"
    return BottleneckKind.STORAGE, words


def _cores_busy(node: NodeState, _: JobSample) -> Found:
    load = node.load
    pressed = (load.cpu_pressure_percent or 0.0) >= CPU_PRESSURE_PERCENT
    crowded = load.load_1m is not None and load.cpu_count and load.load_1m >= MAX_LOAD_PER_CORE * load.cpu_count
    # Where the kernel tells pressure a high load alone is no crowd: it counts those that sleep on a disk too.
    if pressed or (crowded and load.cpu_pressure_percent is None):
        return BottleneckKind.CPU, f"the host's cores are all taken ({_describe_load(node)})"
    return None


def _workers_saturated(node: NodeState, sample: JobSample) -> Found:
    """A worker that uses a whole core can do no more. A rank that does may spin: only a wait for data tells."""
    shares = [w.cpu_percent for w in node.workers if w.cpu_percent is not None]
    full = [share for share in shares if share >= WHOLE_CORE_PERCENT]
    if shares and 2 * len(full) >= len(shares):
        return BottleneckKind.LOADER, (
            f"{len(full)} of {len(shares)} loader workers use a whole core each ({min(full):.0f} to {max(full):.0f} % "
            f"of one): they cannot go faster; {_describe_load(node)}"
        )
    waits = {s.rank: s.data_wait_ms or 0.0 for s in sample.progress.sources if s.rank is not None}
    own = [
        (waits[p.rank], p)
        for p in node.processes or ()
        if (p.cpu_percent or 0.0) >= WHOLE_CORE_PERCENT
        and p.rank is not None
        and waits.get(p.rank, 0.0) >= MIN_DATA_WAIT_MS
    ]
    if not own or node.workers:
        return None
    wait, process = max(own, key=lambda each: each[0])
    return BottleneckKind.LOADER, (
        f"rank {process.rank} waits {wait:,.0f} ms a step for data, uses {process.cpu_percent:.0f} % of one core and "
        f"has no workers: it reads or tokenises in its own process; {_describe_load(node)}"
    )


def _outside_the_host(node: NodeState, sample: JobSample) -> Found:
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
        f"ranks wait up to {max(waits):,.0f} ms a step for data while their host rests ({_describe_load(node)}): what "
        "they wait for is outside of it, or too few workers ask for it"
    )


def _wait_channels(node: NodeState) -> Iterator[str]:
    members: tuple[ProcessSample | WorkerSample, ...] = (*(node.processes or ()), *node.workers)
    for each in members:
        if each.state == "D" and each.wait_channel:
            yield each.wait_channel


def _is_in_group(channel: str, group: str) -> bool:
    """By how it begins; compilers and 64-bit entries put underscores before some."""
    name = channel.lstrip("_")
    return any(name.startswith(start.lstrip("_")) for start in bottleneck_table()["wait_channels"][group])


def _is_network(kind: str | None) -> bool:
    return kind is not None and kind.split(".")[0] in bottleneck_table()["mounts"]["network"]


def _mount_of(node: NodeState, call: str) -> str:
    path = call.partition(" ")[2]
    mount = next((fs.kind for fs in node.filesystems if fs.kind and path.startswith(fs.path.rstrip("/"))), None)
    return "" if mount is None else f" ({mount})"


def _describe_load(node: NodeState) -> str:
    load = node.load
    if load.load_1m is None:
        return f"{node.node} does not tell its load"
    words = f"load {load.load_1m:.1f}" + (f" on {load.cpu_count} cores" if load.cpu_count else "")
    for name, percent in (
        ("CPU", load.cpu_pressure_percent),
        ("IO", load.io_pressure_percent),
        ("memory", load.memory_pressure_percent),
    ):
        words += _pressure(name, percent)
    return words


def _pressure(name: str, percent: float | None) -> str:
    return "" if percent is None else f", {name} pressure {percent:.0f} %"
