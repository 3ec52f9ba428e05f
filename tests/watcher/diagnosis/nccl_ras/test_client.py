"""A session with RAS, and with what is not RAS. Nothing that the other end does may raise or last."""

from __future__ import annotations

import re
import socket
import threading

import pytest

from tests.watcher.diagnosis.nccl_ras.ras_servers import floods, sends, sends_and_stalls, serving, speaks_ras
from tests.watcher.diagnosis.nccl_ras.sample_reports import sample
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.client import poll_twice, request_report
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls, parse_report

REPORT = sample("desync_crossed_counts_poll1.json")
TEXT = sample("status_stopped_process.txt")


class StillClock(Clock):
    """Stands still unless moved; waiting moves it."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 0.0)
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.now += max(0.0, seconds)
        return event.is_set()


class Drip:
    """A channel whose other end sends one byte a second, for ever."""

    def __init__(self, clock: StillClock, data: bytes) -> None:
        self.clock = clock
        self.data = data
        self.sent = 0
        self.timeouts: list[float] = []
        self.closed = False

    def sendall(self, data: bytes, /) -> None: ...

    def recv(self, size: int, /) -> bytes:
        if not self.timeouts or self.timeouts[-1] < 1.0:
            self.clock.now += self.timeouts[-1]
            raise TimeoutError
        self.clock.now += 1.0
        self.sent += 1
        return self.data[self.sent - 1 : self.sent] or b" "

    def settimeout(self, seconds: float | None, /) -> None:
        assert seconds is not None
        self.timeouts.append(seconds)

    def close(self) -> None:
        self.closed = True


def test_json_comes_as_it_was_sent() -> None:
    with serving(speaks_ras(lambda: REPORT)) as server:
        answer = request_report(server.connect(), Clock())
    assert (answer.raw, answer.form, answer.suffix, answer.trouble) == (REPORT, "json", ".json", None)
    said = re.findall(r"^C: (.*)\\n$", sample("wire_session_json.txt").decode(), re.MULTILINE)
    assert server.commands == said == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_server_that_knows_no_json_is_asked_for_text(line_end: bytes) -> None:
    with serving(speaks_ras(lambda: TEXT, knows_json=False, line_end=line_end)) as server:
        answer = request_report(server.connect(), Clock())
    assert (answer.raw, answer.form, answer.suffix, answer.trouble) == (TEXT, "text", ".txt", None)


def test_a_stalled_server_is_left_at_the_deadline() -> None:
    with serving(sends_and_stalls(b"")) as server:
        answer = request_report(server.connect(), Clock(), deadline_seconds=0.2)
    assert (answer.raw, answer.trouble) == (b"", "it did not finish within 0.2 s")


def test_a_report_that_stalls_half_way_is_kept_as_far_as_it_came() -> None:
    with serving(sends_and_stalls(b"SERVER PROTOCOL 2\nOK\nOK\n" + REPORT[:2000])) as server:
        answer = request_report(server.connect(), Clock(), deadline_seconds=0.3)
    assert answer.raw == REPORT[:2000]
    assert answer.trouble == "it did not finish within 0.3 s; 2,000 bytes of the report had come and are kept"


@pytest.mark.parametrize("data", [b"", b"SERVER PROTOCOL 2\nOK\nOK\n" + REPORT])
def test_a_drip_of_bytes_does_not_extend_the_deadline(data: bytes) -> None:
    clock = StillClock()
    drip = Drip(clock, data)
    answer = request_report(drip, clock, deadline_seconds=60.0)
    assert answer.trouble is not None
    assert "it did not finish within 60 s" in answer.trouble
    assert clock.now - 100.0 <= 61.0
    assert drip.timeouts == sorted(drip.timeouts, reverse=True)
    assert drip.closed


def test_a_flood_is_cut_at_the_limit_and_kept() -> None:
    with serving(floods) as server:
        answer = request_report(server.connect(), Clock(), byte_limit=100_000)
    assert len(answer.raw) == 100_000
    assert answer.trouble == "it sends more than 100,000 bytes; 100,000 bytes of the report had come and are kept"


def test_bytes_without_an_end_of_line_are_no_greeting() -> None:
    with serving(sends(b"\x16\x03" * 50_000)) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.trouble is not None
    assert "no line: no NCCL RAS" in answer.trouble


def test_another_service_on_the_port_is_named() -> None:
    with serving(sends(b"SSH-2.0-OpenSSH_9.6\r\n")) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.trouble is not None
    assert "it answers 'SSH-2.0-OpenSSH_9.6', not as NCCL RAS does" in answer.trouble


def test_a_server_that_closes_at_once_is_told() -> None:
    with serving(sends(b"")) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.raw == b""
    assert answer.trouble is not None
    assert answer.trouble.startswith(("it closed the connection at 'CLIENT PROTOCOL 2'", "the connection broke"))


def test_a_report_cut_in_the_middle_is_kept_and_read_as_far_as_it_goes() -> None:
    with serving(speaks_ras(lambda: REPORT[:5000])) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.raw == REPORT[:5000]
    assert answer.trouble == "it closed the connection within its report, after 5,000 bytes"
    assert len(parse_report(answer.raw).communicators[0].ranks) > 5


def test_no_report_and_a_refusal_are_told_apart() -> None:
    with serving(speaks_ras(lambda: b"")) as server:
        assert request_report(server.connect(), Clock()).trouble == "it closed the connection without a report"
    with serving(speaks_ras(lambda: b"ERROR: Unknown command verbose status\n")) as server:
        assert request_report(server.connect(), Clock()).trouble == "it refuses: ERROR: Unknown command verbose status"


def test_two_polls_each_on_its_own_connection_give_a_reading() -> None:
    files = iter([REPORT, sample("desync_crossed_counts_poll2.json")])
    clock = StillClock()
    with serving(speaks_ras(lambda: next(files))) as server:
        polled = poll_twice(server.connect, clock, 8.0)
    assert (polled.apart_seconds, polled.trouble) == (8.0, None)
    named = [(f"ras-{number}", answer.raw) for number, answer in enumerate(polled.answers, 1)]
    reading = analyze_ras([parse_polls("node-01", named, polled.apart_seconds, polled.trouble)])
    assert [suspect.job_rank for suspect in reading.suspects] == [3]
    assert "frozen over 8 s" in reading.why


def test_nothing_that_listens_says_what_that_may_mean() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    polled = poll_twice(lambda: socket.create_connection(address, timeout=10), StillClock())
    assert (polled.answers, polled.apart_seconds) == ((), None)
    assert polled.trouble == (
        "nothing listens on 127.0.0.1:28028: NCCL older than 2.24, or NCCL_RAS_ENABLE=0, or no NCCL job"
    )


@pytest.mark.parametrize(
    ("error", "trouble"),
    [
        (
            PermissionError("forwarding is forbidden there"),
            "not allowed to connect to n1:28028: forwarding is forbidden there",
        ),
        (TimeoutError("timed out"), "no connection to n1:28028: timed out"),
        (EOFError(), "no connection to n1:28028: EOFError"),
    ],
)
def test_a_connection_that_cannot_be_made_is_told(error: Exception, trouble: str) -> None:
    def connect() -> socket.socket:
        raise error

    assert poll_twice(connect, StillClock(), place="n1:28028").trouble == trouble


def test_the_first_report_is_kept_where_the_second_fails() -> None:
    files = iter([REPORT, b""])
    with serving(speaks_ras(lambda: next(files))) as server:
        polled = poll_twice(server.connect, StillClock())
    assert [answer.raw for answer in polled.answers] == [REPORT]
    assert polled.apart_seconds is None
    assert polled.trouble == ("second report: NCCL RAS on 127.0.0.1:28028: it closed the connection without a report")


def test_a_stop_ends_the_wait_with_one_report() -> None:
    stop = threading.Event()
    stop.set()
    with serving(speaks_ras(lambda: REPORT)) as server:
        polled = poll_twice(server.connect, StillClock(), stop=stop)
    assert (len(polled.answers), polled.trouble) == (1, "stopped before the second report")
