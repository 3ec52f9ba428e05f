"""What a node said: the frozen types that every other file reads.

A value is a number or None. A None always has a reason in the sample's `reasons`: `unsupported` (this board has no
such reading) and `unreadable` (it should have, and did not say) never merge. Units stand in the names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class ReadingStatus(StrEnum):
    """Why a reading has a value, or has none."""

    OK = "ok"
    UNSUPPORTED = "unsupported"  # [N/A], [Not Supported], a column nobody asked for: absent by design
    UNREADABLE = "unreadable"  # [Unknown Error], ERR!: the driver should have said and did not
    LOST = "lost"  # [GPU is lost]: fell off the bus
    RESET_REQUIRED = "reset_required"  # [GPU requires reset]
    MIG = "mig"  # utilisation has no meaning for the whole board while it is sliced


class HostStatus(StrEnum):
    """Can this host be seen, and if not, what stands in the way."""

    OK = "ok"
    UNREACHABLE = "unreachable"  # no TCP, no banner, no line in time
    AUTH_FAILED = "auth_failed"
    HOST_KEY_CHANGED = "host_key_changed"  # also: host key unknown; the detail says which
    SAMPLER_TIMEOUT = "sampler_timeout"  # the node answers, its GPU query does not
    DRIVER_DOWN = "driver_down"  # NVML mismatch, driver not loaded, container lost its devices
    NO_DEVICES = "no_devices"
    PARSE_ERROR = "parse_error"  # it answered, and nothing of it could be read


class PowerSource(StrEnum):
    """Which reading `power_watts` came from. They differ by up to 17 W on one board at one time."""

    ENERGY_COUNTER = "energy_counter"  # mean over the interval: joules / seconds
    DRAW = "power.draw"  # 1 s average on most boards since Ampere, instantaneous before
    AVERAGE = "power.draw.average"
    INSTANT = "power.draw.instant"
    TABLE = "table"  # the default nvidia-smi table


MIN_UNREADABLE_FIELDS: Final = 2
FAULT_IF_UNREADABLE: Final = frozenset(
    {"ecc", "name"}
)  # memory errors that cannot be counted; a board that forgot its name
NO_REASONS: Final[Mapping[str, ReadingStatus]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """One value with its reason; `value is None` exactly when `reason is not Reason.OK`."""

    value: float | None
    reason: ReadingStatus


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One board at one moment. Never renumbered: `index` is what the driver said, with its gaps."""

    index: int | None
    uuid: str | None = None
    pci_bus_id: str | None = None  # as printed, full domain: 00000001:1A:00.0 is not 00000000:1A:00.0
    name: str | None = None
    power_watts: float | None = None
    power_source: PowerSource | None = None
    power_limit_watts: float | None = None  # enforced limit where known
    utilization_percent: float | None = None  # 0..100
    memory_utilization_percent: float | None = None  # 0..100
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    temperature_celsius: float | None = None
    sm_clock_mhz: float | None = None
    energy_joules: float | None = None  # counter since driver load
    throttle_reasons: frozenset[str] | None = None  # lower case, e.g. {"gpu_idle"}, {"hw_thermal_slowdown"}
    performance_state: str | None = None
    mig: bool | None = None
    reasons: Mapping[str, ReadingStatus] = field(default_factory=lambda: NO_REASONS)  # field name -> why it is None

    def reading(self, name: str) -> Reading:
        """The named field with its reason. A None without a recorded reason was never asked for: unsupported."""
        value = getattr(self, name)
        if value is not None:
            return Reading(float(value), ReadingStatus.OK)
        return Reading(None, self.reasons.get(name, ReadingStatus.UNSUPPORTED))

    @property
    def key(self) -> str:
        """Identity over time: UUID, else full PCI id, else the driver's index, else "?"."""
        return self.uuid or self.pci_bus_id or ("?" if self.index is None else str(self.index))

    @property
    def fault(self) -> ReadingStatus | None:
        """LOST or RESET_REQUIRED where any reading says so, UNREADABLE where several fail; None for a sound board.

        One reading may fail for itself (a sensor, 0 W beside a load); a broken board fails in several at once.
        """
        if not self.reasons:
            return None
        reasons = list(self.reasons.values())
        if ReadingStatus.LOST in reasons:
            return ReadingStatus.LOST
        if ReadingStatus.RESET_REQUIRED in reasons:
            return ReadingStatus.RESET_REQUIRED
        unreadable = {name for name, reason in self.reasons.items() if reason is ReadingStatus.UNREADABLE}
        return (
            ReadingStatus.UNREADABLE
            if len(unreadable) >= MIN_UNREADABLE_FIELDS or unreadable & FAULT_IF_UNREADABLE
            else None
        )


@dataclass(frozen=True, slots=True)
class MissingGpu:
    """A board that the tool named and could not open ("Unable to determine the device handle for GPU...")."""

    index: int | None
    pci_bus_id: str | None
    reason: ReadingStatus
    text: str


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process of the job, from /proc/PID/{stat,comm} only: those never block on a stuck process."""

    pid: int
    name: str  # comm
    state: str  # R S D Z T ..., as in /proc/PID/stat
    started_seconds: float  # on the node's boot clock; pid + start identify a process
    cpu_seconds: float | None = None
    gpu_indexes: tuple[int, ...] = ()  # boards it holds a context on
    rank: int | None = None  # from its heartbeat, matched by pid
    cpu_percent: float | None = None  # of one core, over the last seconds; None: seen for too short a time
    wait_channel: str | None = None  # kernel function that it sleeps in, in state D where the node tells it


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A child of a process of the job: a loader's worker, most often. It holds no board and is no rank."""

    pid: int
    parent_pid: int
    name: str  # comm
    state: str
    cpu_percent: float | None = None  # of one core, as of ProcessSample
    wait_channel: str | None = None


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """How far the job says it is, from one log or one heartbeat file."""

    source: str  # path
    format: str  # "heartbeat", "torchtitan", "hf_trainer", "megatron_lm", "regex"
    step: int | None
    total_steps: int | None = None
    loss: float | None = None  # may be nan or inf: the job said so
    tokens_per_second: float | None = None  # whole job; None where the source only says it per GPU and world is unknown
    line_interval_seconds: float | None = None  # seconds between progress lines, from their own stamps
    age_seconds: float | None = None  # since the source last changed, on the node's clocks
    rank: int | None = None
    world: int | None = None
    pid: int | None = None
    restart: int | None = None
    phase: str | None = None  # load train save barrier eval done
    data_wait_ms: float | None = None
    why: str = ""  # what was found, or why step is None
    stopped: str | None = None  # what the log says, behind its last step, of being stopped from outside


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint below a directory; `complete` is None where the layout leaves no mark and it is not quiet yet."""

    name: str
    step: int | None
    complete: bool | None
    bytes: int
    age_seconds: float | None  # since the newest change in it
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointSample:
    """A checkpoint directory as the node sees it; newest last. `error` says why it could not be read."""

    directory: str
    entries: tuple[CheckpointEntry, ...]
    age_seconds: float  # since the listing was made: a hung file system serves an old one
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One line of the kernel log that names a fault."""

    kind: str  # "xid", "oom", "segfault"
    text: str
    age_seconds: float | None
    xid: int | None = None
    pci_bus_id: str | None = None
    pid: int | None = None
    process: str | None = None


@dataclass(frozen=True, slots=True)
class HungCall:
    """A call on the node that has not returned: "nvml", "nvidia-smi", "list /mnt/ckpt"."""

    call: str
    age_seconds: float


@dataclass(frozen=True, slots=True)
class FilesystemSample:
    path: str
    free_bytes: int | None
    total_bytes: int | None
    error: str | None = None
    kind: str | None = None  # type of the mount: "ext4", "nfs4", "lustre"


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Load average over 1 min, pressure-stall shares (some, avg10, 0..100), memory; None where the kernel has none."""

    load_1m: float | None = None
    cpu_count: int | None = None
    cpu_pressure_percent: float | None = None
    io_pressure_percent: float | None = None
    memory_pressure_percent: float | None = None
    memory_available_bytes: int | None = None
    memory_total_bytes: int | None = None
    swap_used_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class NodeSample:
    """One line of a node's probe, typed. A node that did not answer is a gap, never a sample with zeros.

    `gpus` is None when GPUs could not be read at all (status and detail say why); an empty tuple never occurs
    with status OK. `processes` is None when they could not be listed.
    """

    node: str
    status: HostStatus
    detail: str  # "" when OK; else one sentence with what was seen
    sequence: int
    node_seconds: float  # the node's monotonic clock: for rates
    wall_seconds: float  # the node's wall clock: for people and skew
    received_seconds: float  # control host's monotonic clock: for deadlines
    gpu_source: str = ""  # "nvml", "nvidia-smi", "shell", "csv", "table", "xml"
    gpus: tuple[GpuSample, ...] | None = None
    missing_gpus: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()  # lines that were read, understood and harmless, or not understood
    processes: tuple[ProcessSample, ...] | None = None
    progress: tuple[ProgressSample, ...] = ()
    checkpoints: tuple[CheckpointSample, ...] = ()
    kernel_events: tuple[KernelEvent, ...] = ()  # new since the previous line
    hung_calls: tuple[HungCall, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    load: HostLoad = HostLoad()
    gpus_age_seconds: float = 0.0  # since the boards were asked: a slow query's answer stands in several lines
    workers: tuple[WorkerSample, ...] = ()  # children of `processes`, looked at every few seconds
    driver_version: str | None = None  # "580.95.05", of the kernel module that is loaded
