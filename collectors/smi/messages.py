"""Lines that are not rows -> host state, GPUs that could not be opened, unknown fields, warnings."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Final

from wattwatch.collectors.samples import HostStatus, MissingGpu, ReadingStatus
from wattwatch.collectors.smi.columns import REQUIRED_COLUMNS
from wattwatch.collectors.smi.report import MAX_WARNINGS

_HANDLE_FAILURE: Final = re.compile(
    r"Unable to determine the device handle for\s+(?:GPU|device)?\s*"
    r"(?:(?P<index>\d{1,3})(?![0-9A-Fa-f])\s*:?\s*)?"
    r"(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f])?[\s:]*(?P<why>.*)",
    re.IGNORECASE,
)
_INVALID_FIELD: Final = re.compile(r"Field [\"'`]?([\w.\-]*)[\"'`]? is not a valid field to query", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownMessage:
    """One known message. `status` is None for one that prevents no reading."""

    pattern: re.Pattern[str]
    status: HostStatus | None
    text: str
    about_a_gpu: bool = False  # it says something about a GPU that the rows do not show


@dataclass(frozen=True, slots=True)
class ExitCode:
    """What an exit status of nvidia-smi means; used only where nothing could be read."""

    status: HostStatus
    text: str


def _toml(name: str) -> dict[str, object]:
    return tomllib.loads((resources.files(__package__) / name).read_text("utf-8"))


def _messages() -> tuple[KnownMessage, ...]:
    entries = _toml("messages.toml")["message"]
    assert isinstance(entries, list)
    return tuple(
        KnownMessage(
            re.compile(entry["pattern"], re.IGNORECASE),
            HostStatus(entry["status"]) if "status" in entry else None,
            entry.get("text", ""),
            entry.get("about_a_gpu", False),
        )
        for entry in entries
    )


def _exit_codes() -> dict[int, ExitCode]:
    codes: dict[int, ExitCode] = {}
    for code, entry in _toml("exit_codes.toml").items():
        assert isinstance(entry, dict)
        codes[int(code)] = ExitCode(HostStatus(entry["status"]), entry["text"])
    return codes


def _outputs() -> tuple[tuple[re.Pattern[str], str], ...]:
    entries = _toml("messages.toml")["output"]
    assert isinstance(entries, list)
    return tuple((re.compile(entry["pattern"]), entry["text"]) for entry in entries)


MESSAGES: Final = _messages()
OTHER_OUTPUTS: Final = _outputs()
EXIT_CODES: Final[Mapping[int, ExitCode]] = _exit_codes()


@dataclass(slots=True)
class MessageLog:
    """The messages of one output. Lines are passed to `recognize` one by one."""

    status: HostStatus | None = None
    detail: str = ""
    status_line: int = -1
    missing: list[MissingGpu] = field(default_factory=list)
    invalid_fields: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def recognize(self, line: str, number: int = -1) -> bool:
        """Whether the line is a known message; if so it is recorded, and it is not a row."""
        text = line.strip()
        # No message is that long; searching a line of garbage with 25 patterns would be slow.
        if len(text) > 1000 or not text[:1].isprintable():
            return False
        if handle := _HANDLE_FAILURE.search(text):
            self._add_missing(handle, text)
            return True
        if invalid := _INVALID_FIELD.search(text):
            self.invalid_fields.append(invalid[1])
            return True
        for message in MESSAGES:
            if message.pattern.search(text):
                if message.status is None:
                    self.warn(text)
                # "Invalid option" says less than a driver that is down: it never replaces another status.
                elif message.status is not HostStatus.PARSE_ERROR or self.status is None:
                    self.status, self.detail, self.status_line = message.status, f"{message.text} ({text!r})", number
                return True
        return False

    def add(self, other: MessageLog) -> None:
        """What another part of the same output said, after this one."""
        if other.status is not None:
            self.status, self.detail, self.status_line = other.status, other.detail, other.status_line
        self.missing.extend(gpu for gpu in other.missing if gpu not in self.missing)
        self.invalid_fields.extend(other.invalid_fields)
        for warning in other.warnings:
            self.warn(warning)

    def warn(self, text: str) -> None:
        if len(self.warnings) < MAX_WARNINGS and text not in self.warnings:
            self.warnings.append(text[:200])

    def _add_missing(self, handle: re.Match[str], text: str) -> None:
        why = handle["why"].casefold()
        reason = ReadingStatus.UNREADABLE
        if "lost" in why:
            reason = ReadingStatus.LOST
        elif "reset" in why:
            reason = ReadingStatus.RESET_REQUIRED
        index = int(handle["index"]) if handle["index"] else None
        gpu = MissingGpu(index, handle["bus"], reason, text[:300])
        if gpu not in self.missing:
            self.missing.append(gpu)


def is_about_a_gpu(warning: str) -> bool:
    """Whether this warning of a report is the tool's own word on a GPU, such as a corrupted infoROM."""
    return any(message.about_a_gpu and message.pattern.search(warning) for message in MESSAGES)


def other_output(lines: Sequence[str]) -> str:
    """What this output is if it is known to have no reading of a GPU, with what to give instead; "" if unknown."""
    for pattern, text in OTHER_OUTPUTS:
        if any(pattern.search(line[:400]) for line in lines):
            return (
                f"{text}; give the output of nvidia-smi, nvidia-smi -q, or nvidia-smi "
                f"--query-gpu={REQUIRED_COLUMNS.replace(' ', '')} instead"
            )
    return ""


def explain_exit_code(exit_code: int | None) -> ExitCode | None:
    """Meaning of a non-zero exit status; None for success or no status. Negative: killed by that signal."""
    if not exit_code:
        return None
    if exit_code < 0:
        exit_code = 128 - exit_code
    if exit_code in EXIT_CODES:
        return EXIT_CODES[exit_code]
    if 128 < exit_code < 160:
        return ExitCode(HostStatus.DRIVER_DOWN, f"nvidia-smi was killed by signal {exit_code - 128}")
    return ExitCode(HostStatus.PARSE_ERROR, "this exit status is not documented")
