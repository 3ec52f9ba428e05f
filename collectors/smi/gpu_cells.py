"""The cells of one board -> `GpuSample`. Every format ends here, so that all of them say the same of a board."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from wattwatch.collectors.nvml import discard_live_readings, throttle_names
from wattwatch.collectors.samples import NO_REASONS, GpuSample, PowerSource, ReadingStatus
from wattwatch.collectors.smi.columns import read_number, status_of_text

GpuCells = Mapping[str, tuple[str, str]]
"""Field of columns.toml -> (text of the cell, unit where the text names none)."""

_POWER: Final = (
    ("power_draw", PowerSource.DRAW),
    ("power_average", PowerSource.AVERAGE),
    ("power_instant", PowerSource.INSTANT),
)
_SEVERITY_ORDER: Final = (
    ReadingStatus.LOST,
    ReadingStatus.RESET_REQUIRED,
    ReadingStatus.UNREADABLE,
    ReadingStatus.UNSUPPORTED,
)


def gpu_from_cells(cells: GpuCells, power_source: PowerSource | None = None) -> GpuSample:
    """One board from its cells; a column that is not there was not asked for, and leaves no reason.

    `power_source`: where `power_draw` comes from if not from nvidia-smi's column of that name.
    """
    reasons: dict[str, ReadingStatus] = {}

    def number(field: str, into: str, bottom: float = 0.0, top: float = 1e18) -> float | None:
        if field not in cells:
            return None
        reading = read_number(*cells[field], bottom, top)
        if reading.value is None:
            reasons[into] = reading.reason
        return reading.value

    mig = _switch(cells, "mig", "mig", reasons)
    utilization = number("utilization", "utilization_percent", top=100.0)
    memory_utilization = number("memory_utilization", "memory_utilization_percent", top=100.0)
    if mig:
        # No figure for the whole board exists while it is sliced, whatever is printed.
        utilization = memory_utilization = None
        reasons["utilization_percent"] = reasons["memory_utilization_percent"] = ReadingStatus.MIG
    power, source = _power(cells, utilization, reasons)
    if "ecc" in cells and (reason := status_of_text(cells["ecc"][0])) not in (None, ReadingStatus.UNSUPPORTED):
        reasons["ecc"] = reason
    sample = GpuSample(
        index=_index(cells, reasons),
        uuid=_text(cells, "uuid", "uuid", reasons),
        pci_bus_id=_text(cells, "pci_bus_id", "pci_bus_id", reasons),
        name=_text(cells, "name", "name", reasons),
        power_watts=power,
        power_source=power_source if power is not None and power_source else source,
        power_limit_watts=_limit(cells, reasons),
        utilization_percent=utilization,
        memory_utilization_percent=memory_utilization,
        memory_used_bytes=number("memory_used", "memory_used_bytes"),
        memory_total_bytes=number("memory_total", "memory_total_bytes"),
        temperature_celsius=number("temperature", "temperature_celsius", bottom=-100.0, top=1000.0),
        sm_clock_mhz=number("sm_clock" if "sm_clock" in cells else "graphics_clock", "sm_clock_mhz"),
        throttle_reasons=_throttle(cells, reasons),
        performance_state=_text(cells, "performance_state", "performance_state", reasons),
        mig=mig,
        reasons=reasons or NO_REASONS,
    )
    return discard_live_readings(sample) if ReadingStatus.LOST in reasons.values() else sample


def is_blank_row(cells: GpuCells) -> bool:
    """True for a row of nothing but absence: it names no board and no value."""
    return all(status_of_text(text) is ReadingStatus.UNSUPPORTED for text, _ in cells.values())


def _power(
    cells: GpuCells, utilization: float | None, reasons: dict[str, ReadingStatus]
) -> tuple[float | None, PowerSource | None]:
    """power.draw, else the average, else the instant reading; 0 W on a busy board is a reading that failed.

    They differ by up to 17 W on one board at one time, hence the source. Module power is never read.
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
    text = cells["index"][0].strip().casefold()
    for prefix in ("gpu", "card"):
        text = text.removeprefix(prefix)
    text = text.strip().removesuffix(".0")  # pandas writes a column with a gap as floats
    if text.isascii() and text.isdigit() and len(text) < 6:
        return int(text)
    if reason := status_of_text(text):  # other words make a ragged row, not a faulty board
        reasons["index"] = reason
    return None


def _switch(cells: GpuCells, field: str, into: str, reasons: dict[str, ReadingStatus]) -> bool | None:
    if field not in cells:
        return None
    text = cells[field][0].strip().casefold()
    if text in {"enabled", "disabled"}:
        return text == "enabled"
    reasons[into] = status_of_text(text) or ReadingStatus.UNREADABLE
    return None


def _throttle(cells: GpuCells, reasons: dict[str, ReadingStatus]) -> frozenset[str] | None:
    """From the bit mask, or from one column per reason ("Active" / "Not Active")."""
    if "throttle_mask" in cells:
        text = cells["throttle_mask"][0].strip()
        try:
            return throttle_names(int(text, 16))
        except ValueError:
            reasons["throttle_reasons"] = status_of_text(text) or ReadingStatus.UNREADABLE
            return None
    single = {field: text.strip().casefold() for field, (text, _) in cells.items() if field.startswith("throttle ")}
    if not single or not any(text in {"active", "not active"} for text in single.values()):
        if single:
            reasons["throttle_reasons"] = _worst(
                status_of_text(text) or ReadingStatus.UNREADABLE for text in single.values()
            )
        return None
    names = {field.removeprefix("throttle ") for field, text in single.items() if text == "active"}
    # The XML writes "display_clocks_setting" for what the bit mask's name and the CSV call "display_clock_setting".
    return frozenset(name.replace("display_clocks", "display_clock") for name in names)
