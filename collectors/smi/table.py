"""The default table of nvidia-smi, as printed or as a person pasted it: cells cut by their width, lines wrapped or
clipped by a terminal, borders of any kind or none.

A GPU is two lines: identity (index, name, PCI id, ECC) and readings (fan, temperature, state, power, memory,
utilization); drivers since R450 add a third line with the MIG mode. Lines are recognized by their content, not by
widths: GPUs of 1000 W and more, 4-digit PCI domains and pasted tables shift every column.

A value counts only if it is printed whole: a number needs its unit, because `70` may be the beginning of `700W`. What
is cut off is `ReadingStatus.UNPARSED`; it says nothing about the GPU.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from wattwatch.collectors.samples import PowerSource
from wattwatch.collectors.smi.columns import CUT_OFF, TOKENS, find_timestamp, parse_timestamps, status_of_text
from wattwatch.collectors.smi.gpu_cells import gpu_from_cells, sum_of_process_memory
from wattwatch.collectors.smi.messages import MessageLog
from wattwatch.collectors.smi.report import GpuRow, ParsedRows
from wattwatch.collectors.smi.snapshots import group_into_snapshots

Cells = dict[str, tuple[str, str]]

_MAX_TABLE_WIDTH: Final = 300  # a table is about 90 wide; a longer line is not one, and searching it would be slow
_BUS: Final = re.compile(r"(?<![0-9A-Za-z])[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f](?![0-9A-Za-z])")
_NUMBERED: Final = re.compile(r"(?:^|[|\s])(\d{1,4})\.?\s+([A-Za-z?].*)")
_NUMBERED_START: Final = re.compile(r"^[^|]*\|\s*(\d{1,4})\s+([A-Za-z?][^|]*)(\|.*)?$")
_CELL_MARK: Final = re.compile(r"[,;]|\t[^|\t]*\t")  # in a CSV row of "RTX 2080 Ti" or "RTX 6000 Ada"
_MODES: Final = frozenset(
    {"On", "Off", "N/A", "ERR!", "WDDM", "TCC", "MCDM", "Enabled", "Disabled"}
)  # persistence, driver
_WORDS: Final = r"N/A|ERR!|Unknown(?: Error)?"
_SENSORS: Final = re.compile(
    rf"(?:^|[|\s])(?P<fan>\d{{1,3}}\s?%|{_WORDS})\s+(?P<temperature>\d{{1,3}}\s?C|{_WORDS})\s+"
    rf"(?P<state>P\d{{1,2}}|{_WORDS})(?=[\s|]|$)(?P<rest>.*)$"
)
# The same line where a terminal clipped it: fewer cells, the last one perhaps incomplete.
_CLIPPED_SENSORS: Final = re.compile(
    rf"^[^|]*\|\s*(?:\d{{1,3}}\s?%|{_WORDS})\s+(?P<temperature>\d{{1,3}}\s?C|{_WORDS})(?:\s+\S*)?\s*$"
)
_PAIR: Final = re.compile(r"\s*(?P<first>N/A|ERR!|[^/]*?)\s*(?:(?P<slash>/)\s*(?P<second>.*?)\s*)?$")
_WITHOUT_BARS: Final = re.compile(
    rf"\s*(?P<power>(?:\S+?\s?W|{_WORDS}|\S*\.\.\.)\s*/\s*(?:\S+?\s?W|{_WORDS}|\S*\.\.\.))"
    rf"(?:\s+(?:\d+%\s+)?(?P<memory>(?:\S+?B|{_WORDS}|\S*\.\.\.)\s*/\s*(?:\S+?B|{_WORDS}|\S*\.\.\.)"
    r"|[A-Z][A-Za-z]+(?: [A-Za-z]+)+))?(?:\s+(?P<utilization>.*))?$"
)
# A number and its unit. The first letter of a unit proves that the number before it is complete.
_WATTS: Final = re.compile(r"(\d+(?:\.\d+)?)\s?()W")
_BYTES: Final = re.compile(r"(\d+(?:\.\d+)?)\s?([KMGT])(?:iB?|B)?")
_PERCENT: Final = re.compile(r"(\d{1,3})\s?%")
_MIG_LINE: Final = re.compile(r"^[^|]*\|\s*\|\s*\|\s*(?P<mig>Enabled\*?|Disabled\*?|N/A|ERR!)\s*\|?\s*$")
_PROCESS_LINE: Final = re.compile(
    r"^[^|]*\|\s*(?P<index>\d{1,4})\s+(?:(?:N/A|\d+)\s+(?:N/A|\d+)\s+)?\d+\s+[A-Z+]+\s.*?(?P<memory>\S+)\s*\|\s*$"
)
_NEW_TABLE: Final = re.compile(r"NVIDIA-SMI\s+\d")


def looks_like_table(lines: Sequence[str]) -> bool:
    return any(_sensors(line[:_MAX_TABLE_WIDTH]) or _identity_cells(line[:_MAX_TABLE_WIDTH]) for line in lines)


def parse_table(lines: Sequence[str], messages: MessageLog) -> ParsedRows:
    """All GPUs of all tables. A second line without its first (a pasted fragment) is a GPU without an index."""
    whole = rejoin_wrapped_lines([line[:_MAX_TABLE_WIDTH] for line in lines])
    gpus: list[tuple[Cells, int, str]] = []
    held: dict[tuple[int, str], list[str]] = {}  # (block, GPU) -> memory of its processes
    block, timestamp, last, in_slices, open_gpu = 0, "", -1, False, False
    for number, line in enumerate(whole):
        if _NEW_TABLE.search(line):
            block, in_slices, open_gpu = block + 1, False, False
        elif (date := find_timestamp(line)) and not messages.recognize(line, number):
            timestamp, block, in_slices, open_gpu = date, block + 1, False, False
        elif "MIG devices:" in line or "Processes:" in line:
            in_slices, open_gpu = True, False  # the rows below look like GPUs but are MIG instances or processes
        elif identity := _identity_cells(line) or ({} if in_slices else _clipped_identity_cells(whole, number)):
            in_slices, open_gpu, last = False, True, number
            gpus.append((identity, block, timestamp))
        elif in_slices:
            if row := _PROCESS_LINE.match(line):
                held.setdefault((block, row["index"]), []).append(row["memory"])
        elif readings := _reading_cells(line, clipped=open_gpu and "temperature" not in gpus[-1][0]):
            if not open_gpu or "temperature" in gpus[-1][0]:
                gpus.append(({}, block, timestamp))
            gpus[-1][0].update(readings)
            open_gpu, last = True, number
        elif open_gpu and (mig := _MIG_LINE.match(line)):
            gpus[-1][0]["mig"] = (mig["mig"].rstrip("*"), "")
            open_gpu = False
        elif not _is_border(line) and not messages.recognize(line, number):
            messages.warn(f"line not understood: {line.strip()!r}")
    for cells, of, _ in gpus:
        if "index" in cells and (memory := sum_of_process_memory(held.get((of, cells["index"][0]), ()))):
            cells["process_memory"] = memory
    seconds = parse_timestamps([timestamp for _, _, timestamp in gpus])
    rows = [
        GpuRow(gpu_from_cells(cells, PowerSource.TABLE), second, block)
        for (cells, block, _), second in zip(gpus, seconds, strict=True)
    ]
    return ParsedRows(group_into_snapshots(rows), (), 0, "", last)


def _is_border(line: str) -> bool:
    text = line.strip()
    return not text or text[0] in "|+-=" or text.startswith(("Fan ", "GPU "))


# The first line of a GPU --------------------------------------------------------------------------------------------


def _identity_cells(line: str) -> Cells:
    """Index, name, PCI id and ECC; {} for any other line."""
    bus = _BUS.search(line)
    before = line[: bus.start()].rstrip(" |\t") if bus else ""
    numbered = _NUMBERED.search(before)
    if bus is None or numbered is None or _CELL_MARK.search(before):
        return {}
    words = numbered[2].replace("|", " ").split()
    if len(words) > 1 and words[-1] in _MODES:
        words.pop()
    cells = {"index": (numbered[1], ""), "name": (" ".join(words), ""), "pci_bus_id": (bus[0], "")}
    behind = line[bus.end() :]
    display, bar, ecc = behind.partition("|")
    if not bar and len(words := display.split()) == 2:  # a paste that lost its bars
        ecc = words[1] + "|"
    # An open cell may lack digits.
    if "|" in ecc and (text := ecc.partition("|")[0].strip()):
        cells["ecc uncorrected.volatile.total"] = (text, "")
    return cells


def _clipped_identity_cells(lines: Sequence[str], number: int) -> Cells:
    """The same of a line that was clipped before the end of its PCI id: recognized by the readings below it."""
    match = _NUMBERED_START.match(lines[number])
    below = next((line for line in lines[number + 1 :] if line.strip()), "")
    if match is None or not _reading_cells(below, clipped=True):
        return {}
    words = match[2].split()
    has_mode = len(words) > 1 and words[-1] in _MODES
    cells = {"index": (match[1], "")}
    # "NVIDIA A10" may be the beginning of "NVIDIA A100": the name is whole if something follows it.
    if has_mode or match[3]:
        cells["name"] = (" ".join(words[:-1] if has_mode else words), "")
    return cells


# The second line ----------------------------------------------------------------------------------------------------


def _reading_cells(line: str, clipped: bool = False) -> Cells:
    """Temperature, state, power, memory and utilization; {} for any other line.

    `clipped`: the line is expected to be one of readings, so that its first cells are enough.
    """
    sensors = _sensors(line)
    if sensors is None:
        short = _CLIPPED_SENSORS.match(line) if clipped else None
        return {"temperature": (short["temperature"], "C")} if short else {}
    cells: Cells = {"temperature": (sensors["temperature"], "C")}
    rest = sensors["rest"]
    if rest.strip() or sensors["state"] != "P1":  # the end of a clipped line: P1 may be the beginning of P12
        cells["performance_state"] = (sensors["state"], "")
    if "|" in rest:
        power, *others = rest.split("|")
        memory, utilization = (*others, "", "")[:2]
        closed = [len(others) > place for place in range(3)]
    else:
        match = _WITHOUT_BARS.match(rest)
        power, memory, utilization = (
            (match["power"], match["memory"] or "", match["utilization"] or "") if match else (rest, "", "")
        )
        closed = [bool(memory), bool(utilization), False]
    _add_pair(cells, ("power_draw", "power_limit"), "W", power, _WATTS, closed[0])
    _add_pair(cells, ("memory_used", "memory_total"), "MiB", re.sub(r"^\s*\d+%\s+", "", memory), _BYTES, closed[1])
    if utilization.strip():
        cells["utilization"] = (_leading_value(utilization, closed[2]), "%")
    return cells


def _sensors(line: str) -> re.Match[str] | None:
    """Fan, temperature and state at the beginning of the line. Three absent values alone may be any table's."""
    match = _SENSORS.search(line)
    if match and {match["fan"], match["temperature"], match["state"]} == {"N/A"} and "/" not in match["rest"]:
        return None
    return match


def _add_pair(
    cells: Cells, names: tuple[str, str], unit: str, text: str, number: re.Pattern[str], closed: bool
) -> None:
    """Both values of `726W / 1000W`, of which the second may be cut off, or all after the first digits."""
    match = _PAIR.match(text)
    if match is None or not text.strip():
        return
    first, second = match["first"], match["second"]
    if match["slash"] is None and first[:1].isalpha() and first.upper() not in {"N/A", "ERR!"}:
        second = first  # one sentence in place of both: "Not Supported", "GPU is lost"
    cells[names[0]] = (_value(first, number, closed or match["slash"] is not None), unit)
    if second is not None:
        cells[names[1]] = (_value(second, number, closed), unit)


def _value(text: str, number: re.Pattern[str], closed: bool) -> str:
    """The text of a value that is whole, or why there is none; `CUT_OFF` where that cannot be known."""
    cut = text.endswith("...")
    stem = text.removesuffix("...").rstrip()
    if match := number.fullmatch(stem):
        return f"{match[1]} {match[2]}iB" if match[2] else match[0]
    if status_of_text(stem) is not None and stem:
        return stem
    if cut or not closed:
        return _token_that_begins(stem) or CUT_OFF
    return f"[{stem}]" if stem[:1].isalpha() else CUT_OFF


def _token_that_begins(stem: str) -> str | None:
    """The known text that begins like this, if all of those mean the same."""
    known = [token for token in TOKENS if len(stem) > 2 and token.startswith(stem.casefold())]
    return known[0] if known and len({TOKENS[token] for token in known}) == 1 else None


def _leading_value(text: str, closed: bool) -> str:
    """The utilization, which the compute mode follows."""
    if match := _PERCENT.match(text.strip()):
        return match[0]
    words = text.split()
    for count in range(min(4, len(words)), 0, -1):
        if status_of_text(" ".join(words[:count])) is not None:
            return " ".join(words[:count])
    return (None if closed else _token_that_begins(text.strip())) or CUT_OFF


# Lines that a terminal or a mail program has broken -----------------------------------------------------------------

_BORDER: Final = re.compile(r"^\s*[+|][-=+|]{7,}$")
_REST_OF_BORDER: Final = re.compile(r"^[-=+|]+$")


def rejoin_wrapped_lines(lines: Sequence[str]) -> list[str]:
    """Rows as they were before a terminal wrapped them at its width, or a mail program at a space.

    The borders give the width: they have no space at which they could be broken otherwise.
    """
    border = next((line for line in lines if _BORDER.match(line.rstrip())), "")
    indent = border[: len(border) - len(border.lstrip())]
    lines = [line.removeprefix(indent) for line in lines]
    widths: Counter[tuple[int, int]] = Counter()
    for number, line in enumerate(lines):
        if _BORDER.match(line.rstrip()):
            parts = [len(line.rstrip()), *_border_continuations(lines, number)]
            if len(parts) > 1:
                widths[parts[0], sum(parts)] += 1
    if widths:
        width = max(widths, key=lambda each: widths[each])[0]
        # Where a border is broken before an inner corner, its second half looks like a shorter one.
        return list(_joined_at(lines, width, max(total for each, total in widths if each == width)))
    return list(_joined_at_spaces(lines))


def _border_continuations(lines: Sequence[str], number: int) -> Iterator[int]:
    width = len(lines[number].rstrip())
    for line in lines[number + 1 :]:
        text = line.rstrip()
        if not _REST_OF_BORDER.match(text) or (text[0] in "+|" and len(text) >= width):
            return
        yield len(text)


def _joined_at(lines: Sequence[str], width: int, total: int) -> Iterator[str]:
    parts = math.ceil(total / width)
    number = 0
    while number < len(lines):
        row, taken = lines[number], 1
        if row.lstrip()[:1] in ("|", "+") and len(row.rstrip()) <= width:
            while taken < parts and number + taken < len(lines):
                more = lines[number + taken].rstrip()
                if len(more) > min(width, total - taken * width) or (not more and taken == parts - 1):
                    break
                row = row.rstrip().ljust(taken * width) + more
                taken += 1
        yield row.rstrip()
        number += taken


def _joined_at_spaces(lines: Sequence[str]) -> Iterator[str]:
    broken = {number for number in range(len(lines) - 1) if _continues(lines[number], lines[number + 1])}
    # Of several rows broken at one width, some would be broken within a word.
    hard = len(broken) > 1 and len({len(lines[number]) for number in broken}) == 1
    number = 0
    while number < len(lines):
        if number not in broken:
            yield lines[number]
            number += 1
            continue
        first, second = lines[number].rstrip(), lines[number + 1]
        ways = (first + second, f"{first} {second}") if hard else (f"{first} {second}", first + second)
        yield max(ways, key=_count_of_values)
        number += 2


def _continues(line: str, below: str) -> bool:
    """Whether a row of a table goes on in the line below."""
    first, second = line.strip(), below.strip()
    if not first.startswith("|") or not second.endswith("|") or len(second) < 2:
        return False
    if _BORDER.match(second) or _identity_cells(second) or _sensors(second):
        return False
    if second[0] not in "|+":
        return True
    return not first.endswith("|") and first.count("|") + second.count("|") == 4


def _count_of_values(line: str) -> int:
    return sum(not text.startswith(CUT_OFF) for text, _ in _reading_cells(line).values())
