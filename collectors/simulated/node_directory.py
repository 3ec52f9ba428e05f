"""One simulated node as files: /proc, the kernel log, its tools, and the state from which NVML and nvidia-smi answer.

    NODE/state.json      readings of the GPUs now (on_node/fake_nvml.py, on_node/fake_nvidia_smi.py)
    NODE/proc/...        PID/{stat,comm}, loadavg, pressure/, sys/kernel/hostname
    NODE/dev/kmsg        kernel log records, appended
    NODE/home/           where commands start
    TOOLS/               nvidia-smi and python3, first in every node's PATH

Files are replaced by rename: a reader sees the old or the new content, never a part.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources, util
from pathlib import Path
from typing import Any, Final

import orjson

from wattwatch.collectors.clock import Clock
from wattwatch.collectors.simulated.scenario import SimulatedActivity

DRIVER_VERSION: Final = "580.95.05"
GPU_NAME: Final = "NVIDIA B300 SXM6 AC"
GPU_LIMIT_MILLIWATTS: Final = 1_100_000
GPU_MEMORY_BYTES: Final = 275_040 << 20
HELD_MEMORY_BYTES: Final = 82 * 10**9  # memory in use with activations, arXiv 2608.05944
BUS_IDS: Final = tuple(f"0000000{domain}:{bus}:00.0" for domain in (0, 1) for bus in ("1A", "69", "B5", "DB"))
FIRST_PID: Final = 41_001
TICKS: Final = os.sysconf("SC_CLK_TCK")

# The watcher starts Python with -I -S, so that no variable or package of a node can break it. On a simulated node an
# environment variable brings in the clock and NVML, so the probe (which reads its program from stdin) is started
# without these options. The version check before it needs neither and is run unchanged.
PYTHON: Final = """\
#!/bin/sh
case "$*" in *os.read*)
    while case "$1" in -I|-S|-E) ;; *) false ;; esac; do shift; done ;;
esac
exec {python} "$@"
"""
NVIDIA_SMI: Final = """\
#!/bin/sh
exec {python} -S -E {script} "$@"
"""


@dataclass(frozen=True, slots=True)
class SimulatedGpu:
    """What one GPU and its process show at one gpu."""

    activity: SimulatedActivity
    alive: bool  # its process exists
    lost: bool = False  # the GPU fell off the bus
    pid: int | None = None  # of a real process on this machine; None: a simulated one, which exists only in /proc files


@dataclass(slots=True)
class EnergyCounter:
    """A GPU's energy counter: millijoules at one gpu, and the power since then."""

    millijoules: float
    at_seconds: float
    milliwatts: int = 0

    def advance(self, now: float, milliwatts: int) -> None:
        self.millijoules += self.milliwatts * max(0.0, now - self.at_seconds)
        self.at_seconds, self.milliwatts = now, milliwatts


class NodeDirectory:
    """Writes the files of one node. Times are on the scenario's clock; the node booted at its monotonic zero."""

    def __init__(
        self, directory: Path, name: str, gpus: int, clock: Clock, tools: Path, preload_pynvml: bool = True
    ) -> None:
        """`tools`: see `write_tools`."""
        self.directory = directory
        self.name = name
        self.gpus = gpus
        self.pids = tuple(range(FIRST_PID, FIRST_PID + gpus))
        self.nvml = "ok"  # ok, hang, absent, mismatch
        self.smi = "ok"  # ok, hang, no_driver, mismatch, unknown, no_devices
        self._clock = clock
        self._tools = tools
        self._preload_pynvml = preload_pynvml
        self._started_ticks = int((clock.monotonic() - 600.0) * TICKS)
        self._kernel_records = 0
        self._shown_pids: tuple[int | None, ...] = ()
        now = clock.wall()
        # As if the driver had been loaded for a while: every GPU has a different count.
        self._energy = [EnergyCounter(4.0e9 + 7.7e7 * place, now) for place in range(gpus)]
        for folder in ("proc/pressure", "proc/sys/kernel", "proc/driver/nvidia", "dev", "home"):
            (directory / folder).mkdir(parents=True)
        driver = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build\n"
        replace_text(directory / "proc/driver/nvidia/version", driver)
        replace_text(directory / "proc/sys/kernel/hostname", name + "\n")
        (directory / "dev/kmsg").touch()
        self.log_kernel(6, "nvidia-nvlink: Nvlink Core is being initialized, major device number 511")

    def environment(self) -> dict[str, str]:
        """Environment of commands on this node."""
        pynvml = util.find_spec("pynvml")
        return {
            "PATH": f"{self._tools}:/usr/bin:/bin",
            "HOME": str(self.directory / "home"),
            "USER": "trainer",
            "SHELL": "/bin/sh",
            "LANG": "C.UTF-8",
            "PYTHONPATH": str(resources.files(__package__) / "on_node"),
            "WATTWATCH_NODE_ROOT": str(self.directory),
            "WATTWATCH_NODE_STATE": str(self.directory / "state.json"),
            "WATTWATCH_NODE_SPEED": f"{self._clock.speed:g}",
            "WATTWATCH_NODE_MONOTONIC_ORIGIN": repr(self._clock.monotonic_origin),
            "WATTWATCH_NODE_WALL_ORIGIN": repr(self._clock.wall_origin),
            "WATTWATCH_NODE_PYNVML": pynvml.origin or "" if pynvml and self._preload_pynvml else "",
        }

    def show(self, gpus_now: Sequence[SimulatedGpu], tick: int) -> None:
        """Write the readings of the GPUs now, and the processes if any started or ended."""
        now = self._clock.wall()
        rows = [self._gpu_state(place, gpu, tick, now) for place, gpu in enumerate(gpus_now)]
        state = {"wall_seconds": now, "driver": DRIVER_VERSION, "nvml": self.nvml, "smi": self.smi, "gpus": rows}
        pids = tuple(self._pid(place, gpu) if gpu.alive else None for place, gpu in enumerate(gpus_now))
        if pids != self._shown_pids or tick % 8 == 1:
            self._write_processes(pids, gpus_now)
            self._shown_pids = pids
        if tick % 8 == 1:
            self._write_load(len(pids) - pids.count(None), tick)
        replace_bytes(self.directory / "state.json", orjson.dumps(state))

    def _pid(self, place: int, gpu: SimulatedGpu) -> int:
        return self.pids[place] if gpu.pid is None else gpu.pid

    def _gpu_state(self, place: int, gpu: SimulatedGpu, tick: int, now: float) -> Mapping[str, Any]:
        activity = gpu.activity
        seed = f"{self.name}/{place}/{tick}/"
        milliwatts = int(1000 * seeded_uniform(activity.power_watts, seed + "power"))
        utilization = round(seeded_uniform(activity.utilization_percent, seed + "busy"))
        if activity.utilization_percent[1] - activity.utilization_percent[0] > 50:
            # Scattered utilization and power belong together: a GPU that waits for data draws less.
            low, high = activity.power_watts
            milliwatts = int(1000 * (low + (high - low) * utilization / 100))
        energy = self._energy[place]
        energy.advance(now, milliwatts)
        return {
            "index": place,
            "uuid": f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{self.name}.{place}')}",
            "bus": BUS_IDS[place],
            "name": GPU_NAME,
            "limit_mw": GPU_LIMIT_MILLIWATTS,
            "power_mw": milliwatts,
            "energy_mj": int(energy.millijoules),
            "energy_at": now,
            "util": utilization,
            "mem_util": round(seeded_uniform(activity.memory_utilization_percent, seed + "memory")),
            "mem_used": HELD_MEMORY_BYTES if gpu.alive and activity.memory == "held" else 0,
            "mem_total": GPU_MEMORY_BYTES,
            "temp": 28 + milliwatts // 30_000,
            "sm_clock": 1920 if utilization else 1110,
            "throttle": 0 if utilization else 1,  # gpu_idle
            "pstate": 0,
            "lost": gpu.lost,
            "pids": [self._pid(place, gpu)] if gpu.alive and activity.memory == "held" else [],
        }

    def _write_processes(self, pids: Sequence[int | None], gpus_now: Sequence[SimulatedGpu]) -> None:
        for pid in {*self._shown_pids, *self.pids} - {*pids, None}:
            folder = self.directory / "proc" / str(pid)
            for file in folder.glob("*"):
                file.unlink()
            if folder.exists():
                folder.rmdir()
        for pid, gpu in zip(pids, gpus_now, strict=True):
            if pid is None:
                continue
            folder = self.directory / "proc" / str(pid)
            folder.mkdir(exist_ok=True)
            if gpu.pid is None:
                self._write_process(folder, pid, gpu)
            else:
                copy_process(pid, folder)

    def _write_process(self, folder: Path, pid: int, gpu: SimulatedGpu) -> None:
        ran_ticks = int(self._clock.monotonic() * TICKS) - self._started_ticks
        # The main thread of a rank runs while it computes or spins; only with a lost GPU does it sleep in the driver.
        state = "D" if gpu.lost else "R"
        fields = [1, pid, pid, 0, -1, 4194304, 9000, 0, 12, 0, ran_ticks, ran_ticks // 20, 0, 0, 20, 0, 212, 0]
        fields += [self._started_ticks, 311_000_000_000, 5_200_000, *[0] * 28]
        replace_text(folder / "stat", f"{pid} (python3) {state} {' '.join(map(str, fields))}\n")
        if not (folder / "comm").exists():
            replace_text(folder / "comm", "python3\n")

    def _write_load(self, running: int, tick: int) -> None:
        load = running + seeded_uniform((0.2, 1.2), f"{self.name}/load/{tick}")
        replace_text(self.directory / "proc/loadavg", f"{load:.2f} {load:.2f} {load:.2f} {running}/2041 52311\n")
        for kind in ("cpu", "io", "memory"):
            some = "some avg10=0.31 avg60=0.20 avg300=0.12 total=4211\n"
            replace_text(self.directory / "proc/pressure" / kind, some)

    def log_kernel(self, priority: int, text: str) -> None:
        """Append one record in the format of /dev/kmsg (kernel documentation, ABI/testing/dev-kmsg)."""
        self._kernel_records += 1
        microseconds = int(self._clock.monotonic() * 1e6)
        with (self.directory / "dev/kmsg").open("ab") as file:
            file.write(f"{priority},{self._kernel_records},{microseconds},-;{text}\n".encode())

    def log_out_of_memory(self, pid: int) -> None:
        self.log_kernel(4, "python3 invoked oom-killer: gfp_mask=0xcc0(GFP_KERNEL), order=0, oom_score_adj=0")
        self.log_kernel(
            6,
            f"oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0-1,global_oom,"
            f"task_memcg=/system.slice/train.service,task=python3,pid={pid},uid=1000",
        )
        self.log_kernel(
            3,
            f"Out of memory: Killed process {pid} (python3) total-vm:311427072kB, anon-rss:208311204kB, "
            f"file-rss:0kB, shmem-rss:9216kB, UID:1000 pgtables:410112kB oom_score_adj:0",
        )

    def log_lost_gpu(self, place: int) -> None:
        bus = BUS_IDS[place][4:].lower().removesuffix(".0")
        pid = self.pids[place]
        self.log_kernel(4, f"NVRM: Xid (PCI:{bus}): 79, pid={pid}, name=python3, GPU has fallen off the bus.")


def copy_process(pid: int, folder: Path) -> None:
    """Copy a real process into the node's /proc; one that has just ended keeps its last state."""
    for name in ("stat", "comm"):
        with contextlib.suppress(OSError):
            replace_bytes(folder / name, Path(f"/proc/{pid}/{name}").read_bytes())


def write_tools(directory: Path) -> None:
    """Write the programs of every node. Not in the nodes' own directory, which may be mounted noexec."""
    directory.mkdir(parents=True)
    python = shlex.quote(os.path.realpath(sys.executable))
    script = shlex.quote(str(resources.files(__package__) / "on_node" / "fake_nvidia_smi.py"))
    for name, text in (("python3", PYTHON), ("nvidia-smi", NVIDIA_SMI)):
        path = directory / name
        path.write_text(text.format(python=python, script=script), "utf-8")
        path.chmod(0o755)


def seeded_uniform(bounds: tuple[float, float], seed: str) -> float:
    """A number in `bounds` that depends only on the seed, so that a run can be repeated exactly."""
    low, high = bounds
    mixed = zlib.crc32(seed.encode())
    # Checksums of similar texts are similar; MurmurHash3's finalizer (public domain) scatters them.
    mixed = (mixed ^ mixed >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    mixed = (mixed ^ mixed >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return low + (high - low) * (mixed ^ mixed >> 16) / 0xFFFFFFFF


def replace_text(path: Path, text: str, changed_seconds: float | None = None) -> None:
    replace_bytes(path, text.encode(), changed_seconds)


def replace_bytes(path: Path, data: bytes, changed_seconds: float | None = None) -> None:
    """Replace by rename, with the given modification time."""
    staged = f"{path}.tmp"
    with open(staged, "wb") as file:
        file.write(data)
    if changed_seconds is not None:
        os.utime(staged, (changed_seconds, changed_seconds))
    os.replace(staged, path)
