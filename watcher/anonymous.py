"""A copy of a recording that can be shown to strangers, and gives the same verdicts.

Hosts, users, directories, job names, addresses, board serials and every word that the watcher's own readers do not know
are replaced, the same one always by the same. What is kept: numbers, times, board models, the words of known log and
checkpoint formats, and the words of the job's own log pattern, since without them its log could not be read.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

import orjson

from collectors.probe.request import LogSource
from watcher.judge.job_sample import JobSpec
from watcher.known_before import KEY, KnownBefore, from_records, to_records
from watcher.node_requests import request_for
from watcher.recordings import FORMAT, VERSION, RecordingError, read_records

WORD: Final = re.compile(r"[^\W\d_]{2,}")
PATH: Final = re.compile(r"(?<![\w/])/[^\s\"',;:()\[\]{}<>|]+")
ADDRESS: Final = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b(?:[0-9a-fA-F]{1,4}:){3,7}[0-9a-fA-F]{1,4}\b")
SERIAL: Final = re.compile(r"\b(?:GPU|MIG)-[0-9a-fA-F-]{8,}")
# Words of the probe's own lines, of kernel fault lines, of our detail texts, and of file systems everywhere.
PLAIN_WORDS: Final = frozenset(
    "bytes count mtime files index short entries names root dir error kind text list read nvml nvidia smi stat "
    "home mnt data scratch lustre nfs runs run tmp var opt checkpoint checkpoints ckpt ckpts heartbeat log logs train "
    "training rank step steps iter global latest complete json txt out err safetensors distcp pt bin metadata model "
    "optimizer python pid name NVRM Xid PCI GPU has fallen off the bus Out of memory Killed process segfault at ip sp "
    "in for no line not answered yet after has have does while is was to by from and or on of an it seconds "
    "connection refused timed reset host unreachable nan inf loss true false null".lower().split()
)
BEAT_KEYS: Final = frozenset(
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
TRAINER: Final = "trainer"
KEPT_NAMES: Final = re.compile(r"python[\d.]*|pt_main_thread|torchrun")


@cache
def known_words() -> frozenset[str]:
    """All words in the tables of our readers: formats that are public."""
    words = set(PLAIN_WORDS)
    for table in _tables(resources.files("collectors")):
        words.update(word.lower() for word in WORD.findall(table))
    return frozenset(words)


def _tables(directory: Any) -> Iterator[str]:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.name.startswith("_") and entry.name != "simulated":
            yield from _tables(entry)
        elif entry.name.endswith(".toml"):
            yield entry.read_text("utf-8")


@dataclass(slots=True)
class Pseudonyms:
    """What is replaced by what, over one recording."""

    hosts: dict[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    trainers: Sequence[re.Pattern[str]] = ()  # the jobs' patterns of process names
    _new: dict[tuple[str, str], str] = field(default_factory=dict)
    _host_pattern: re.Pattern[str] | None = None

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
        longest_first = sorted(self.hosts, key=len, reverse=True)
        self._host_pattern = re.compile(
            r"(?<![\w-])(?:" + "|".join(map(re.escape, longest_first)) + r")(?![\w-])", re.IGNORECASE
        )

    def text(self, text: str) -> str:
        """Any text: hosts, serials, paths, addresses, then each word that is not known."""
        held: list[str] = []

        def hold(replacement: str) -> str:
            held.append(replacement)
            return f"\0{len(held) - 1}\0"

        if self._host_pattern is not None:
            text = self._host_pattern.sub(lambda m: hold(self._host(m[0])), text)
        text = SERIAL.sub(lambda m: hold(self.serial(m[0])), text)
        text = PATH.sub(lambda m: hold(self.path(m[0])), text)
        text = ADDRESS.sub(lambda m: hold(self._address(m[0])), text)
        text = WORD.sub(lambda m: m[0] if self._known(m[0]) else self.of("w", m[0]), text)
        return re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], _unheld(text, held))

    def path(self, path: str) -> str:
        """Each part of it that is not wholly made of known words and numbers beside them."""
        return "/".join(part if not part or self._is_plain(part) else self.of("d", part) for part in path.split("/"))

    def serial(self, serial: str) -> str:
        return f"GPU-00000000-0000-0000-0000-{int(self.of('serial', serial).removeprefix('serial')):012}"

    def serials(self, text: str) -> str:
        """A text of the driver's: board models stay."""
        return SERIAL.sub(lambda m: self.serial(m[0]), text)

    def process(self, name: str) -> str:
        if any(pattern.search(name) for pattern in self.trainers):
            return TRAINER
        return name if KEPT_NAMES.fullmatch(name) else self.of("program", name)

    def _host(self, name: str) -> str:
        return self.hosts.get(name) or next(new for old, new in self.hosts.items() if old.lower() == name.lower())

    def _address(self, address: str) -> str:
        return f"192.0.2.{self.of('', address)}"

    def _is_plain(self, part: str) -> bool:
        words = WORD.findall(part)
        return bool(words) and all(map(self._known, words))

    def _known(self, word: str) -> bool:
        return word.lower() in known_words() or word.lower() in self.kept


def _unheld(text: str, held: list[str]) -> str:
    """Paths may hold what was put aside before them."""
    for i, each in enumerate(held):
        held[i] = re.sub("\0(\\d+)\0", lambda m: held[int(m[1])], each)
    return text


def write_anonymous(source: Path, target: Path) -> None:
    """Raises RecordingError with one sentence where either file cannot be used."""
    specs, records = read_records(source)
    names = Pseudonyms(
        kept=_words_of_patterns(specs), trainers=[re.compile(spec.processes) for spec in specs if spec.processes]
    )
    for spec in specs:
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
            for record in read_records(source)[1]:
                file.write(orjson.dumps(_record(record, names, new)) + b"\n")
    except OSError as error:
        raise RecordingError(f"{target}: cannot be written: {error.strerror}") from None


def _words_of_patterns(specs: Sequence[JobSpec]) -> frozenset[str]:
    return frozenset(word.lower() for spec in specs for word in WORD.findall(spec.log_pattern or ""))


def _spec(spec: JobSpec, names: Pseudonyms, logs: set[str]) -> JobSpec:
    """Patterns of file names are replaced by the files that they stood for."""
    mine = [path for path in sorted(logs) if any(fnmatch.fnmatchcase(path, pattern) for pattern in spec.logs)]
    return replace(
        spec,
        name=names.of("job-", spec.name),
        nodes=tuple(names.hosts[node] for node in spec.nodes),
        run_directory=None if spec.run_directory is None else names.path(spec.run_directory),
        checkpoint_directory=None if spec.checkpoint_directory is None else names.path(spec.checkpoint_directory),
        logs=tuple(dict.fromkeys(names.path(path) for path in mine)) or tuple(map(names.path, spec.logs)),
        processes=None if spec.processes is None else f"^{TRAINER}$",
    )


def _message(record: dict[str, Any]) -> dict[str, Any]:
    """The probe's line in a record; empty where there is none that can be read."""
    try:
        message = orjson.loads(record.get("line", "{}"))
    except orjson.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}


def _record(record: dict[str, Any], names: Pseudonyms, specs: Sequence[JobSpec]) -> dict[str, Any]:
    if "end" in record:
        return {"t": record["t"], "end": True}
    if KEY in record:
        return _known_before(record, names)
    node = names.hosts.get(str(record.get("n")), "host")
    new = {"n": node, "t": record.get("t")}
    if "link" in record:
        return {**new, "link": record["link"], "detail": names.text(str(record.get("detail", "")))}
    message = _message(record)
    if not message:
        return {**new, "line": names.text(str(record.get("line", "")))}  # noise of a login shell
    return {**new, "line": json.dumps(_line(message, names, specs, node), separators=(",", ":"))}


def _known_before(record: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    """What was learned before, of the same boards and jobs by their new names; empty where it cannot be read."""
    known = from_records([record]) or KnownBefore()
    boards = tuple(
        replace(
            value,
            node=names.hosts.get(value.node, "host"),
            board=names.serials(value.board),
            job=names.of("job-", value.job),
        )
        for value in known.boards
    )
    habits = {names.of("job-", job): told for job, told in known.habits.items()}
    return next(to_records(KnownBefore(boards, habits)))


def _line(message: dict[str, Any], names: Pseudonyms, specs: Sequence[JobSpec], node: str) -> dict[str, Any]:
    """A probe's line, field by field; what this version does not know is left out."""
    new: dict[str, Any] = {key: message[key] for key in ("v", "seq", "t", "w", "load", "gpu") if key in message}
    if "gpu" in new:
        new["gpu"] = _strings(new["gpu"], names.serials)
    if message.get("hello"):
        new["hello"] = {"host": names.hosts.get(str(message["hello"]["host"]), node)}
    if "beat" in message:
        new["beat"] = [[names.path(path), at, _beat(text, names)] for path, at, text in message["beat"]]
    if "log" in message:
        sources = request_for(specs, node).logs
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
            [pid, at, state, names.process(name), cpu, _strings(held, names.serials), *waits_in]
            for pid, at, state, name, cpu, held, *waits_in in message["proc"]
        ]
    elif "proc" in message:
        new["proc"] = None
    if "work" in message:
        new["work"] = [[*row[:4], names.process(row[4]), *row[5:]] for row in message["work"]]
    for key in ("busy", "kmsg", "warn", "kmsg_error"):
        if key in message:
            new[key] = _strings(message[key], names.text)
    return new


def _beat(text: str | None, names: Pseudonyms) -> str | None:
    if text is None:
        return None
    try:
        beat = json.loads(text)
        return json.dumps({key: _strings(value, names.text) for key, value in beat.items() if key in BEAT_KEYS})
    except (json.JSONDecodeError, AttributeError):
        return names.text(text)


def _log(row: list[Any], names: Pseudonyms, sources: Sequence[LogSource]) -> list[Any]:
    path = names.path(str(row[1]))
    place = next((i for i, source in enumerate(sources) if source.path == path), -1)
    return [place, path, *row[2:5], _strings(row[5], names.text)]


def _listing(news: dict[str, Any], names: Pseudonyms) -> dict[str, Any]:
    return {**_strings({k: v for k, v in news.items() if k != "dir"}, names.text), "dir": names.path(str(news["dir"]))}


def _strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same with each string changed, keys as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_strings(each, change) for each in value]
    if isinstance(value, dict):
        return {_strings(key, change): _strings(each, change) for key, each in value.items()}
    return value
