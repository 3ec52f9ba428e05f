"""Files that try to run code or to exhaust the watcher: each harms only itself, and is reported."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.watcher.diagnosis.flight_recorder.sample_dumps import GLOO, NCCL, PIPELINE, as_json, loaded
from wattwatch.watcher.diagnosis.flight_recorder.loader import read_flight_records
from wattwatch.watcher.diagnosis.flight_recorder.sandbox import SandboxedReader
from wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker import (
    RejectedRecord,
    TruncatedRecord,
    check_instructions,
    load_plain_pickle,
    parse_record_bytes,
)

MEGABYTE: Final = 2**20
MAX_ANSWER: Final = MEGABYTE


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """A file that a payload would create if it ran."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists()


class Payload:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


def code_pickles(marker: Path) -> dict[str, bytes]:
    """Pickles that name or call something, one for each instruction that can."""
    command = f"touch {marker}".encode()
    text = b"X" + struct.pack("<I", len(command)) + command
    return {
        "GLOBAL": b"\x80\x02cposix\nsystem\n(" + text + b"tR.",
        "REDUCE": b"\x80\x02" + text + b")R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x08builtins\x8c\x04eval\x93.",
        "INST": b"\x80\x02(" + text + b"iposix\nsystem\n.",
        "OBJ": b"\x80\x02(" + text + text + b"o.",
        "NEWOBJ": b"\x80\x02}}\x81.",
        "NEWOBJ_EX": b"\x80\x04}}}\x92.",
        "BUILD": b"\x80\x02}}b.",
        "EXT1": b"\x80\x02\x82\x01.",
        "EXT2": b"\x80\x02\x83\x01\x00.",
        "EXT4": b"\x80\x02\x84\x01\x00\x00\x00.",
        "PERSID": b"\x80\x02Pposix\n.",
        "BINPERSID": b"\x80\x02}Q.",
    }


def test_every_instruction_that_names_or_calls_something_is_rejected_before_it_runs(marker: Path) -> None:
    for name, data in code_pickles(marker).items():
        for whole in (data, b"\x80\x02}q\x00" + b"(" * 50 + data[2:], b"\x80\x02" + b"}q\x01" * 5000 + data[2:]):
            with pytest.raises(RejectedRecord, match=rf"the pickle instruction {name}, which runs code"):
                load_plain_pickle(whole)


def test_a_payload_deep_inside_a_real_record_does_not_run(marker: Path) -> None:
    dump = loaded(NCCL)
    dump["entries"][3]["frames"][0]["name"] = Payload(marker)
    for protocol in range(2, 6):
        with pytest.raises(RejectedRecord, match="runs code"):
            load_plain_pickle(pickle.dumps(dump, protocol))
    with pytest.raises(RejectedRecord, match="not a pickle of protocol 2"):
        load_plain_pickle(pickle.dumps(dump, 0))


@pytest.mark.parametrize("protocol", [0, 1])
@pytest.mark.parametrize("deep", [False, True])
def test_a_pickle_of_an_old_protocol_that_runs_code_is_reported_as_such(
    marker: Path, tmp_path: Path, protocol: int, deep: bool
) -> None:
    payload: Any = {"version": "2.10", "entries": [Payload(marker)] * 500} if deep else Payload(marker)
    (tmp_path / "trace_rank_3").write_bytes(pickle.dumps(payload, protocol))
    records, (unread,) = read_flight_records(tmp_path)
    assert (records, unread.rank, unread.incomplete) == ((), 3, False)
    assert (
        "which runs code; flight records never contain this instruction; do not open the file with other tools"
        in unread.why
    )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"(S'touch x'\niposix\nsystem\n.", "instruction INST, which runs code"),
        (b"cposix\nsystem\n(S'x'\ntR.", "instruction GLOBAL, which runs code"),
        (pickle.dumps({"version": "2.10", "entries": []}, 0), "of protocol 0 or 1, which torch does not write"),
        (b"command not found\nsecond line\n" * 300, "not a flight record in pickle or JSON format"),
        (b"(hello) world", "not a flight record in pickle or JSON format"),
        (b".", "not a flight record in pickle or JSON format"),
    ],
)
def test_a_file_without_a_pickle_marker_is_described(tmp_path: Path, data: bytes, reason: str) -> None:
    (tmp_path / "_dump_3").write_bytes(data)
    _, (unread,) = read_flight_records(tmp_path)
    assert reason in unread.why


def test_the_unpickler_finds_no_class_even_if_the_check_of_instructions_misses_one(
    marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "wattwatch.watcher.diagnosis.flight_recorder.sandbox_worker.check_instructions", lambda data: None
    )
    for name, data in code_pickles(marker).items():
        with pytest.raises(RejectedRecord):
            load_plain_pickle(data)
        assert not marker.exists(), name


@pytest.mark.parametrize("path", [NCCL, GLOO, PIPELINE])
def test_real_records_pass_the_check_and_every_truncation_of_them_is_incomplete(path: Path) -> None:
    data = path.read_bytes()
    check_instructions(data)
    check_instructions(pickle.dumps(loaded(path), 5))
    for length in range(0, len(data), 7):
        with pytest.raises(TruncatedRecord):
            load_plain_pickle(data[:length])


def text(length: int, given: bytes = b"") -> bytes:
    return b"X" + struct.pack("<I", length) + given


DAMAGED: Final = {
    "long number": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "longer number": b"\x80\x02\x8b" + struct.pack("<i", 2**30) + b"\x01.",
    "text longer than the file": b"\x80\x02" + text(2**32 - 1, b"abc") + b".",
    "protocol 5 buffer": b"\x80\x05\x97.",
    "protocol 5 bytes": b"\x80\x05\x96" + struct.pack("<Q", 3) + b"abc.",
    "protocol 9": b"\x80\x09}.",
    "bytes": b"\x80\x03C\x01a.",
    "set": b"\x80\x04\x8f.",
    "mark alone": b"\x80\x02e.",
    "nothing on the stack": b"\x80\x02.",
    "unhashable key": b"\x80\x02}]]s.",
    "memo never put": b"\x80\x02h\x07.",
    "far memo": b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",
    "less far memo": b"\x80\x02}r" + struct.pack("<I", 2**22) + b".",
    "frame too long": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"}.",
    "half a character": b"\x80\x02" + text(1, b"\xff") + b".",
    "deep lists": b"\x80\x02" + b"]" * 200_000 + b"a" * 199_999 + b".",
    "itself": b"\x80\x02]q\x00h\x00a.",
    "a number": b"\x80\x02K\x01.",
    "deep JSON": b'{"pg_config":' * 200_000 + b"1" + b"}" * 200_000,
    "deep lists in JSON": b'{"pg_config":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "long number in JSON": b'{"version":"2.10","entries":[' + b"9" * 100_000 + b"]}",
    "no number in JSON": b'{"version":"2.10","pg_config":{},"entries":[{"record_id":NaN}]}',
    "halves in JSON": b'{"version":"2.10","pg_config":{"\\ud800":{"ranks":"[0]"}},"entries":[]}',
    "twice in JSON": b'{"version":"2.10","version":3,"entries":[]}',
    "utf-16 in JSON": '{"version":"2.10","entries":4}'.encode("utf-16"),
}


def test_each_damaged_file_gives_one_sentence_and_the_next_file_is_read() -> None:
    good = NCCL.read_bytes()
    with SandboxedReader() as reader:
        for name, data in DAMAGED.items():
            table = reader.read(data, MAX_ANSWER, 100)
            if name != "halves in JSON":
                assert isinstance(table.get("why"), str), name
            assert "columns" in reader.read(good, MAX_ANSWER, 100), name


def test_the_worker_can_be_ended_although_the_watcher_blocks_the_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    start = subprocess.Popen

    def start_and_terminate(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        child = start(*arguments, **settings)
        child.terminate()  # pending until the child unblocks it
        return child

    monkeypatch.setattr(subprocess, "Popen", start_and_terminate)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGINT))
    try:
        with SandboxedReader() as reader:
            assert "killed by signal 15" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 100)["why"]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def references(levels: int, width: int) -> bytes:
    """Nested lists that each contain the one before `width` times: small in memory, endless to iterate over."""
    lists = b"]q\x00"
    for level in range(1, levels):
        lists += b"]q" + bytes([level]) + b"(" + (b"h" + bytes([level - 1])) * width + b"e"
    return lists


def with_entries(value: bytes) -> bytes:
    return b"\x80\x02}(" + text(7, b"version") + text(4, b"2.10") + text(7, b"entries") + value + b"u."


def entry_with(sizes: bytes) -> bytes:
    """A real entry with input_sizes built by these instructions."""
    row = pickle.dumps(loaded(PIPELINE)["entries"][0], 2)[2:-1]
    return b"(" + row + text(11, b"input_sizes") + sizes + b"s"


def test_memory_bombs_kill_one_worker_and_the_parent_stays_small() -> None:
    bombs = {
        "a million tables": b"\x80\x02" + b"}" * (64 * MEGABYTE - 3) + b".",
        "a list of a million tables": b"\x80\x02](" + b"}" * (16 * MEGABYTE) + b"e.",
        "entries without end": with_entries(b"](}q\x01" + b"h\x01" * (4 * MEGABYTE) + b"e"),
        "sizes without end": with_entries(b"]" + entry_with(references(30, 100_000)) + b"e"),
        "JSON of lists": b'{"pg_config":[' + b"[]," * (6 * MEGABYTE) + b"[]]}",
        "short texts": b"\x80\x04" + b"\x8c\x00" * (6 * MEGABYTE) + b".",
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with SandboxedReader(memory_bytes=192 * MEGABYTE, cpu_seconds=1) as reader:
        for name, data in bombs.items():
            table = reader.read(data, MAX_ANSWER, 1000)
            assert isinstance(table.get("why"), str), name
            assert table["incomplete"] is False
        assert "columns" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    assert grown < 100, f"{grown:.0f} MB"


def test_an_answer_over_the_size_limit_is_rejected() -> None:
    with SandboxedReader() as reader:
        assert "the parsed content is larger than 500 bytes" in reader.read(NCCL.read_bytes(), 500, 1000)["why"]


def test_a_worker_that_dies_is_replaced() -> None:
    with SandboxedReader() as reader:
        assert "columns" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)
        worker = reader._worker
        assert worker is not None
        worker.kill()
        assert "was killed by signal 9" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)["why"]
        assert "columns" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)


def test_a_worker_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("wattwatch.watcher.diagnosis.flight_recorder.sandbox.subprocess.Popen", refuse)
    with SandboxedReader() as reader:
        assert reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)["why"].endswith(
            "could not be started: Too many open files"
        )


def test_the_worker_imports_no_torch_and_cannot_open_files() -> None:
    with SandboxedReader() as reader:
        reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)
        worker = reader._worker
        assert worker is not None
        maps = Path(f"/proc/{worker.pid}/maps").read_text()
        limits = Path(f"/proc/{worker.pid}/limits").read_text()
        environment = Path(f"/proc/{worker.pid}/environ").read_bytes()
    assert "torch" not in maps
    assert limits.split("Max open files")[1].split()[:2] == ["3", "3"]
    assert limits.split("Max file size")[1].split()[:2] == ["0", "0"]
    assert limits.split("Max address space")[1].split()[0] == str(2**30)
    assert environment == b""


@pytest.mark.parametrize("name", ["wattwatch", "watcher", "json", "pickle", "struct", "sitecustomize"])
def test_files_in_the_working_directory_or_on_pythonpath_do_not_replace_modules_of_the_worker(
    name: str, marker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = tmp_path / "planted"
    planted.mkdir()
    (planted / f"{name}.py").write_text(f"open({str(marker)!r}, 'w').close()")
    monkeypatch.chdir(planted)
    monkeypatch.setenv("PYTHONPATH", str(planted))
    with SandboxedReader() as reader:
        assert "columns" in reader.read(NCCL.read_bytes(), MAX_ANSWER, 1000)


REAL: Final = [
    NCCL.read_bytes(),
    GLOO.read_bytes(),
    PIPELINE.read_bytes(),
    as_json(loaded(NCCL)),
    as_json(loaded(PIPELINE)),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutated_records_are_read_or_rejected_and_run_nothing(marker: Path, data: st.DataObject) -> None:
    changed = bytearray(data.draw(st.sampled_from(REAL)))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(changed) - 1))
        match data.draw(st.sampled_from(("flip", "cut", "copy", "insert"))):
            case "flip":
                changed[at] = data.draw(st.integers(0, 255))
            case "cut":
                del changed[at : at + data.draw(st.integers(1, 40))]
            case "copy":
                changed[at:at] = changed[at // 2 : at // 2 + 20]
            case _:
                changed[at:at] = data.draw(st.sampled_from(list(code_pickles(marker).values())))[2:]
        if not changed:
            break
    table = parse_record_bytes(bytes(changed), 100)
    assert isinstance(table.get("why", ""), str)
    assert "why" in table or "columns" in table


JUNK: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=3),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=5,
)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_records_with_arbitrary_values_are_read_or_rejected(data: st.DataObject) -> None:
    dump: Any = loaded(data.draw(st.sampled_from((NCCL, PIPELINE))))
    for _ in range(data.draw(st.integers(1, 3))):
        at = dump
        while True:
            places = list(at) if isinstance(at, dict) else list(range(len(at)))
            place = data.draw(st.sampled_from(places)) if places else None
            if place is None:
                break
            below = at[place]
            if not isinstance(below, dict | list) or not below or data.draw(st.booleans()):
                if isinstance(at, dict | list):
                    at[place] = data.draw(JUNK)
                break
            at = below
    table = parse_record_bytes(pickle.dumps(dump, 2), 100)
    assert "why" in table or "columns" in table
