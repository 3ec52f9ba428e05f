"""Pseudonyms: what a person, a host, a job or a company is called in a recording, by what it is called in its copy."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Final

WORD: Final = re.compile(r"[^\W\d_]{2,}")
TOKEN: Final = re.compile(r"[^\W_]+")
MEASURED: Final = re.compile(r"\d+(?:[A-Za-z]{1,3}|e\d+|h\d+m(?:\d+s)?|m\d+s|T\d+)")  # "12ms", "3e05", "1h30m", "01T10"
LETTERS: Final = re.compile(r"[^\W\d_]+")
PATH: Final = re.compile(r"(?<![\w/])/[^\s\"',;:()\[\]{}<>|]+")
ADDRESS: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b")
BUS_ID: Final = re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?\b")
SERIAL: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
TRAINER: Final = "trainer"
KEPT_NAMES: Final = re.compile(r"python[\d.]*|pt_main_thread|torchrun")


@cache
def kept_words(kind: str) -> frozenset[str]:
    """By the table kept_words.toml. "path": in paths; "units": beside digits; "listing": in names of checkpoint files;
    "text": in any other text."""
    table = tomllib.loads(resources.files("watcher").joinpath("kept_words.toml").read_text("utf-8"))
    lists = {"path": ["path"], "units": ["units"], "listing": [*table], "text": [k for k in table if k != "listing"]}[
        kind
    ]
    return frozenset(word for name in lists for word in table[name].split() if len(word) > 1 or kind == "units")


@dataclass(slots=True)
class Pseudonyms:
    """What is replaced by what, over one recording."""

    hosts: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    trainers: Sequence[re.Pattern[str]] = ()  # the jobs' patterns of process names
    _new: dict[tuple[str, str], str] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    _host_pattern: re.Pattern[str] | None = None
    _job_pattern: re.Pattern[str] | None = None

    def of(self, kind: str, word: str) -> str:
        """`kind`, and the number of its kind that this word is."""
        known = self._new.get((kind, word))
        if known is None:
            known = f"{kind}{1 + sum(each == kind for each, _ in self._new)}"
            self._new[(kind, word)] = known
        return known

    def add_host(self, host: str, pseudonym: str) -> None:
        """By its full and its short name."""
        for name in (host, host.split(".")[0]):
            self.hosts.setdefault(name, pseudonym)
        self._host_pattern = _any_of(self.hosts)

    def add_job(self, job: str) -> str:
        """In paths, and in text unless it is one kept word ("train"): that one may be part of a format."""
        self.jobs[job.lower()] = pseudonym = self.of("job-", job)
        names = [each for each in self.jobs if each not in kept_words("text")]
        self._job_pattern = _any_of(names) if names else None
        return pseudonym

    def listing(self, text: str) -> str:
        """A string of a listing of checkpoints."""
        return self.text(text, "listing")

    def text(self, text: str, kind: str = "text") -> str:
        """Any text: hosts, jobs, serials, paths, addresses, then each word that is not kept."""
        held: list[str] = []

        def hold(replacement: str) -> str:
            held.append(replacement)
            return f"\0{len(held) - 1}\0"

        if self._host_pattern is not None:
            text = self._host_pattern.sub(lambda m: hold(self._host(m[0])), text)
        text = SERIAL.sub(lambda m: hold(self.serial(m[0])), text)
        if self._job_pattern is not None:
            text = self._job_pattern.sub(lambda m: hold(self.jobs[m[0].lower()]), text)
        text = PATH.sub(lambda m: hold(self.path(m[0])), text)
        text = ADDRESS.sub(lambda m: hold(self._address(m[0])), text)
        text = BUS_ID.sub(lambda m: hold(m[0]), text)
        if kind != "driver":
            text = TOKEN.sub(lambda m: m[0] if self._is_kept(m[0], kind) else self.of("w", m[0]), text)
        return re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], _unheld(text, held))

    def path(self, path: str) -> str:
        """Each part of it that is not wholly made of kept words and numbers beside them."""
        return "/".join(map(self._part, path.split("/")))

    def _part(self, part: str) -> str:
        if part.lower() in self.jobs:
            return self.jobs[part.lower()]
        named = any(each is not None and each.search(part) for each in (self._host_pattern, self._job_pattern))
        return part if not part or (self._is_plain(part) and not named) else self.of("d", part)

    def serial(self, serial: str) -> str:
        return f"GPU-00000000-0000-0000-0000-{int(self.of('serial', serial).removeprefix('serial')):012}"

    def driver(self, text: str) -> str:
        """A text of the driver's tools, or a board: their words and models stay."""
        return self.text(text, "driver")

    def process(self, name: str) -> str:
        if any(pattern.search(name) for pattern in self.trainers):
            return TRAINER
        return name if KEPT_NAMES.fullmatch(name) else self.of("program", name)

    def _host(self, name: str) -> str:
        return self.hosts.get(name) or next(new for old, new in self.hosts.items() if old.lower() == name.lower())

    def _address(self, address: str) -> str:
        return f"192.0.2.{self.of('', address)}"

    def _is_plain(self, part: str) -> bool:
        words = [word.lower() for word in LETTERS.findall(part)]
        return bool(words) and all(word in kept_words("path") or word in self.kept for word in words)

    def _is_kept(self, token: str, kind: str) -> bool:
        """A number, a kept word (with a number to it), a number with its unit, or a letter that stands alone."""
        words = [word.lower() for word in LETTERS.findall(token)]
        if len(token) == 1 or all(word in self.kept or word in kept_words(kind) for word in words):
            return True
        return MEASURED.fullmatch(token) is not None and words[0] in kept_words("units")


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w-])", re.IGNORECASE)


def _unheld(text: str, held: list[str]) -> str:
    """Paths may hold what was put aside before them."""
    for i, each in enumerate(held):
        held[i] = re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], each)
    return text
