"""A copy of a recording that can be shown to strangers, and gives the same verdicts.

Hosts, users, directories, job names, addresses, board serials and every word that is not in kept_words.toml are
replaced, the same one always by the same. What is kept besides: numbers, times, board models, and the words of the
job's own log pattern, since without them its log could not be read.
"""

from __future__ import annotations

import fnmatch
import gzip
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

import orjson

from collectors.probe.request import LogSource
from watcher.judge.job_sample import JobSpec
from watcher.known_before import KEY, KnownBefore, from_records, to_records
from watcher.node_requests import request_for
from watcher.pseudonyms import TRAINER, WORD, Pseudonyms
from watcher.recordings import FORMAT, VERSION, RecordingError, read_records

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


def write_anonymous(source: Path, target: Path) -> None:
    """Raises RecordingError with one sentence where either file cannot be used."""
    specs, records = read_records(source)
    names = Pseudonyms(
        kept=_words_of_patterns(specs), trainers=[re.compile(spec.processes) for spec in specs if spec.processes]
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
            board=names.driver(value.board),
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
        new["gpu"] = _strings(new["gpu"], names.driver)
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
            [pid, at, state, names.process(name), cpu, _strings(held, names.driver), *waits_in]
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
    return {
        **_strings({k: v for k, v in news.items() if k != "dir"}, names.listing),
        "dir": names.path(str(news["dir"])),
    }


def _strings(value: Any, change: Callable[[str], str]) -> Any:
    """The same with each string changed, keys as well."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_strings(each, change) for each in value]
    if isinstance(value, dict):
        return {_strings(key, change): _strings(each, change) for key, each in value.items()}
    return value
