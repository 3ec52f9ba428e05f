"""The cells of one GPU -> `GpuSample`. Every format ends here, so that all of them give the same for the same GPU."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from wattwatch.collectors.nvml import discard_live_readings, throttle_names
from wattwatch.collectors.samples import GPU_READINGS, NO_REASONS, GpuSample, PowerSource, ReadingStatus
from wattwatch.collectors.smi.columns import read_number, status_of_text

GpuCells = Mapping[str, tuple[str, str]]
"""Maps each field of columns.toml to (text of the cell, unit to use if the text has none)."""

_POWER: Final = (
    ("power_draw", PowerSource.DRAW),
    ("power_average", PowerSource.AVERAGE),
    ("power_instant", PowerSource.INSTANT),
)
_TWO_COLUMNS: Final = frozenset({"power_limit_watts", "sm_clock_mhz"})  # numbers that one of two columns may give
_NUMBERS: Final = tuple(
    (name, reading.column, reading.lowest, 1e18 if reading.highest is None else reading.highest)
    for name, reading in GPU_READINGS.items()
    if reading.kind == "number" and reading.column and name not in _TWO_COLUMNS
)
_TEXTS: Final = tuple((name, reading.column) for name, reading in GPU_READINGS.items() if reading.kind == "text")
_SEVERITY_ORDER: Final = (
    ReadingStatus.LOST,
    ReadingStatus.RESET_REQUIRED,
    ReadingStatus.UNREADABLE,
    ReadingStatus.UNPARSED,
    ReadingStatus.UNSUPPORTED,
)
_RESET_ACTIONS: Final = frozenset({"reset", "gpu reset", "reboot", "node reboot", "drain and reset"})
"""What nvidia-smi prints as recovery action where the GPU takes no new work until then (nvml.h,
nvmlDeviceGpuRecoveryAction_t)."""
_ECC_TOTAL: Final = "ecc uncorrected.volatile.total"
_ECC_PARTS: Final = re.compile(r"ecc uncorrected\.volatile\.(dram|sram|sram\.parity|sram\.secded)$")
_MAX_ECC_ERRORS: Final = 1e15  # NVML's "not available" is larger


def gpu_from_cells(cells: GpuCells, power_source: PowerSource | None = None) -> GpuSample:
    """One GPU from its cells; a column that is not there was not queried, and leaves no reason.

    `power_source`: where `power_draw` comes from if not from nvidia-smi's column of that name.
    """
    reasons: dict[str, ReadingStatus] = {}
    values: dict[str, Any] = {}
    mig = _switch(cells, "mig", reasons)
    for name, column, lowest, highest in _NUMBERS:
        cell = cells.get(column)
        if cell is None:
            continue
        number = read_number(*cell, lowest, highest)
        values[name] = number.value
        if number.value is None:
            reasons[name] = number.reason
    if reasons.get("memory_used_bytes") is ReadingStatus.UNSUPPORTED and "process_memory" in cells:
        # GPUs that share the memory of their host have no amount of their own: what their processes hold is theirs.
        held = read_number(*cells["process_memory"])
        if held.value is not None:
            values["memory_used_bytes"] = held.value
            del reasons["memory_used_bytes"]
    for name, column in _TEXTS:
        values[name] = _text(cells, column, name, reasons)
    if "tile" in cells and values.get("uuid") is None:
        # Each part of a GPU is listed as a row of its own, with readings of its own.
        values["uuid"] = f"{cells.get('index', ('?', ''))[0].strip()}/{cells['tile'][0].strip()}"
    if mig:
        # A GPU divided into MIG instances has no utilization as a whole, whatever is printed.
        values["utilization_percent"] = values["memory_utilization_percent"] = None
        reasons["utilization_percent"] = reasons["memory_utilization_percent"] = ReadingStatus.MIG
    power, source = _power(cells, values.get("utilization_percent"), reasons)
    if _needs_reset(cells):
        reasons["reset_required"] = ReadingStatus.RESET_REQUIRED
    sample = GpuSample(
        index=_index(cells, reasons),
        power_watts=power,
        power_source=power_source if power is not None and power_source else source,
        power_limit_watts=_limit(cells, reasons),
        sm_clock_mhz=_sm_clock(cells, reasons),
        throttle_reasons=_throttle(cells, reasons),
        performance_state=_text(cells, "performance_state", "performance_state", reasons),
        mig=mig,
        uncorrected_ecc_errors=_uncorrected_errors(cells, reasons),
        reasons=reasons or NO_REASONS,
        **values,
    )
    return discard_live_readings(sample) if ReadingStatus.LOST in reasons.values() else sample


def sum_of_process_memory(texts: Iterable[str]) -> tuple[str, str] | None:
    """The cell for `process_memory`: what all processes of one GPU hold; None where one of the amounts is not known."""
    amounts = [read_number(text, "-").value for text in texts]
    if not amounts or any(amount is None for amount in amounts):
        return None
    return str(sum(amount for amount in amounts if amount is not None)), "B"


def is_blank_row(cells: GpuCells) -> bool:
    """True for a row in which every cell is absent: it contains no GPU and no value."""
    return all(status_of_text(text) is ReadingStatus.UNSUPPORTED for text, _ in cells.values())


def _power(
    cells: GpuCells, utilization: float | None, reasons: dict[str, ReadingStatus]
) -> tuple[float | None, PowerSource | None]:
    """power.draw, else the average, else the instant reading; 0 W on a busy GPU is a reading that failed.

    They differ by up to 17 W on one GPU at the same moment, hence the source. Module power is never read: on Grace
    parts it includes the CPU.
    """
    seen = [(read_number(*cells[field]), source) for field, source in _POWER if field in cells]
    for reading, source in seen:
        if reading.value is not None:
            if reading.value == 0.0 and utilization:
                reasons["power_watts"] = ReadingStatus.UNREADABLE
                return None, None
            return reading.value, source
    if seen:
        reasons["power_watts"] = _worst(reading.reason for reading, _ in seen)
    return None, None


def _sm_clock(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> float | None:
    """The SM clock, else the graphics clock where only that column was logged."""
    cell = cells.get("sm_clock") or cells.get("graphics_clock")
    if cell is None:
        return None
    number = read_number(*cell)
    if number.value is None:
        reasons["sm_clock_mhz"] = number.reason
    return number.value


def _limit(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> float | None:
    seen = [read_number(*cells[field]) for field in ("power_limit_enforced", "power_limit") if field in cells]
    for reading in seen:
        if reading.value:  # a limit of 0 W is no limit
            return reading.value
    if seen:
        reasons["power_limit_watts"] = _worst(
            ReadingStatus.UNSUPPORTED if reading.value == 0.0 else reading.reason for reading in seen
        )
    return None


def _needs_reset(cells: GpuCells) -> bool:
    if "reset_required" in cells and cells["reset_required"][0].strip().casefold() == "yes":
        return True
    return "recovery_action" in cells and cells["recovery_action"][0].strip().casefold() in _RESET_ACTIONS


def _uncorrected_errors(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> float | None:
    """Memory errors that could not be corrected, since the driver was loaded. One count that the driver cannot return,
    of whatever kind, is a sign of a broken GPU; a GPU without ECC has none."""
    fields = [field for field in cells if field[:4] == "ecc "]
    if not fields:
        return None
    counts: dict[str, float] = {}
    for field in fields:
        text = cells[field][0]
        reason = status_of_text(text)
        if reason not in (None, ReadingStatus.UNSUPPORTED):
            reasons["ecc"] = reason
        elif text.strip().isdecimal() and float(text) < _MAX_ECC_ERRORS:
            counts[field] = float(text)
    if "ecc" in reasons:
        return None
    if _ECC_TOTAL in counts:
        return counts[_ECC_TOTAL]
    parts = {match[1]: count for field, count in counts.items() if (match := _ECC_PARTS.match(field))}
    if any(part.startswith("sram.") for part in parts):
        parts.pop("sram", None)  # their sum
    return sum(parts.values()) if parts else None


def _worst(reasons: Iterable[ReadingStatus]) -> ReadingStatus:
    found = set(reasons)
    return next(reason for reason in _SEVERITY_ORDER if reason in found)


def _text(cells: GpuCells, field: str, into: str, reasons: dict[str, ReadingStatus]) -> str | None:
    if field not in cells:
        return None
    text = cells[field][0].strip()
    reason = status_of_text(text)
    if reason is not None:
        reasons[into] = reason
        return None
    return text


def _index(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> int | None:
    if "index" not in cells:
        return None
    text = cells["index"][0].strip().casefold()  # scripts write "gpu3", rocm-smi "card3"
    for prefix in ("gpu", "card"):
        text = text.removeprefix(prefix)
    text = text.strip().removesuffix(".0")  # pandas writes a column with a gap as floats
    if text.isascii() and text.isdigit() and len(text) < 6:
        return int(text)
    if reason := status_of_text(text):  # other words mean a ragged row, not a faulty GPU
        reasons["index"] = reason
    return None


def _switch(cells: GpuCells, field: str, reasons: dict[str, ReadingStatus]) -> bool | None:
    if field not in cells:
        return None
    text = cells[field][0].strip().casefold()
    if text in {"enabled", "disabled"}:
        return text == "enabled"
    reasons[field] = status_of_text(text) or ReadingStatus.UNPARSED
    return None


def _throttle(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> frozenset[str] | None:
    """From the bit mask, or from one column per reason ("Active" / "Not Active")."""
    if "throttle_mask" in cells:
        text = cells["throttle_mask"][0].strip()
        try:
            return throttle_names(int(text, 16))
        except ValueError:
            reasons["throttle_reasons"] = status_of_text(text) or ReadingStatus.UNPARSED
            return None
    single = {field: text.strip().casefold() for field, (text, _) in cells.items() if field.startswith("throttle ")}
    if not single or not any(text in {"active", "not active"} for text in single.values()):
        if single:
            reasons["throttle_reasons"] = _worst(
                status_of_text(text) or ReadingStatus.UNPARSED for text in single.values()
            )
        return None
    names = {field.removeprefix("throttle ") for field, text in single.items() if text == "active"}
    # The XML writes "display_clocks_setting" for what the bit mask's name and the CSV call "display_clock_setting".
    return frozenset(name.replace("display_clocks", "display_clock") for name in names)
