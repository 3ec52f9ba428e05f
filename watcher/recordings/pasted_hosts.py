"""The output of several hosts in one text: who printed what.

Hosts of one type look alike: same GPU model, same PCI ids, same indexes. So two tables in one text may be two hosts, or
one host twice. What tells them apart is tried in order: a host name before each line (pdsh, clush, srun), a line that
names the host (dshbak, Ansible, a shell prompt, a heading), and what the GPUs themselves say (UUID, PCI id, model,
driver). Where nothing tells, `count_undated_outputs` says how many outputs there are, so that nobody takes two hosts
for one without being told.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from wattwatch.collectors.smi import GpuSnapshot, SmiReport, read_gpu_output
from wattwatch.collectors.smi.columns import is_timestamp, read_header
from wattwatch.collectors.smi.csv_format import split_cells
from wattwatch.collectors.smi.lines import decode_lines

MAX_PASTE_BYTES: Final = 4 << 20  # more than that is a log, which nobody pastes
MAX_LINE_LENGTH: Final = 300  # of a table, a heading or a header; longer lines are none of them

# `host: ` as pdsh and clush print it before each line, `3: ` as `srun --label` does.
HOST_PREFIX_PATTERN: Final = re.compile(rb"([A-Za-z][\w.\-]*|\d{1,5}): (?=\S)")
MIN_PREFIXED_FRACTION: Final = 0.9
# In a long log a GPU may change its index, after a reload of the driver. In a paste of a few samples it does not.
MAX_PASTED_SAMPLES: Final = 16
MIN_LOG_SAMPLES: Final = 3  # of each host: a paste has one or two
UNNAMED_HOST: Final = "host 1"  # whose output comes first, above the first name


_QUOTE: Final = re.compile(r"^(?:\s{0,3}> ?)+")  # of mail and Markdown


@dataclass(frozen=True, slots=True)
class HostOutputs:
    """What each host printed. `ordered`: the hosts come in the order of the text, not as they happened to answer."""

    outputs: Mapping[str, bytes]
    ordered: bool


def split_by_host(data: bytes) -> HostOutputs | None:
    """The output of each host, at least two; None where the text is of one host, or nothing tells the hosts apart."""
    if prefixed := split_by_host_prefix(data):
        return HostOutputs(prefixed, ordered=False)
    if len(data) > MAX_PASTE_BYTES:
        return None
    lines = _text_lines(data)
    starts = list(_output_starts(lines))
    for split in (_split_by_marker, _split_by_heading, _split_by_identity):
        outputs = split(lines, starts)
        if len(outputs) > 1:
            return HostOutputs({host: f"{chr(10).join(text)}\n".encode() for host, text in outputs.items()}, True)
    return None


def _text_lines(data: bytes) -> list[str]:
    return [_QUOTE.sub("", line) for line in decode_lines(data)[0]]


def split_by_host_prefix(data: bytes) -> Mapping[str, bytes]:
    """The lines of each host, without the prefix. Empty if the lines have no prefix, or if it is always the same."""
    head = [line for line in data[:65536].split(b"\n") if line.strip()]
    prefixed = sum(HOST_PREFIX_PATTERN.match(line) is not None for line in head)
    if not head or prefixed < MIN_PREFIXED_FRACTION * len(head):
        return {}
    lines: dict[str, list[bytes]] = {}
    for line in data.split(b"\n"):
        if (found := HOST_PREFIX_PATTERN.match(line)) is not None:
            host = found[1].decode("ascii", "replace")
            lines.setdefault(f"task {host}" if host.isdigit() else host, []).append(line[found.end() :])
    hosts = {host: b"\n".join(mine) + b"\n" for host, mine in lines.items()}
    return hosts if 1 < len(hosts) <= len(head) / 2 else {}


# Lines that name a host by the rules of a tool ----------------------------------------------------------------------

_RULE: Final = re.compile(r"\s*-{3,}\s*$")
_HOST: Final = r"[A-Za-z0-9](?:[\w.-]{0,61}\w)?"
_TOOL: Final = r"nvidia-smi|rocm-smi|amd-smi|xpu-smi"
_BETWEEN_RULES: Final = re.compile(r"\s*([\w.\-\[\],]{1,250})(?: \(\d+\))?\s*$")  # dshbak, clush -b: a host list
_GPUSTAT: Final = re.compile(rf"\s*({_HOST})\s+(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \w{{3}} [ \d]\d [\d:]{{8}} \d{{4}}\b")
_MARKERS: Final = (
    _GPUSTAT,
    re.compile(rf"({_HOST}) \| (?:CHANGED|SUCCESS|FAILED|UNREACHABLE)\b"),  # Ansible
    re.compile(rf"\[\d+\] [\d:]{{8}} \[(?:SUCCESS|FAILURE)\] (?:\w+@)?({_HOST})"),  # parallel-ssh
    re.compile(rf"==> (?:\S*/)?({_HOST}) <==$"),  # head, tail
    re.compile(rf".{{0,80}}?\bssh\s+(?:-\S+\s+)*(?:[\w.-]+@)?({_HOST})\s.*(?:{_TOOL})"),
    re.compile(rf"(?:\([\w.-]+\)\s*)?\[?[\w.-]+@({_HOST})\b[^$#>]{{0,100}}[$#>]\s.*(?:{_TOOL})"),  # a shell prompt
)
# Each marker contains one of these, and a row of readings none: plain searches are faster on a long log.
_MARKER_WORDS: Final = (
    "---",
    "@",
    "ssh",
    "==>",
    " | ",
    "[SUCCESS]",
    "[FAILURE]",
    *(f"{day} " for day in ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
)


def _split_by_marker(lines: Sequence[str], starts: Sequence[int]) -> dict[str, list[str]]:
    """By lines that some tool prints before the output of a host. Text before the first one is of an unnamed host."""
    if not any(word in line for line in lines for word in _MARKER_WORDS):
        return {}  # a log of a day, say
    outputs: dict[str, list[str]] = {}
    host = UNNAMED_HOST
    skip = False
    for number, line in enumerate(lines):
        if skip:
            skip = False
            continue
        if (named := _marked_host(lines, number)) is not None:
            host = named
            if _GPUSTAT.match(line[:MAX_LINE_LENGTH]):  # its reader needs the date
                outputs.setdefault(host, []).append(line)
        elif not (_RULE.match(line) and _marked_host(lines, number + 1) is not None):
            outputs.setdefault(host, []).append(line)
            continue
        skip = _RULE.match(line) is None and _BETWEEN_RULES.match(line) is not None and _is_rule(lines, number + 1)
    if len(outputs.keys() - {UNNAMED_HOST}) < 2:
        return {}  # with one name, text above it is most likely of the same host
    if not starts or starts[0] >= len(outputs.get(UNNAMED_HOST, ())):  # no output above the first name
        outputs.pop(UNNAMED_HOST, None)
    return outputs


def _marked_host(lines: Sequence[str], number: int) -> str | None:
    if number >= len(lines) or len(lines[number]) > MAX_LINE_LENGTH:
        return None
    line = lines[number].strip()
    if _is_rule(lines, number - 1) and _is_rule(lines, number + 1) and (found := _BETWEEN_RULES.match(line)):
        return found[1]
    return next((found[1] for marker in _MARKERS if (found := marker.match(line))), None)


def _is_rule(lines: Sequence[str], number: int) -> bool:
    return 0 <= number < len(lines) and _RULE.match(lines[number]) is not None


# Headings that a person or a loop wrote ------------------------------------------------------------------------------

_ORDINAL: Final = (
    r"first|second|third|fourth|fifth|sixth|seventh|eighth|last|other|master|head|main|\d{1,4}(?:st|nd|rd|th)"
)
_HOST_WORD: Final = r"node|host|machine|server|worker|box|instance|pod"
_NAMED_BY_WORD: Final = re.compile(
    rf"\b(?:(?P<ordinal>{_ORDINAL})\s+)?(?P<word>{_HOST_WORD})\b(?:\s*[#:=_-]?\s*(?P<id>[\w.-]*\d[\w.-]*|(?-i:[A-Z])\b))?",
    re.IGNORECASE,
)
_SAME_HOST: Final = re.compile(rf"\bsame\s+(?:{_HOST_WORD})\b", re.IGNORECASE)
_ORNAMENT: Final = " \t#=*-_:>[]()`~+.,|\"'"
# Alone in a line, with a digit: "gpu-02", "n2.cluster", "10.0.0.5". Words that count something else than hosts.
_BARE_NAME: Final = re.compile(
    r"(?!(?:step|sample|run|round|iter\w*|epoch|test|trial|try|take|time|t|at|after|before|rank|case|fig\w*|part)"
    r"[\W_]*\d+$)(?=.*[A-Za-z])(?=.*\d)[A-Za-z][\w.-]{1,62}$|\d{1,3}(?:\.\d{1,3}){3}$",
    re.IGNORECASE,
)


def _split_by_heading(lines: Sequence[str], starts: Sequence[int]) -> dict[str, list[str]]:
    """By the line above each output, if each names a host; the first output may have none."""
    names = [_heading_host(lines, start) for start in starts]
    if len(starts) < 2 or None in names[1:]:
        return {}
    outputs: dict[str, list[str]] = {}
    for name, (start, end) in zip(names, pairwise([*starts, len(lines)]), strict=True):
        outputs.setdefault(name or UNNAMED_HOST, []).extend(lines[start:end])
    return outputs


def _heading_host(lines: Sequence[str], start: int) -> str | None:
    """The host that the last line of text above an output names, without the fence of a Markdown block."""
    for number in range(start - 1, max(-1, start - 6), -1):
        text = lines[number].strip()
        if not text or text.strip("`~") == "" or text.startswith(("```", "~~~")):
            continue
        if len(text) > MAX_LINE_LENGTH or text[0] in "|+" or text.count(",") > 2 or _SAME_HOST.search(text):
            return None
        bare = text.strip(_ORNAMENT)
        if _BARE_NAME.match(bare):
            return bare
        found = _NAMED_BY_WORD.search(text)
        if found is None or not (found["ordinal"] or found["id"]):
            return None
        parts = (found["ordinal"], found["word"], (found["id"] or "").strip(_ORNAMENT))
        return " ".join(part.lower() if part != found["id"] else part for part in parts if part)
    return None


# What the GPUs say ---------------------------------------------------------------------------------------------------

_DRIVER: Final = re.compile(r"Driver Version:\s*([\d.]+)|<driver_version>([\d.]+)<")


@dataclass(frozen=True, slots=True)
class _Identity:
    """What does not change from one sample of a host to the next."""

    driver: str | None
    gpus: Mapping[int, tuple[str | None, str | None, str | None]]  # index -> UUID, PCI id, model

    def contradicts(self, other: _Identity) -> bool:
        if self.driver is not None and other.driver is not None and self.driver != other.driver:
            return True
        shared = self.gpus.keys() & other.gpus.keys()
        return any(_differ(a, b) for i in shared for a, b in zip(self.gpus[i], other.gpus[i], strict=True))


def _split_by_identity(lines: Sequence[str], starts: Sequence[int]) -> dict[str, list[str]]:
    """Outputs whose GPUs cannot be the same ones, as "host 1", "host 2" in their order."""
    outputs = _outputs_at(lines, starts)
    if not 1 < len(outputs) <= MAX_PASTED_SAMPLES:
        return {}
    hosts: list[tuple[_Identity, list[str]]] = []
    for text in outputs:
        identity = _identity(text)
        own = next((mine for known, mine in hosts if not known.contradicts(identity)), None)
        if own is None:
            hosts.append((identity, list(text)))
        else:
            own.extend(text)
    if len(outputs) >= MIN_LOG_SAMPLES * len(hosts) and not _are_undated(
        _last_snapshots(["\n".join(text).encode() for text in outputs])
    ):
        return {}  # not hosts side by side, but logs of jobs on other GPUs, one after the other
    return {f"host {number}": text for number, (_, text) in enumerate(hosts, 1)}


def _identity(text: Sequence[str]) -> _Identity:
    joined = "\n".join(text)
    driver = _DRIVER.search(joined)
    report = read_gpu_output(joined.encode())
    gpus = report.snapshots[-1].gpus if report.snapshots else ()
    return _Identity(
        None if driver is None else driver[1] or driver[2],
        {g.index: (g.uuid, g.pci_bus_id, g.name) for g in gpus if g.index is not None and not g.mig},
    )


def count_undated_outputs(data: bytes) -> int:
    """The number of outputs in a text of which nothing says whether one host printed them: no UUIDs, and no times that
    increase from one to the next. 0 for a single output."""
    if len(data) > MAX_PASTE_BYTES:
        return 0
    outputs = separate_outputs(data)
    if not 1 < len(outputs) <= MAX_PASTED_SAMPLES:
        return 0
    snapshots = _last_snapshots(outputs)
    if len(snapshots) < 2 or all(gpu.uuid for snapshot in snapshots for gpu in snapshot.gpus):
        return 0
    return len(snapshots) if _are_undated(snapshots) else 0


def _last_snapshots(outputs: Sequence[bytes]) -> list[GpuSnapshot]:
    reports = [read_gpu_output(text) for text in outputs]
    return [each.snapshots[-1] for each in reports if each.snapshots]


def _are_undated(snapshots: Sequence[GpuSnapshot]) -> bool:
    """Whether no times increase from each to the next."""
    times = [snapshot.time_seconds for snapshot in snapshots]
    return not all(a is not None and b is not None and b > a for a, b in pairwise(times))


def separate_outputs(data: bytes) -> list[bytes]:
    """The outputs in a text, one for each time the tool was run; a loop of CSV rows under one header is one output."""
    lines = _text_lines(data)
    return [f"{chr(10).join(text)}\n".encode() for text in _outputs_at(lines, list(_output_starts(lines)))]


def _outputs_at(lines: Sequence[str], starts: Sequence[int]) -> list[Sequence[str]]:
    return [lines[start:end] for start, end in pairwise([*starts, len(lines)])]


# Where an output begins ----------------------------------------------------------------------------------------------

_BANNER: Final = re.compile(
    r"NVIDIA-SMI\s+\d|=+\s*NVSMI LOG\s*=+|<nvidia_smi_log\b|ROCm System Management Interface", re.I
)
_ABOVE_BANNER: Final = re.compile(r"\s*(?:[+|=\-\s]*|<\?xml.*|<!DOCTYPE.*)$")


def _starts_output(line: str) -> bool:
    short = line[:MAX_LINE_LENGTH]
    if short[:1].isdigit():  # a row, or a date: most lines of a log
        return False
    if _BANNER.search(short):
        return True
    if "," not in short or not any(word in short.lower() for word in ("power", "utilization", "memory.used", "index")):
        return False
    return read_header(split_cells(short)) is not None


def _output_starts(lines: Sequence[str]) -> Iterator[int]:
    """The first line of each output, with the border and the date above a banner."""
    end = 0
    for number, line in enumerate(lines):
        if not _starts_output(line):
            continue
        start = number
        while start > end and (_ABOVE_BANNER.match(lines[start - 1]) or is_timestamp(lines[start - 1])):
            start -= 1
        # A blank line or a Markdown rule above belongs to the text, not to the output.
        while start < number and not lines[start].strip(" -"):
            start += 1
        yield start
        end = number + 1


# Rows of which the header is not repeated ----------------------------------------------------------------------------


def find_mixed_hosts(report: SmiReport) -> str | None:
    """An error message if one GPU index has two different GPUs, in rows that cannot be separated: the paste is then not
    from one host. Logs one after the other, by their time stamps, are not mixed."""
    times = [snapshot.time_seconds for snapshot in report.snapshots]
    if len(times) > 1 and all(a is not None and b is not None and b > a for a, b in pairwise(times)):
        return None
    places: dict[int, tuple[str | None, str | None, str | None]] = {}
    for snapshot in report.snapshots if len(report.snapshots) <= MAX_PASTED_SAMPLES else ():
        for gpu in snapshot.gpus:
            if gpu.index is None or gpu.mig:
                continue
            identity = (gpu.name, gpu.pci_bus_id, gpu.uuid)
            known = places.setdefault(gpu.index, identity)
            if any(_differ(a, b) for a, b in zip(known, identity, strict=True)):
                one, other = _place_text(*known), _place_text(*identity)
                if one == other:
                    one, other = (f"{text} with UUID {uuid}" for text, uuid in ((one, known[2]), (other, gpu.uuid)))
                return (
                    f"this is the output of several hosts: GPU {gpu.index} is {one}, but also {other}. Give the output "
                    "of each host separately, or give the host names: `wattwatch triage HOST ...`"
                )
    return None


def _place_text(name: str | None, bus: str | None, _: str | None) -> str:
    return f"{name or 'a GPU'} at {bus or 'an unknown PCI id'}"


def _differ(a: str | None, b: str | None) -> bool:
    """Whether two values contradict each other. At the cut of a log, a cell may hold only the beginning of a name."""
    return a is not None and b is not None and not a.startswith(b) and not b.startswith(a)
