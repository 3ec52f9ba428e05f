"""A recording holds what the nodes said and how their links stood, and gives the same samples back."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import orjson
import pytest

import wattwatch
from tests.collectors.test_probe_reader import line, nvml, row
from tests.watcher.command_shell import Shell
from wattwatch.collectors.probe_reader import ProbeReader
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import NodeLink, UnreachableCause
from wattwatch.watcher.config.settings import load_config, probe_request_for
from wattwatch.watcher.daemon.service import Service, ServiceStartError
from wattwatch.watcher.detection.model import JobSpec
from wattwatch.watcher.recordings.format import (
    RecordedEvent,
    RecordingError,
    RecordingWriter,
    is_recording,
    open_recording,
    parse_recording,
    unused_recording_path,
)
from wattwatch.watcher.recordings.inputs import read_input, read_input_file

SPEC = JobSpec(
    name="größe", nodes=("gpu-01", "gpu-02"), run_directory="/runs/a", logs=("/runs/a/*.log",), log_pattern=r"at (\d+)",
    checkpoint_directory="/ckpt", processes="^python", gpus_per_node=8, floor_tokens_per_second=1.5,
    checkpoint_every_seconds=600.0, stall_limit_seconds=90.0, interval_seconds=2.0,
)  # fmt: skip
OK = {node: NodeLink(node, HostStatus.OK, "") for node in SPEC.nodes}
CUT = {**OK, "gpu-02": NodeLink("gpu-02", HostStatus.UNREACHABLE, "no line for 6 s")}


def said(second: int) -> bytes:
    """A node's line: the energy counter grows by 640 J a second."""
    return line(second, 100.0 + second, gpu=nvml(100.0 + second, [row(0, 5_000_000 + 640_000 * second)]))


def record(path: Path, seconds: int = 5) -> Path:
    recorder = RecordingWriter(path, [SPEC])
    for second in range(seconds):
        for node in SPEC.nodes:
            recorder.write_line(node, 10.0 + second, said(second))
        recorder.write_links(CUT if second == 3 else OK, 10.1 + second)
    recorder.close()
    return path


def samples(events: list[RecordedEvent]) -> list[NodeSample]:
    return [event.sample for event in events if event.sample is not None]


def read(path: Path) -> list[RecordedEvent]:
    return list(open_recording(path).events)


def test_the_events_read_back_are_those_that_were_recorded(tmp_path: Path) -> None:
    recording = open_recording(record(tmp_path / "r.gz"))
    assert recording.specs == (SPEC,)
    reader = ProbeReader("gpu-01", probe_request_for([SPEC], "gpu-01"))
    live = [reader.read(said(second), 10.0 + second) for second in range(5)]
    assert [sample for sample in samples(list(recording.events)) if sample.node == "gpu-01"] == live
    assert live[1] is not None
    assert (live[1].gpus or ())[0].power_watts == pytest.approx(640.0)


def test_a_link_is_recorded_when_it_changes_and_the_end_when_it_is_known(tmp_path: Path) -> None:
    events = read(record(tmp_path / "r.gz"))
    links = [(m.seconds, m.link.node, m.link.status) for m in events if m.link is not None]
    assert links == [
        (10.1, "gpu-01", HostStatus.OK),
        (10.1, "gpu-02", HostStatus.OK),
        (13.1, "gpu-02", HostStatus.UNREACHABLE),
        (14.1, "gpu-02", HostStatus.OK),
    ]
    assert events[-1] == RecordedEvent(14.1)


def test_why_a_node_is_unreachable_is_recorded_and_read_from_the_words_of_older_recordings(tmp_path: Path) -> None:
    refused = NodeLink("gpu-01", HostStatus.UNREACHABLE, "as it was", cause=UnreachableCause.REFUSED)
    writer = RecordingWriter(tmp_path / "r.gz", [SPEC])
    writer.write_links({"gpu-01": refused}, 1.0)
    writer.close()
    (link,) = [event.link for event in read(tmp_path / "r.gz") if event.link is not None]
    assert link.cause is UnreachableCause.REFUSED
    with gzip.open(tmp_path / "old.gz", "wb") as old:
        old.write(gzip.decompress((tmp_path / "r.gz").read_bytes()).splitlines(keepends=True)[0])
        for detail in ("connection refused by 10.0.0.1:22; is sshd running?", "cannot resolve the name n1", "anything"):
            record = {"n": "gpu-01", "t": 1.0, "link": "unreachable", "detail": detail}
            old.write(orjson.dumps(record) + b"\n")
        old.write(orjson.dumps({**record, "cause": "of a later version"}) + b"\n")
    causes = [event.link.cause for event in read(tmp_path / "old.gz") if event.link is not None]
    assert causes == [UnreachableCause.REFUSED, UnreachableCause.NAME, None, None]


def test_a_new_connection_has_a_new_probe_whose_counters_start_at_zero(tmp_path: Path) -> None:
    after = [sample for sample in samples(read(record(tmp_path / "r.gz"))) if sample.node == "gpu-02"][-1]
    assert (after.gpus or ())[0].power_source == "power.draw"  # no energy to compare with yet


def test_a_recording_cut_anywhere_is_read_up_to_the_cut(tmp_path: Path) -> None:
    whole = record(tmp_path / "r.gz", seconds=30)
    data, all_samples = whole.read_bytes(), samples(read(whole))
    cut = tmp_path / "cut.gz"
    counts = []
    for length in range(len(data) - 1, 200, -97):
        cut.write_bytes(data[:length])
        try:
            found = samples(read(cut))
        except RecordingError:
            found = []
        assert found == all_samples[: len(found)]
        counts.append(len(found))
    assert counts == sorted(counts, reverse=True)
    assert counts[0] >= 50


def test_lines_before_a_kill_are_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.gz"
    recorder = RecordingWriter(path, [SPEC])
    recorder.write_line("gpu-01", 10.0, said(0))
    recorder.write_links(OK, 10.0)
    assert len(samples(read(path))) == 1  # nobody closed it
    recorder.write_line("gpu-01", 11.0, said(1))
    recorder.write_links(OK, 25.0)
    assert len(samples(read(path))) == 2
    recorder.close()


def test_an_unpacked_recording_is_read_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    packed = record(tmp_path / "r.gz")
    plain = tmp_path / "r.jsonl"
    header, *lines = gzip.decompress(packed.read_bytes()).splitlines(keepends=True)
    odd = [
        b"\n", b"null\n", b"[]\n", b'"t"\n', b"{}\n", b'{"n": "gpu-01"}\n', b"\xff\xfe\n",
        b'{"n": "gpu-01", "t": "soon", "line": "{}"}\n',
        b'{"n": "gpu-01", "t": 11.0, "link": "from a later version"}\n',
        b'{"n": "gpu-01", "t": 11.0, "mark": "of a later version"}\n',
        b'{"n": "gpu-01", "t": 11.0, "line": "garbage"}\n',
        b'{"n": "gpu-01", "t": 11',
    ]  # fmt: skip
    plain.write_bytes(header + b"".join(lines) + b"".join(odd))
    assert is_recording(plain.read_bytes()[:100])
    found = samples(read(plain))
    assert found[:10] == samples(read(packed))
    assert {sample.status for sample in found[10:]} <= {HostStatus.PARSE_ERROR}


def test_a_recording_is_recognized_by_its_content_from_a_file_and_from_a_pipe(tmp_path: Path) -> None:
    path = record(tmp_path / "looks-like.csv")
    for source in (read_input_file(path), read_input("-", path.read_bytes())):
        assert source.specs == (SPEC,)
        assert len(samples(list(source.events))) == 10


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the first line is not a valid header"),
        (b"\n", "the first line is not a valid header"),
        (b"[]\n", "the first line is not a valid header"),
        (b'{"format": "wattwatch-recording"}\n', "the first line is not a valid header"),
        (
            b'{"format": "wattwatch-recording", "version": 1, "jobs": [{"nodes": 3}]}\n',
            "the first line is not a valid header",
        ),
        (
            b'{"format": "wattwatch-recording", "version": 7, "jobs": []}\n',
            "the recording has version 7, but this wattwatch reads only version 1",
        ),
        (b'{"format": "other", "version": 1, "jobs": []}\n', "the first line is not a valid header"),
        (gzip.compress(b"nothing of ours", mtime=0), "the first line is not a valid header"),
    ],
)
def test_a_file_that_is_not_a_recording_is_an_error_in_one_sentence(content: bytes, words: str) -> None:
    with pytest.raises(RecordingError, match=words) as refused:
        parse_recording("some.gz", io.BytesIO(content))
    assert str(refused.value).startswith("some.gz: ")


def test_a_file_that_cannot_be_opened_is_an_error_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RecordingError, match="cannot read the file: No such file"):
        open_recording(tmp_path / "none")


def test_a_full_disk_ends_the_recording_and_nothing_else() -> None:
    recorder = RecordingWriter(Path("/dev/full"), [SPEC])
    for second in range(20):
        recorder.write_line("gpu-01", float(second), said(second))
        recorder.write_links(OK, float(second))
    assert recorder.error == "recording stopped: No space left on device"
    recorder.write_line("gpu-01", 21.0, said(21))
    recorder.close()
    recorder.close()


def test_writing_to_a_closed_recording_does_nothing(tmp_path: Path) -> None:
    recorder = RecordingWriter(tmp_path / "r.gz", [SPEC])
    recorder.close()
    recorder.write_line("gpu-01", 1.0, said(1))
    recorder.close()
    assert recorder.error is None
    assert read(tmp_path / "r.gz") == []


def test_bytes_that_are_not_text_do_not_stop_the_recording(tmp_path: Path) -> None:
    recorder = RecordingWriter(tmp_path / "r.gz", [SPEC])
    recorder.write_line("gpu-01", 1.0, b"\xff\x00 motd \x1b[0m")
    recorder.write_line("gpu-01", 2.0, said(1))
    recorder.close()
    assert samples(read(tmp_path / "r.gz"))[-1].status is HostStatus.OK
    header = gzip.decompress((tmp_path / "r.gz").read_bytes()).splitlines()[0]
    assert orjson.loads(header)["jobs"][0]["name"] == SPEC.name


def test_a_service_that_cannot_record_does_not_start_and_says_why(tmp_path: Path) -> None:
    config = tmp_path / "wattwatch.toml"
    config.write_text(
        f'[watcher]\nlisten = "127.0.0.1:0"\nstate_directory = "{tmp_path}/state"\n[[jobs]]\nname = "a"\nnodes = "n"\n'
    )
    with pytest.raises(ServiceStartError, match=r"No such file or directory: .*absent"):
        Service(load_config(config), record=tmp_path / "absent" / "r.gz").start()
    service = Service(load_config(config), record=tmp_path / "r.gz")
    service.start()  # what had begun was undone
    service.stop()
    assert [spec.name for spec in open_recording(tmp_path / "r.gz").specs] == ["a"]


def test_a_recording_is_never_written_over_another(tmp_path: Path) -> None:
    first = record(tmp_path / "r.wattwatch.gz")
    content = first.read_bytes()
    with pytest.raises(FileExistsError):
        RecordingWriter(first, [SPEC])
    assert first.read_bytes() == content
    second = unused_recording_path(first)
    assert second == tmp_path / "r-2.wattwatch.gz"
    record(second)
    assert unused_recording_path(first) == tmp_path / "r-3.wattwatch.gz"
    (tmp_path / "empty").touch()  # as mktemp makes it
    assert unused_recording_path(tmp_path / "empty") == tmp_path / "empty"
    assert unused_recording_path(Path("/dev/null")) == Path("/dev/null")


# What a reader must know of the file


def test_a_recording_without_its_end_says_so(shell: Shell, tmp_path: Path) -> None:
    whole = record(tmp_path / "r.gz", seconds=40)
    assert "The end of the recording is missing" not in shell.run("replay", whole).out
    (said,) = shell.run("replay", "--json", whole).json
    assert said["problem"] is None
    cut = tmp_path / "cut.gz"
    cut.write_bytes(whole.read_bytes()[:-30])
    lines = gzip.decompress(whole.read_bytes()).splitlines(keepends=True)
    killed = tmp_path / "killed.gz"
    killed.write_bytes(gzip.compress(b"".join(lines[:-1])))
    for path in (cut, killed):
        assert "The end of the recording is missing" in shell.run("replay", path).out
        (said,) = shell.run("replay", "--json", path).json
        assert "The end of the recording is missing" in said["problem"]
        (said,) = shell.run("triage", "--json", path).json
        assert "The end of the recording is missing" in said["why"]
    (said,) = shell.run("triage", "--json", whole).json
    assert "end of the recording" not in said["why"]


def test_a_recording_without_samples_is_unknown_and_not_without_alerts(shell: Shell, tmp_path: Path) -> None:
    RecordingWriter(tmp_path / "r.gz", [SPEC]).close()
    recorder = RecordingWriter(tmp_path / "links.gz", [SPEC])
    recorder.write_links({node: NodeLink(node, HostStatus.UNREACHABLE, "refused") for node in SPEC.nodes}, 1.0)
    recorder.close()
    for name in ("r.gz", "links.gz"):
        answer = shell.run("replay", tmp_path / name)
        assert answer.exit_code == 3
        assert "no alerts" not in answer.out
        assert "contains no samples of any node" in answer.err
        answer = shell.run("triage", "--json", tmp_path / name)
        (said,) = answer.json
        assert (said["state"], answer.exit_code) == ("unknown", 3)
        assert "contains no samples of any node" in said["why"]
    (verdict,) = wattwatch.triage(tmp_path / "r.gz")
    assert verdict.state == "unknown"
