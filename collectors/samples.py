"""The samples that collectors produce: frozen types with units in their names. Everything downstream reads these.

A value is a number or None, and every None has a reason: `unsupported` (this GPU has no such reading) and `unreadable`
(it should have one and the driver did not return it) are different and are never merged.

A reading of a GPU is declared once, as a field of `GpuSample`: its name with the unit, its type, and where it comes
from (`GpuReading`). The probe, the NVML reader and the nvidia-smi readers take it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, Literal


class ReadingStatus(StrEnum):
    """Whether a reading has a value and, if not, why."""

    OK = "ok"
    UNSUPPORTED = "unsupported"  # [N/A], [Not Supported], or never queried: absent by design, never a fault
    UNREADABLE = "unreadable"  # [Unknown Error], ERR!: the driver should have returned a value and did not
    LOST = "lost"  # [GPU is lost]: it fell off the bus
    RESET_REQUIRED = "reset_required"  # [GPU requires reset]
    MIG = "mig"  # utilization has no meaning for the whole GPU while it is divided into MIG instances
    UNPARSED = "unparsed"  # printed, but cut off or in an unknown form: says nothing about the GPU


class HostStatus(StrEnum):
    """Whether this host can be observed and, if not, what prevents it."""

    OK = "ok"
    UNREACHABLE = "unreachable"  # no TCP connection, no SSH banner, or no line in time
    AUTH_FAILED = "auth_failed"
    HOST_KEY_CHANGED = "host_key_changed"  # also: host key unknown; the detail says which
    SAMPLER_TIMEOUT = "sampler_timeout"  # the node answers, its GPU query does not
    DRIVER_DOWN = "driver_down"  # NVML version mismatch, driver not loaded, container lost its devices
    NO_DEVICES = "no_devices"
    PARSE_ERROR = "parse_error"  # it answered, and none of the answer could be parsed


class PowerSource(StrEnum):
    """Which reading `power_watts` came from. They differ by up to 17 W on one GPU at the same moment."""

    ENERGY_COUNTER = "energy_counter"  # mean over the interval: joules / seconds
    DRAW = "power.draw"  # 1 s average on most GPUs since Ampere, instantaneous before
    AVERAGE = "power.draw.average"
    INSTANT = "power.draw.instant"
    TABLE = "table"  # the default nvidia-smi table


MIN_UNREADABLE_FIELDS: Final = 2
"""A GPU counts as broken when at least this many of its readings fail. One sensor can fail on a GPU that works; in the
public reports of broken GPUs, several readings fail together."""
FAULT_IF_UNREADABLE: Final = frozenset({"ecc", "name"})
"""A GPU also counts as broken when one of these readings alone fails: its memory error counters or its name."""
NO_REASONS: Final[Mapping[str, ReadingStatus]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Reading:
    """One value with its status; `value is None` exactly when `reason is not ReadingStatus.OK`."""

    value: float | None
    reason: ReadingStatus


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Where one field of `GpuSample` comes from: NVML through the probe, and the columns of nvidia-smi.

    A reading that is a plain number or text needs nothing but this declaration. `special` marks those with code of
    their own in nvml.py and smi/gpu_cells.py (a choice between sources, a bit mask, a switch).
    """

    kind: Literal["number", "text", "special"] = "number"
    nvml_key: str = ""
    """The name of this reading in the rows that the probe sends, both as a column and as a key of the errors.
    Recordings contain these names, so never rename one. Empty if the reading does not come from NVML."""
    nvml_calls: tuple[tuple[str | int, ...], ...] = ()
    """Each entry is a pynvml function that takes a device handle, then its other arguments. An argument given as a
    string is the name of a pynvml constant. The first function that the driver accepts is used: newer drivers renamed
    some functions, and older drivers lack some."""
    nvml_part: str | int | None = None
    """The attribute or item of the function's result that holds this reading. None: the result itself is the reading.
    If several readings come from the same call, the driver is called only once."""
    nvml_divisor: float = 1.0  # NVML's units in one of ours: 1000 for milliwatts
    steady: bool = False  # only an administrator changes it: read every ten seconds, which halves the driver calls
    live: bool = False  # must not be trusted once the GPU is lost: it keeps returning old numbers, or zeros
    column: str = ""  # name of the column in smi/columns.toml
    query: str = ""  # what to ask of nvidia-smi --query-gpu
    old_query: str = ""  # the same for drivers that refuse one of the newer columns; known to every driver since 2013
    query_unit: str = ""  # unit of that column where nvidia-smi prints none
    lowest: float = 0.0  # outside of lowest..highest (our unit) a value is unreadable
    highest: float | None = None


def gpu_reading(**source: Any) -> Any:
    """A field of `GpuSample` that is None by default, with the `GpuReading` that says where it comes from."""
    return field(default=None, metadata={"reading": GpuReading(**source)})


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU at one moment. Never renumbered: `index` is the driver's own, gaps included."""

    index: int | None
    uuid: str | None = gpu_reading(
        kind="text",
        nvml_key="uuid", nvml_calls=(("nvmlDeviceGetUUID",),), steady=True,
        column="uuid", query="uuid", old_query="uuid",
    )  # fmt: skip
    pci_bus_id: str | None = gpu_reading(  # as printed, full domain: 00000001:1A:00.0 is not 00000000:1A:00.0
        kind="text",
        nvml_key="pci_bus_id", nvml_calls=(("nvmlDeviceGetPciInfo",),), nvml_part="busId", steady=True,
        column="pci_bus_id", query="pci.bus_id", old_query="pci.bus_id",
    )  # fmt: skip
    name: str | None = gpu_reading(
        kind="text",
        nvml_key="name", nvml_calls=(("nvmlDeviceGetName",),), steady=True,
        column="name", query="name", old_query="name",
    )  # fmt: skip
    power_watts: float | None = gpu_reading(  # which of several sources it is: `power_source`
        kind="special", live=True,
        nvml_key="power_mw", nvml_calls=(("nvmlDeviceGetPowerUsage",),), nvml_divisor=1000.0,
        column="power_draw", query="power.draw", old_query="power.draw",
    )  # fmt: skip
    power_source: PowerSource | None = None
    power_limit_watts: float | None = gpu_reading(  # the enforced limit where known
        nvml_key="power_limit_mw", nvml_calls=(("nvmlDeviceGetEnforcedPowerLimit",),), nvml_divisor=1000.0, steady=True,
        column="power_limit_enforced", query="enforced.power.limit", old_query="power.limit",
    )  # fmt: skip
    utilization_percent: float | None = gpu_reading(
        live=True, highest=100.0,
        nvml_key="util", nvml_calls=(("nvmlDeviceGetUtilizationRates",),), nvml_part="gpu",
        column="utilization", query="utilization.gpu", old_query="utilization.gpu",
    )  # fmt: skip
    memory_utilization_percent: float | None = gpu_reading(
        live=True, highest=100.0,
        nvml_key="mem_util", nvml_calls=(("nvmlDeviceGetUtilizationRates",),), nvml_part="memory",
        column="memory_utilization", query="utilization.memory", old_query="utilization.memory",
    )  # fmt: skip
    # Version 2 of the memory call counts as nvidia-smi does, without the driver's reserve; drivers before 510 have
    # only version 1.
    memory_used_bytes: float | None = gpu_reading(
        live=True,
        nvml_key="mem_used", nvml_part="used",
        nvml_calls=(("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)),
        column="memory_used", query="memory.used", old_query="memory.used", query_unit="MiB",
    )  # fmt: skip
    memory_total_bytes: float | None = gpu_reading(
        nvml_key="mem_total", nvml_part="total",
        nvml_calls=(("nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"), ("nvmlDeviceGetMemoryInfo",)),
        column="memory_total", query="memory.total", old_query="memory.total", query_unit="MiB",
    )  # fmt: skip
    temperature_celsius: float | None = gpu_reading(
        live=True, lowest=-100.0, highest=1000.0,
        nvml_key="temp", nvml_calls=(("nvmlDeviceGetTemperature", 0),),  # 0: NVML_TEMPERATURE_GPU
        column="temperature", query="temperature.gpu", old_query="temperature.gpu",
    )  # fmt: skip
    sm_clock_mhz: float | None = gpu_reading(
        live=True,
        nvml_key="sm_clock", nvml_calls=(("nvmlDeviceGetClockInfo", 1),),  # 1: NVML_CLOCK_SM
        column="sm_clock", query="clocks.sm", old_query="clocks.sm",
    )  # fmt: skip
    energy_joules: float | None = gpu_reading(  # counter since the driver was loaded
        live=True,
        nvml_key="energy_mj", nvml_calls=(("nvmlDeviceGetTotalEnergyConsumption",),), nvml_divisor=1000.0,
    )  # fmt: skip
    performance_state: str | None = gpu_reading(  # "P0": NVML returns a number, nvidia-smi prints the text
        kind="special",
        nvml_key="pstate", nvml_calls=(("nvmlDeviceGetPerformanceState",),),
        column="performance_state", query="pstate", old_query="pstate",
    )  # fmt: skip
    throttle_reasons: frozenset[str] | None = gpu_reading(  # lower case, e.g. {"gpu_idle"}, {"hw_thermal_slowdown"}
        kind="special", live=True,
        nvml_key="throttle_bitmask",
        nvml_calls=(  # renamed in driver 535
            ("nvmlDeviceGetCurrentClocksEventReasons",),
            ("nvmlDeviceGetCurrentClocksThrottleReasons",),
        ),
        column="throttle_mask", query="clocks_event_reasons.active",
    )  # fmt: skip
    mig: bool | None = gpu_reading(
        kind="special",
        nvml_key="mig", nvml_calls=(("nvmlDeviceGetMigMode",),), nvml_part=0, steady=True,  # [current, pending]
        column="mig", query="mig.mode.current",
    )  # fmt: skip
    # Errors in its memories that could not be corrected, since the driver was loaded. The kernel log names each,
    # where the account may read it. In NVML: 1 uncorrected; 0 volatile, 1 aggregate. smi/gpu_cells.py reads the cells.
    uncorrected_ecc_errors: float | None = gpu_reading(
        live=True, steady=True,
        nvml_key="ecc_uncorrected", nvml_calls=(("nvmlDeviceGetTotalEccErrors", 1, 0),),
        query="ecc.errors.uncorrected.volatile.total",
    )  # fmt: skip
    lifetime_uncorrected_ecc_errors: float | None = gpu_reading(
        live=True, steady=True,
        nvml_key="ecc_uncorrected_lifetime", nvml_calls=(("nvmlDeviceGetTotalEccErrors", 1, 1),),
    )  # fmt: skip
    # 1: the driver replaces damaged memory at the next reset of the GPU. Rows since Ampere, whole pages before.
    memory_repair_pending: float | None = gpu_reading(
        live=True, steady=True,
        nvml_key="repair_pending", nvml_part=2, highest=1.0,  # [corrected, uncorrected, pending, failed]
        nvml_calls=(("nvmlDeviceGetRemappedRows",), ("nvmlDeviceGetRetiredPagesPendingStatus",)),
    )  # fmt: skip
    memory_repair_failed: float | None = gpu_reading(  # 1: no spare row is left for one that is damaged
        live=True, steady=True,
        nvml_key="repair_failed", nvml_calls=(("nvmlDeviceGetRemappedRows",),), nvml_part=3, highest=1.0,
    )  # fmt: skip
    reasons: Mapping[str, ReadingStatus] = field(default_factory=lambda: NO_REASONS)  # field name -> why it is None

    def reading(self, name: str) -> Reading:
        """The named field with its status. A None without a recorded reason was never queried: unsupported."""
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
        """LOST or RESET_REQUIRED where any reading says so, UNREADABLE where several fail; None for a healthy GPU.

        A single reading may fail alone (a sensor, 0 W on a busy GPU); on a broken GPU several fail at once.
        """
        if not self.reasons:
            return None
        reasons = list(self.reasons.values())
        if ReadingStatus.LOST in reasons:
            return ReadingStatus.LOST
        if ReadingStatus.RESET_REQUIRED in reasons:
            return ReadingStatus.RESET_REQUIRED
        unreadable = {name for name, reason in self.reasons.items() if reason is ReadingStatus.UNREADABLE}
        broken = len(unreadable) >= MIN_UNREADABLE_FIELDS or unreadable & FAULT_IF_UNREADABLE
        return ReadingStatus.UNREADABLE if broken else None


GPU_READINGS: Final[Mapping[str, GpuReading]] = MappingProxyType(
    {each.name: each.metadata["reading"] for each in fields(GpuSample) if "reading" in each.metadata}
)
"""The source of each field of `GpuSample`, by field name. The order is that of the fields in the class."""


@dataclass(frozen=True, slots=True)
class MissingGpu:
    """A GPU that the tool named and could not open ("Unable to determine the device handle for GPU...")."""

    index: int | None
    pci_bus_id: str | None
    reason: ReadingStatus
    text: str


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One process of the job, from /proc/PID/{stat,comm} only: reading those never blocks on a stuck process."""

    pid: int
    name: str  # comm
    state: str  # R S D Z T ..., as in /proc/PID/stat
    started_seconds: float  # on the node's boot clock; pid and start time together identify a process
    cpu_seconds: float | None = None
    gpu_indexes: tuple[int, ...] = ()  # GPUs on which it holds a context
    rank: int | None = None  # from its heartbeat, matched by pid
    cpu_percent: float | None = None  # of one core, over the last seconds; None: not observed for long enough
    wait_channel: str | None = None  # kernel function in which it sleeps; only in state D, where the kernel shows it


@dataclass(frozen=True, slots=True)
class WorkerSample:
    """A child of a process of the job, usually a data loader worker. It holds no GPU and is not a rank."""

    pid: int
    parent_pid: int
    name: str  # comm
    state: str
    cpu_percent: float | None = None  # of one core, as in ProcessSample
    wait_channel: str | None = None


@dataclass(frozen=True, slots=True)
class ProgressSample:
    """How far the job says it has come, from one log or one heartbeat file."""

    source: str  # path
    format: str  # "heartbeat", "torchtitan", "hf_trainer", "megatron_lm", "regex"
    step: int | None
    total_steps: int | None = None
    loss: float | None = None  # may be nan or inf if that is what the job printed
    tokens_per_second: float | None = None  # whole job; None if the source gives it per GPU and world is unknown
    line_interval_seconds: float | None = None  # seconds between progress lines, from their own timestamps
    age_seconds: float | None = None  # since the source last changed, on the node's clocks
    rank: int | None = None
    world: int | None = None
    pid: int | None = None
    restart: int | None = None
    phase: str | None = None  # load train save barrier eval done
    data_wait_ms: float | None = None
    why: str = ""  # what was found, or why step is None
    stopped: str | None = None  # how the job was stopped from outside, if its log says so after the last step
    epoch: int | None = None  # as printed: the first one is 0 or 1
    epochs: int | None = None
    epoch_step: int | None = None  # as printed, where the counter starts again in each epoch; `step` counts over all
    epoch_steps: int | None = None
    samples_per_second: float | None = None  # as printed: of the whole job or of one rank
    seconds_per_step: float | None = None
    eta_seconds: float | None = None  # as printed: until the end of the run or of the epoch
    guessed: bool = False  # the trainer is unknown; the step is a number that grows steadily


@dataclass(frozen=True, slots=True)
class CheckpointEntry:
    """One checkpoint in a directory.

    `complete` is None where the layout has no completion marker and the files changed too recently to tell.
    """

    name: str
    step: int | None
    complete: bool | None
    bytes: int
    age_seconds: float | None  # since the newest change in it
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointSample:
    """A checkpoint directory as the node sees it, newest checkpoint last. `error`: why it could not be read."""

    directory: str
    entries: tuple[CheckpointEntry, ...]
    age_seconds: float  # since the directory was listed: while a file system hangs, this is an old listing
    error: str | None = None


@dataclass(frozen=True, slots=True)
class KernelEvent:
    """One line of the kernel log that reports a fault."""

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
    """Space on the file system that holds `path`; `error` where statvfs failed."""

    path: str
    free_bytes: int | None
    total_bytes: int | None
    error: str | None = None
    kind: str | None = None  # type of the mount: "ext4", "nfs4", "lustre"


@dataclass(frozen=True, slots=True)
class HostLoad:
    """Load average over 1 min, pressure-stall shares (some, avg10, 0..100), memory. None where the kernel lacks it."""

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

    `gpus` is None when no GPU could be read (status and detail say why); with status OK it is never empty.
    `processes` is None when they could not be listed, and empty only where the node says that there is none. Those in
    `exited_processes` were listed before and do not exist any more; those in `unlisted_processes` do, though nothing
    lists them now. Both hold (pid, start time).
    """

    node: str
    status: HostStatus
    detail: str  # "" when OK; else one sentence with what was observed
    sequence: int
    node_seconds: float  # the node's monotonic clock: for rates
    wall_seconds: float  # the node's wall clock: for people and clock skew
    received_seconds: float  # the control host's monotonic clock: for deadlines
    gpu_source: str = ""  # "nvml", "nvidia-smi", "shell", "csv", "table", "xml"
    gpus: tuple[GpuSample, ...] | None = None
    missing_gpus: tuple[MissingGpu, ...] = ()
    warnings: tuple[str, ...] = ()  # harmless messages, and lines that were not understood
    processes: tuple[ProcessSample, ...] | None = None
    progress: tuple[ProgressSample, ...] = ()
    checkpoints: tuple[CheckpointSample, ...] = ()
    kernel_events: tuple[KernelEvent, ...] = ()  # new since the previous line
    hung_calls: tuple[HungCall, ...] = ()
    filesystems: tuple[FilesystemSample, ...] = ()
    load: HostLoad = HostLoad()
    gpus_age_seconds: float = 0.0  # since the GPUs were queried: one answer of a slow query appears in several lines
    workers: tuple[WorkerSample, ...] = ()  # children of `processes`, read every few seconds
    driver_version: str | None = None  # "580.95.05", of the kernel module that is loaded
    exited_processes: frozenset[tuple[int, float]] = frozenset()
    unlisted_processes: frozenset[tuple[int, float]] = frozenset()
    kernel_log_error: str = ""  # why the kernel log cannot be read; "" where it can
