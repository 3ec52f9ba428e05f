"""Outputs of GPU tools as people paste them, with what stands in them: for the tests of the readers."""

from __future__ import annotations

import html
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from wattwatch.collectors.samples import GpuSample
from wattwatch.collectors.smi import SmiReport

MEBIBYTE: Final = 2.0**20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as it is."""

    index: int
    name: str
    bus: str
    watts: int
    limit: int
    used: int
    total: int
    utilization: int
    temperature: int
    ecc: int = 0
    state: str = "P0"
    mig: bool = False

    def truth(self) -> dict[str, float | str | bool | None]:
        return {
            "index": self.index,
            "name": self.name,
            "pci_bus_id": self.bus,
            "power_watts": float(self.watts),
            "power_limit_watts": float(self.limit),
            "memory_used_bytes": self.used * MEBIBYTE,
            "memory_total_bytes": self.total * MEBIBYTE,
            "utilization_percent": None if self.mig else float(self.utilization),
            "temperature_celsius": float(self.temperature),
            "performance_state": self.state,
        }


def random_gpus(count: int, seed: int = 1) -> list[Gpu]:
    """Different values for each GPU, of which the beginnings are other possible values."""
    chance = random.Random(seed)
    name, limit, total = chance.choice(
        [
            ("NVIDIA B200", 1000, 183359),
            ("NVIDIA H100 80GB HBM3", 700, 81559),
            ("NVIDIA H200", 700, 143771),
            ("NVIDIA B300 SXM6 AC", 1100, 275040),
            ("Tesla T4", 70, 15360),
            ("NVIDIA A100-SXM4-80GB", 400, 81920),
        ]
    )
    return [
        Gpu(
            index=index,
            name=name,
            bus=f"0000000{chance.randrange(2)}:{7 + 15 * index:02X}:00.0",
            watts=chance.randrange(9, limit + 20),
            limit=limit,
            used=chance.randrange(0, total),
            total=total,
            utilization=chance.randrange(0, 101),
            temperature=chance.randrange(20, 95),
            ecc=chance.choice([0, 0, 0, 1, 12]),
            state=chance.choice(["P0", "P1", "P2", "P8", "P12"]),
        )
        for index in range(count)
    ]


# The default table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Style:
    """Widths of the three columns, whether there is a line for the MIG mode, and the widest texts of two cells."""

    widths: tuple[int, int, int] = (41, 24, 22)
    mig_line: bool = True
    power_chars: int = 15
    memory_chars: int = 24


R390: Final = Style((31, 22, 22), mig_line=False, power_chars=11, memory_chars=20)
R535: Final = Style((41, 22, 22), power_chars=11, memory_chars=19)
R550: Final = Style()
STYLES: Final = (R390, R535, R550)


@dataclass(frozen=True, slots=True)
class Printed:
    """A value in a table: the line and the columns from its first to its last necessary character."""

    place: int
    field: str
    line: int
    end: int


def cut(text: str, width: int) -> str:
    """As nvidia-smi cuts a text that is wider than its cell."""
    return text if len(text) <= width else text[: max(0, width - 3)] + "..."


def whole_numbers(text: str, unit: str) -> list[int]:
    """The numbers of a cell that are followed by their unit."""
    return [int(number) for number in re.findall(rf"(\d+)\s?{unit}", text)]


def table(gpus: Sequence[Gpu], style: Style = R550, processes: bool = True) -> tuple[list[str], list[Printed]]:
    """The lines, and where each value stands in them."""
    a, b, c = style.widths
    inner = a + b + c + 2
    lines = [
        "+" + "-" * inner + "+",
        "| NVIDIA-SMI 580.95.05   Driver Version: 580.95.05   CUDA Version: 13.0".ljust(inner + 1) + "|",
        "|" + "-" * a + "+" + "-" * b + "+" + "-" * c + "+",
        "|" + " GPU  Name".ljust(a - 15) + "Persistence-M |" + " Bus-Id        Disp.A ".rjust(b) + "|"
        + " Volatile Uncorr. ECC ".rjust(c) + "|",
        "|" + " Fan  Temp  Perf".ljust(a - 15) + "Pwr:Usage/Cap |" + " Memory-Usage ".rjust(b) + "|"
        + " GPU-Util  Compute M. ".rjust(c) + "|",
        "|" + "=" * a + "+" + "=" * b + "+" + "=" * c + "|",
    ]  # fmt: skip
    printed: list[Printed] = []
    for number, gpu in enumerate(gpus):
        name = cut(gpu.name, a - 12)
        first = f"{gpu.index:>4}  {name}".ljust(a - 5) + "On".rjust(3) + "  "
        second = f"{gpu.bus} Off ".rjust(b)
        third = ("On" if gpu.mig else str(gpu.ecc)).rjust(c - 1) + " "
        line = f"|{first}|{second}|{third}|"
        printed.append(Printed(number, "pci_bus_id", len(lines), line.index(gpu.bus) + len(gpu.bus)))
        lines.append(line)
        power = cut(f"{gpu.watts}W / {gpu.limit}W", style.power_chars)
        memory = cut(f"{gpu.used}MiB / {gpu.total}MiB", style.memory_chars)
        utilization = "N/A" if gpu.mig else f"{gpu.utilization}%"
        first = f" N/A  {gpu.temperature}C  {gpu.state:>4} ".ljust(a - len(power) - 1) + f"{power} "
        line = f"|{first}|{memory.rjust(b - 1)} |{utilization.rjust(8)}      Default |"
        printed.append(Printed(number, "temperature_celsius", len(lines), line.index("C") + 1))
        at = 1 + len(first) - len(power) - 1
        if whole_numbers(power, "W")[:1] == [gpu.watts]:
            printed.append(Printed(number, "power_watts", len(lines), at + power.index("W") + 1))
        if len(whole_numbers(power, "W")) == 2:
            printed.append(Printed(number, "power_limit_watts", len(lines), at + power.rindex("W") + 1))
        at = 1 + a + 1 + b - 1 - len(memory)
        if whole_numbers(memory, "M")[:1] == [gpu.used]:
            printed.append(Printed(number, "memory_used_bytes", len(lines), at + memory.index("M") + 1))
        if len(whole_numbers(memory, "M")) == 2:
            printed.append(Printed(number, "memory_total_bytes", len(lines), at + memory.rindex("M") + 1))
        if not gpu.mig:
            printed.append(Printed(number, "utilization_percent", len(lines), 1 + a + 1 + b + 1 + 8))
        lines.append(line)
        if style.mig_line:
            mode = "Enabled" if gpu.mig else "Disabled"
            lines.append("|" + " " * a + "|" + " " * b + "|" + mode.rjust(c - 1) + " |")
        lines.append("+" + "-" * a + "+" + "-" * b + "+" + "-" * c + "+")
    if any(gpu.mig for gpu in gpus):
        lines += [
            "+" + "-" * inner + "+",
            "| MIG devices:".ljust(inner + 1) + "|",
            "|" + "=" * inner + "|",
            "|  0    2   0   0  |           11091MiB / 40448MiB    | 60      0 |  3   0    3    0    3 |".ljust(
                inner + 1
            )
            + "|",
            "+" + "-" * inner + "+",
        ]
    if processes:
        lines += [
            " " * (inner + 2),
            "+" + "-" * inner + "+",
            "| Processes:".ljust(inner + 1) + "|",
            "|  GPU   GI   CI        PID   Type   Process name                  GPU Memory".ljust(inner + 1) + "|",
            "|" + "=" * inner + "|",
            *(
                f"|    {gpu.index}   N/A  N/A    {4000 + gpu.index}    C   python3    {cut(f'{gpu.used}MiB', 8)}"
                .ljust(inner + 1) + "|"
                for gpu in gpus
            ),
            "+" + "-" * inner + "+",
        ]  # fmt: skip
    return lines, printed


# What happens to a text between a terminal and here ------------------------------------------------------------------


def wrapped(lines: Sequence[str], width: int) -> list[str]:
    """As a terminal of this width shows them and a copy from it contains them."""
    return [line[start : start + width] for line in lines for start in range(0, max(1, len(line)), width)]


def wrapped_at_spaces(lines: Sequence[str], width: int) -> list[str]:
    """As a mail program breaks them, which never breaks a word."""
    result = []
    for line in lines:
        rest = line
        while len(rest) > width and " " in rest[1:width].strip():
            place = rest.rindex(" ", 0, width)
            result.append(rest[:place].rstrip())
            rest = rest[place + 1 :].lstrip()
        result.append(rest)
    return result


def with_bars(text: str, bar: str, dash: str, cross: str) -> str:
    """With borders of box-drawing characters."""
    return re.sub(r"[-=+|]{3,}", lambda border: re.sub("[-=]", dash, border[0]).replace("+", cross), text).replace(
        "|", bar
    )


COPIED_AS: Final[dict[str, Callable[[str], bytes]]] = {
    "as printed": str.encode,
    "crlf": lambda text: text.replace("\n", "\r\n").encode(),
    "utf-16": lambda text: b"\xff\xfe" + text.encode("utf-16-le"),
    "colors": lambda text: "".join(f"\x1b[32m{line}\x1b[0m\x1b[K\n" for line in text.splitlines()).encode(),
    "cleared screen": lambda text: f"\x1b[2J\x1b[1;1H{text}".encode(),
    "cursor": lambda text: "".join(f"\x1b[{n};1H{line}" for n, line in enumerate(text.splitlines())).encode() + b"\n",
    "carets": lambda text: "".join(f"^[[1m{line}^[[0m\n" for line in text.splitlines()).encode(),
    "quoted": lambda text: "".join(f"> {line}\n" for line in text.splitlines()).encode(),
    "quoted thrice": lambda text: "".join(f">>> {line}\n" for line in text.splitlines()).encode(),
    "indented": lambda text: "".join(f"    {line}\n" for line in text.splitlines()).encode(),
    "fence": lambda text: f"It hangs:\n\n```console\n$ nvidia-smi\n{text}```\nWhat now?\n".encode(),
    "entities": lambda text: text.replace(" ", "&nbsp;").encode(),
    "numeric entities": lambda text: text.replace("|", "&#124;").replace(" ", "&#160;").encode(),
    "page": lambda text: f"<pre><code>{html.escape(text)}</code></pre>".encode(),
    "breaks": lambda text: text.replace("\n", "<br>").encode() + b"\n",
    "breaks and lines": lambda text: text.replace("\n", "<br />\n").encode(),
    "no-break spaces": lambda text: text.replace("  ", " \u00a0").encode(),
    "bars": lambda text: with_bars(text, "│", "─", "┼").encode(),
    "double bars": lambda text: with_bars(text, "║", "═", "╬").encode(),
    "blank lines": lambda text: text.replace("\n", "\n\n").encode(),
    "ellipsis": lambda text: text.replace("...", "…").encode(),
    "quoted-printable": lambda text: text.replace("=", "=3D").replace(" / ", " =\n/ ").encode(),
}


def differences(report: SmiReport, gpus: Sequence[Gpu], without: frozenset[str] = frozenset()) -> list[str]:
    """What is not as it is on the GPUs of the last snapshot; fields in `without` may be unknown."""
    if not report.snapshots:
        return [f"nothing was read: {report.detail}"]
    read = report.snapshots[-1].gpus
    if len(read) != len(gpus):
        return [f"{len(read)} GPUs instead of {len(gpus)}"]
    return [
        f"GPU {gpu.index}: {field} is {getattr(sample, field)!r}, not {value!r}"
        for gpu, sample in zip(gpus, read, strict=True)
        for field, value in gpu.truth().items()
        if not agrees(sample, field, value) and not (field in without and getattr(sample, field) is None)
    ]


def agrees(sample: GpuSample, field: str, value: float | str | bool | None) -> bool:
    read = getattr(sample, field)
    if field == "name" and isinstance(read, str) and isinstance(value, str):
        return read == value or (read.endswith("...") and value.startswith(read.removesuffix("...")))
    return bool(read == value)
