"""GPU logs as people have them, made from a clean one: full rate, without index or header, with pauses, restarts, lost
lines and cut ends, several in one file, and as tables with a list of processes.

Nothing here is a fault of a GPU or a job, so whatever a watcher reports about a broken GPU, a crash or a hang in such a
log, and did not report in the clean one, is untrue.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi import read_gpu_output

MEBIBYTE = 2.0**20
ROW_SECONDS = 0.002  # between two rows of one query of nvidia-smi


@dataclass(frozen=True, slots=True)
class Round:
    """The rows of one query. `row_seconds`: when each row was printed, in any clock that only grows."""

    row_seconds: tuple[float, ...]
    gpus: tuple[GpuSample, ...]

    @property
    def seconds(self) -> float:
        return self.row_seconds[0]

    def moved(self, seconds: float) -> Round:
        return replace(self, row_seconds=tuple(second + seconds for second in self.row_seconds))


Rounds = tuple[Round, ...]


def burst(seconds: float, gpus: tuple[GpuSample, ...]) -> Round:
    return Round(tuple(seconds + i * ROW_SECONDS for i in range(len(gpus))), gpus)


def read_rounds(path: Path) -> Rounds:
    """The rounds of a clean log; none if it has no GPU readings. A log of one GPU may have no index."""
    snapshots = read_gpu_output(path.read_bytes()).snapshots
    start = snapshots[0].time_seconds or 0.0 if snapshots else 0.0
    rounds, last = [], -1.0
    for i, snapshot in enumerate(snapshots):
        second = float(i) if snapshot.time_seconds is None else snapshot.time_seconds - start
        last = max(second, last + 0.01)  # several tables within one second of the clock
        gpus = tuple(replace(gpu, index=n if gpu.index is None else gpu.index) for n, gpu in enumerate(snapshot.gpus))
        rounds.append(burst(last, gpus))
    return tuple(rounds)


# Time ---------------------------------------------------------------------------------------------------------------


def between(low: float | None, high: float | None, share: float) -> float | None:
    return high if low is None or high is None else low + share * (high - low)


def mixed(low: GpuSample, high: GpuSample, share: float) -> GpuSample:
    """The GPU between two of its readings."""
    return replace(
        high,
        power_watts=between(low.power_watts, high.power_watts, share),
        utilization_percent=between(low.utilization_percent, high.utilization_percent, share),
        memory_used_bytes=low.memory_used_bytes if share < 0.5 else high.memory_used_bytes,  # allocated at once
    )


def at_full_rate(rounds: Rounds, interval_seconds: float, limit: int, chance: random.Random) -> Rounds:
    """At most `limit` rounds of a random stretch, at `interval_seconds` apart, by interpolation."""
    span = rounds[-1].seconds - rounds[0].seconds
    start = chance.uniform(0, max(0.0, span - limit * interval_seconds))
    pairs = iter(pairwise(rounds))
    low, high = next(pairs)
    made = []
    for i in range(min(limit, int(span / interval_seconds))):
        second = start + i * interval_seconds
        while high.seconds < second:
            low, high = next(pairs)
        share = min(1.0, max(0.0, (second - low.seconds) / (high.seconds - low.seconds)))
        gpus = tuple(mixed(a, b, share) for a, b in zip(low.gpus, high.gpus, strict=True))
        made.append(burst(second, gpus))
    return tuple(made)


def with_pauses(rounds: Rounds, chance: random.Random, *, within_bursts: bool = True) -> Rounds:
    """Pauses of up to 2 s between rounds now and then, and of 115 ms and more between two rows of one round."""
    late, made = 0.0, []
    for each in rounds:
        if chance.random() < 0.02:
            late += chance.uniform(0.05, 2.0)
        stamps = []
        for i, second in enumerate(each.row_seconds):
            if within_bursts and i and chance.random() < 0.01:
                late += chance.choice((0.115, 0.115, 0.4, chance.uniform(0.02, 2.0)))
            stamps.append(second + late)
        made.append(replace(each, row_seconds=tuple(stamps)))
    return tuple(made)


# Text ---------------------------------------------------------------------------------------------------------------

START = datetime(2026, 1, 5, 10, tzinfo=UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Format:
    """How a logger prints."""

    index: bool = True
    header: bool = True
    header_every: int = 0  # a script that starts nvidia-smi anew for each query prints a header each time
    name: bool = False
    limit: bool = False
    millisecond: bool = True
    stamp: bool = True


def csv_text(rounds: Rounds, printed: Format = Format()) -> str:
    header = ", ".join(
        name
        for name, shown in (
            ("timestamp", printed.stamp),
            ("index", printed.index),
            ("name", printed.name),
            ("power.draw [W]", True),
            ("power.limit [W]", printed.limit),
            ("utilization.gpu [%]", True),
            ("memory.used [MiB]", True),
        )
        if shown
    )
    lines = [header] if printed.header else []
    for number, each in enumerate(rounds):
        if printed.header_every and number and number % printed.header_every == 0:
            lines.append(header)
        lines += [csv_row(gpu, second, printed) for gpu, second in zip(each.gpus, each.row_seconds, strict=True)]
    return "\n".join(lines) + "\n"


def csv_row(gpu: GpuSample, second: float, printed: Format) -> str:
    moment = datetime.fromtimestamp(START + second, UTC)
    stamp = moment.strftime("%Y/%m/%d %H:%M:%S") + (f".{moment.microsecond // 1000:03}" if printed.millisecond else "")
    cells = [
        (stamp, printed.stamp),
        (str(gpu.index), printed.index),
        (gpu.name or "NVIDIA H100 80GB HBM3", printed.name),
        ("[N/A]" if gpu.power_watts is None else f"{gpu.power_watts:.2f} W", True),
        (f"{gpu.power_limit_watts or 700:.2f} W", printed.limit),
        ("[N/A]" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f} %", True),
        (f"{(gpu.memory_used_bytes or 0) / MEBIBYTE:.0f} MiB", True),
    ]
    return ", ".join(cell for cell, shown in cells if shown)


def table_text(rounds: Rounds, first_bus: int = 0x1A, *, processes: bool = True, dates: bool = True) -> str:
    """The output of `nvidia-smi` in a loop, as a shell script appends it."""
    return "\n".join(table_lines(rounds, first_bus, processes=processes, dates=dates)) + "\n"


BAR = "+-----------------------------------------+------------------------+----------------------+"
TABLE_HEAD = (
    BAR,
    "| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |",
    BAR,
    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
    "|                                         |                        |               MIG M. |",
    BAR.replace("-", "="),
)
WIDE_BAR = "+" + "-" * 89 + "+"
PROCESSES_HEAD = (
    WIDE_BAR,
    "| Processes:                                                                              |",
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
    "|        ID   ID                                                               Usage      |",
    "|" + "=" * 89 + "|",
)


def table_lines(rounds: Rounds, first_bus: int, *, processes: bool, dates: bool) -> Iterator[str]:
    for each in rounds:
        if dates:
            yield datetime.fromtimestamp(START + each.seconds, UTC).strftime("%a %b %e %H:%M:%S %Y       ")
        yield from TABLE_HEAD
        for gpu in each.gpus:
            yield from gpu_lines(gpu, first_bus)
        yield ""
        if processes:
            yield from PROCESSES_HEAD
            for gpu in each.gpus:
                used, index = mebibytes(gpu), gpu.index or 0
                if used > 300:
                    process = f"{4000 + index}      C   python3"
                    yield f"|   {index:>2}   N/A  N/A            {process:<35}     {used:>7.0f}MiB |"
            yield WIDE_BAR


def gpu_lines(gpu: GpuSample, first_bus: int) -> Iterator[str]:
    draw = "N/A" if gpu.power_watts is None else f"{gpu.power_watts:.0f}W"
    busy = "N/A" if gpu.utilization_percent is None else f"{gpu.utilization_percent:.0f}%"
    name, limit = gpu.name or "NVIDIA H100 80GB HBM3", gpu.power_limit_watts or 700
    bus = f"00000000:{first_bus + (gpu.index or 0):02X}:00.0"
    yield f"| {gpu.index:>3}  {name:<30}  On  |   {bus} Off |                    0 |"
    memory = f"{mebibytes(gpu):>7.0f}MiB /  81559MiB"
    yield f"| N/A   46C    P0            {draw:>5} / {limit:>4.0f}W | {memory} | {busy:>7}      Default |"
    yield "|                                         |                        |             Disabled |"
    yield BAR


def mebibytes(gpu: GpuSample) -> float:
    return (gpu.memory_used_bytes or 0) / MEBIBYTE


# What happens to a text ---------------------------------------------------------------------------------------------


def without_lines(text: str, share: float, chance: random.Random) -> str:
    """Lines lost at random: two writers, a full disk."""
    return "".join(line for line in text.splitlines(keepends=True) if chance.random() >= share)


def cut(text: str, chance: random.Random) -> str:
    """From the middle of a line to the middle of another, as `head -c` and `tail -c` leave a log."""
    return text[chance.randrange(min(2000, len(text) // 4)) : len(text) - chance.randrange(min(2000, len(text) // 4))]
