"""Makes a copy of a recording that can be shown to strangers and gives the same verdicts.

Hosts, users, directories, job names, addresses, GPU serial numbers and every word that is not in kept_words.toml are
replaced, the same one always by the same pseudonym. Kept are numbers, times, GPU models, and the words of the job's own
log pattern, without which its log could not be parsed.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import orjson

from wattwatch.collectors.probe.request import LogSource
from wattwatch.watcher.config.settings import probe_request_for
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.detection.prior_state import (
    PRIOR_STATE_KEY,
    PriorState,
    prior_state_from_records,
    prior_state_to_records,
)
from wattwatch.watcher.recordings.format import FORMAT, VERSION, RecordingError, read_raw_records

WORD_PATTERN: Final = re.compile(r"[^\W\d_]{2,}")
TOKEN_PATTERN: Final = re.compile(r"[^\W_]+")
MEASUREMENT_PATTERN: Final = re.compile(
    r"\d+(?:[A-Za-z]{1,3}|e\d+|h\d+m(?:\d+s)?|m\d+s|T\d+)"
)  # "12ms", "3e05", "1h30m", "01T10"
LETTERS_PATTERN: Final = re.compile(r"[^\W\d_]+")
PATH_PATTERN: Final = re.compile(r"(?<![\w/])/[^\s\"',;:()\[\]{}<>|]+")
ADDRESS_PATTERN: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b")
BUS_ID_PATTERN: Final = re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?\b")
SERIAL_PATTERN: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
TRAINER_PSEUDONYM: Final = "trainer"
KEPT_PROCESS_NAMES: Final = re.compile(r"python[\d.]*|pt_main_thread|torchrun")


@cache
def kept_words(kind: str) -> frozenset[str]:
    """The words of kept_words.toml that may stay in one kind of text. "path": paths; "units": beside digits; "listing":
    names of checkpoint files; "text": everything else."""
    table = tomllib.loads(
        resources.files("wattwatch.watcher.recordings").joinpath("kept_words.toml").read_text("utf-8")
    )
    lists = {"path": ["path"], "units": ["units"], "listing": [*table], "text": [k for k in table if k != "listing"]}[
        kind
    ]
    return frozenset(word for name in lists for word in table[name].split() if len(word) > 1 or kind == "units")


@dataclass(slots=True)
class Pseudonyms:
    """The replacements of one recording."""

    hosts: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    trainers: Sequence[re.Pattern[str]] = ()  # patterns for the names of the jobs' processes
    _new: dict[tuple[str, str], str] = field(default_factory=dict)
    jobs: dict[str, str] = field(default_factory=dict)
    _host_pattern: re.Pattern[str] | None = None
    _job_pattern: re.Pattern[str] | None = None

    def of(self, kind: str, word: str) -> str:
        """The pseudonym of a word: its kind and a number, such as "job-1". The same word always gets the same one."""
        known = self._new.get((kind, word))
        if known is None:
            known = f"{kind}{1 + sum(each == kind for each, _ in self._new)}"
            self._new[(kind, word)] = known
        return known

    def add_host(self, host: str, pseudonym: str) -> None:
        """Replaces a host by its full name and by its short name."""
        for name in (host, host.split(".")[0]):
            self.hosts.setdefault(name, pseudonym)
        self._host_pattern = _any_of(self.hosts)

    def add_job(self, job: str) -> str:
        """Replaces a job in paths, and in text unless its name is a kept word: "train" may be part of a log format."""
        self.jobs[job.lower()] = pseudonym = self.of("job-", job)
        names = [each for each in self.jobs if each not in kept_words("text")]
        self._job_pattern = _any_of(names) if names else None
        return pseudonym

    def listing(self, text: str) -> str:
        """A string in the listing of a checkpoint directory."""
        return self.text(text, "listing")

    def text(self, text: str, kind: str = "text") -> str:
        """Any text: replaces hosts, jobs, serial numbers, paths and addresses, then each word that is not kept.

        What was replaced is put aside as a numbered placeholder, or a later step would replace parts of a pseudonym.
        """
        held: list[str] = []

        def hold(replacement: str) -> str:
            held.append(replacement)
            return f"\0{len(held) - 1}\0"

        if self._host_pattern is not None:
            text = self._host_pattern.sub(lambda m: hold(self._host(m[0])), text)
        text = SERIAL_PATTERN.sub(lambda m: hold(self.serial(m[0])), text)
        if self._job_pattern is not None:
            text = self._job_pattern.sub(lambda m: hold(self.jobs[m[0].lower()]), text)
        text = PATH_PATTERN.sub(lambda m: hold(self.path(m[0])), text)
        text = ADDRESS_PATTERN.sub(lambda m: hold(self._address(m[0])), text)
        text = BUS_ID_PATTERN.sub(lambda m: hold(m[0]), text)
        if kind != "driver":
            text = TOKEN_PATTERN.sub(lambda m: m[0] if self._is_kept(m[0], kind) else self.of("w", m[0]), text)
        return re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], _restore_nested(text, held))

    def path(self, path: str) -> str:
        """Replaces each part of a path that does not consist of kept words and numbers only."""
        return "/".join(map(self._part, path.split("/")))

    def _part(self, part: str) -> str:
        if part.lower() in self.jobs:
            return self.jobs[part.lower()]
        named = any(each is not None and each.search(part) for each in (self._host_pattern, self._job_pattern))
        return part if not part or (self._is_plain(part) and not named) else self.of("d", part)

    def serial(self, serial: str) -> str:
        return f"GPU-00000000-0000-0000-0000-{int(self.of('serial', serial).removeprefix('serial')):012}"

    def driver(self, text: str) -> str:
        """A text of the driver's tools, or the key of a GPU: words and models stay."""
        return self.text(text, "driver")

    def process(self, name: str) -> str:
        if any(pattern.search(name) for pattern in self.trainers):
            return TRAINER_PSEUDONYM
        return name if KEPT_PROCESS_NAMES.fullmatch(name) else self.of("program", name)

    def _host(self, name: str) -> str:
        return self.hosts.get(name) or next(new for old, new in self.hosts.items() if old.lower() == name.lower())

    def _address(self, address: str) -> str:
        return f"192.0.2.{self.of('', address)}"

    def _is_plain(self, part: str) -> bool:
        words = [word.lower() for word in LETTERS_PATTERN.findall(part)]
        return bool(words) and all(word in kept_words("path") or word in self.kept for word in words)

    def _is_kept(self, token: str, kind: str) -> bool:
        """Whether a token may stay: a number, a kept word (also with a number), a number with a unit, a letter."""
        words = [word.lower() for word in LETTERS_PATTERN.findall(token)]
        if len(token) == 1 or all(word in self.kept or word in kept_words(kind) for word in words):
            return True
        return MEASUREMENT_PATTERN.fullmatch(token) is not None and words[0] in kept_words("units")


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(r"(?<![\w-])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w-])", re.IGNORECASE)


def _restore_nested(text: str, held: list[str]) -> str:
    """Restores placeholders inside of replacements: a path may contain a host that was replaced before it."""
    for i, each in enumerate(held):
        held[i] = re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], each)
    return text


# The copy of a recording, record by record

HEARTBEAT_KEYS: Final = frozenset(
    [
        "step",
        "steps",
        "rank",
        "world",
        "pid",
        "restart",
        "phase",
        "loss",
        "tokens_per_second",
        "data_wait_ms",
        "time",
        "wall",
        "host",
    ]
)


def write_anonymized(source: Path, target: Path) -> None:
    """Writes an anonymized copy of the recording `source`. Raises RecordingError if either file cannot be used."""
    specs, records = read_raw_records(source)
    names = Pseudonyms(
        kept=_words_in_patterns(specs), trainers=[re.compile(spec.processes) for spec in specs if spec.processes]
    )
    for spec in specs:
        names.add_job(spec.name)
        for node in spec.nodes:
            names.add_host(node, names.hosts.get(node) or f"node-{1 + len(set(names.hosts.values()))}")
    logs: set[str] = set()
    for record in records:
        message = _message(record)
        host = str((message.get("hello") or {}).get("host", "")) if message else ""
        if host and host.split(".")[0] not in names.hosts:
            names.add_host(host, names.hosts.get(str(record["n"]), "host"))
        logs.update(str(row[1]) for row in message.get("log", ()))
    new = tuple(_spec(spec, names, logs) for spec in specs)
    try:
        with gzip.GzipFile(target, "wb", compresslevel=6) as file:
            header = {"format": FORMAT, "version": VERSION, "jobs": [asdict(spec) for spec in new]}
            file.write(orjson.dumps(header) + b"\n")
            for record in read_raw_records(source)[1]:
                file.write(orjson.dumps(_record(record, names, new)) + b"\n")
    except OSError as error:
        raise RecordingError(f"{target}: cannot write the file: {error.strerror}") from None


def _words_in_patterns(specs: Sequence[JobSpec]) -> frozenset[str]:
    return frozenset(word.lower() for spec in specs for word in WORD_PATTERN.findall(spec.log_pattern or ""))


def _spec(spec: JobSpec, names: Pseudonyms, logs: set[str]) -> JobSpec:
    """The job under its pseudonym. A shell pattern for logs is replaced by the logs that it matched."""
    mine = [path for path in sorted(logs) if any(fnmatch.fnmatchcase(path, pattern) for pattern in spec.logs)]
    return replace(
        spec,
        name=names.of("job-", spec.name),
        nodes=tuple(names.hosts[node] for node in spec.nodes),
        run_directory=None if spec.run_directory is None else names.path(spec.run_directory),
        checkpoint_directory=None if spec.checkpoint_directory is None else names.path(spec.checkpoint_directory),
        logs=tuple(dict.fromkeys(names.path(path) for path in mine)) or tuple(map(names.path, spec.logs)),
        processes=None if spec.processes is None else f"^{TRAINER_PSEUDONYM}$",
    )


def _message(record: dict[str, Any]) -> dict[str, Any]:
    """The line of the probe in a record, parsed; empty if there is none or it cannot be parsed."""
    try:
        message = orjson.loads(record.get("line", "{}"))
    except orjson.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}


def _record(record: dict[str, Any], names: Pseudonyms, specs: Sequence[JobSpec]) -> dict[str, Any]:
    if "end" in record:
        return {"t": record["t"], "end": True}
    if PRIOR_STATE_KEY in record:
        return _known_before(record, names)
    node = names.hosts.get(str(record.get("n")), "host")
    new = {"n": node, "t": record.get("t")}
    if "link" in record:
        kept: dict[str, Any] = {key: record[key] for key in ("link", "cause") if key in record}
        return {**new, **kept, "detail": names.text(str(record.get("detail", "")))}
    message = _message(record)
    if not message:
        return {**new, "line": names.text(str(record.get("line", "")))}  # output of a login shell
    return {**new, "line": json.dumps(_line(message, names, specs, node), separators=(",", ":"))}


def _known_before(record: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """The prior state, with GPUs and jobs under their pseudonyms; empty if it cannot be read."""
    known = prior_state_from_records([record]) or PriorState()
    boards = tuple(
        replace(
            value,
            node=names.hosts.get(value.node, "host"),
            board=names.driver(value.board),
            job=names.of("job-", value.job),
        )
        for value in known.boards
    )
    habits = {names.of("job-", job): history for job, history in known.habits.items()}
    return next(prior_state_to_records(PriorState(boards, habits)))


def _line(message: dict[str, Any], names: Pseudonyms, specs: Sequence[JobSpec], node: str) -> dict[str, Any]:
    """A line of the probe, field by field. Fields unknown to this version are left out: they could name anything."""
    new: dict[str, Any] = {key: message[key] for key in ("v", "seq", "t", "w", "load", "gpu") if key in message}
    if "gpu" in new:
        answer = message["gpu"]
        new["gpu"] = _strings(answer, names.driver)
        if isinstance(answer, dict):  # names of columns stay: without them the rows could not be read
            new["gpu"] |= {key: answer[key] for key in ("columns", "fields") if key in answer}
    if message.get("hello"):
        new["hello"] = {"host": names.hosts.get(str(message["hello"]["host"]), node)}
    if "beat" in message:
        new["beat"] = [[names.path(path), at, _heartbeat(text, names)] for path, at, text in message["beat"]]
    if "log" in message:
        sources = probe_request_for(specs, node).logs
        new["log"] = [_log(row, names, sources) for row in message["log"]]
    if "ckpt" in message:
        new["ckpt"] = [_listing(news, names) for news in message["ckpt"]]
    if "listed" in message:
        new["listed"] = [[names.path(directory), at] for directory, at in message["listed"]]
    if "fs" in message:
        new["fs"] = [
            [names.path(path), free, total, _strings(error, names.text), *kind]
            for path, free, total, error, *kind in message["fs"]
        ]
    if message.get("proc") is not None:
        new["proc"] = [
            [pid, at, state, names.process(name), cpu, _strings(held, names.driver), *waits_in]
            for pid, at, state, name, cpu, held, *waits_in in message["proc"]
        ]
    elif "proc" in message:
        new["proc"] = None
    for key in ("exited", "unlisted"):  # pids and start times
        if key in message:
            new[key] = _strings(message[key], names.text)
    if "work" in message:
        new["work"] = [[*row[:4], names.process(row[4]), *row[5:]] for row in message["work"]]
    for key in ("busy", "kmsg", "warn", "kmsg_error"):
        if key in message:
            new[key] = _strings(message[key], names.text)
    return new


def _heartbeat(text: str | None, names: Pseudonyms) -> str | None:
    if text is None:
        return None
    try:
        beat = json.loads(text)
        return json.dumps({key: _strings(value, names.text) for key, value in beat.items() if key in HEARTBEAT_KEYS})
    except (json.JSONDecodeError, AttributeError):
        return names.text(text)


def _log(row: list[Any], names: Pseudonyms, sources: Sequence[LogSource]) -> list[Any]:
    path = names.path(str(row[1]))
    place = next((i for i, source in enumerate(sources) if source.path == path), -1)
    return [place, path, *row[2:5], _strings(row[5], names.text)]


def _listing(news: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    return {
        **_strings({k: v for k, v in news.items() if k != "dir"}, names.listing),
        "dir": names.path(str(news["dir"])),
    }


def _strings(value: Any, change: Callable[[str], str]) -> Any:
    """The value with every string in it changed, keys of objects too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_strings(each, change) for each in value]
    if isinstance(value, dict):
        return {_strings(key, change): _strings(each, change) for key, each in value.items()}
    return value
