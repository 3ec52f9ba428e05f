"""A session with RAS, or with something else. Nothing that the other end does may raise or last."""

from __future__ import annotations

import re
import socket
import threading

import pytest

from tests.tools import DEADLINE_SECONDS
from tests.watcher.diagnosis.nccl_ras.ras_servers import floods, sends, sends_and_stalls, serving, speaks_ras
from tests.watcher.diagnosis.nccl_ras.sample_reports import sample
from wattwatch.collectors.clock import Clock
from wattwatch.watcher.diagnosis.nccl_ras.analysis import analyze_ras
from wattwatch.watcher.diagnosis.nccl_ras.client import poll_twice, request_report
from wattwatch.watcher.diagnosis.nccl_ras.parse import parse_polls, parse_report

REPORT = sample("desync_crossed_counts_poll1.json")
TEXT = sample("status_stopped_process.txt")
ADDRESS = "127.0.0.1:28028"


class StillClock(Clock):
    """Does not advance by itself; waiting advances it."""

    def __init__(self) -> None:
        super().__init__(1.0, 0.0, 0.0)
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        self.now += max(0.0, seconds)
        return event.is_set()


class Drip:
    """A channel whose other end sends one byte per second, forever."""

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


def test_json_is_returned_as_it_was_sent() -> None:
    with serving(speaks_ras(lambda: REPORT)) as server:
        answer = request_report(server.connect(), Clock())
    assert (answer.raw, answer.report_format, answer.suffix, answer.problem) == (REPORT, "json", ".json", None)
    expected = re.findall(r"^C: (.*)\\n$", sample("wire_session_json.txt").decode(), re.MULTILINE)
    assert server.commands == expected == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "VERBOSE STATUS"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_a_server_without_json_is_asked_for_text(line_end: bytes) -> None:
    with serving(speaks_ras(lambda: TEXT, knows_json=False, line_end=line_end)) as server:
        answer = request_report(server.connect(), Clock())
    assert (answer.raw, answer.report_format, answer.suffix, answer.problem) == (TEXT, "text", ".txt", None)


def test_a_stalled_server_is_abandoned_at_the_deadline() -> None:
    with serving(sends_and_stalls(b"")) as server:
        answer = request_report(server.connect(), Clock(), deadline_seconds=0.2)
    assert (answer.raw, answer.problem) == (b"", "the server did not finish within 0.2 s")


def test_a_report_that_stalls_half_way_is_kept_up_to_there() -> None:
    with serving(sends_and_stalls(b"SERVER PROTOCOL 2\nOK\nOK\n" + REPORT[:2000])) as server:
        for seconds in (0.3, 3.0, 30.0):  # a slow machine needs more to send the first half
            answer = request_report(server.connect(), Clock(), deadline_seconds=seconds)
            if len(answer.raw) == 2000:
                break
    assert answer.raw == REPORT[:2000]
    assert (
        answer.problem
        == f"the server did not finish within {seconds:g} s; the 2,000 bytes received before that are kept"
    )


@pytest.mark.parametrize("data", [b"", b"SERVER PROTOCOL 2\nOK\nOK\n" + REPORT])
def test_a_drip_of_bytes_does_not_extend_the_deadline(data: bytes) -> None:
    clock = StillClock()
    drip = Drip(clock, data)
    answer = request_report(drip, clock, deadline_seconds=60.0)
    assert answer.problem is not None
    assert "the server did not finish within 60 s" in answer.problem
    assert clock.now - 100.0 <= 61.0
    assert drip.timeouts == sorted(drip.timeouts, reverse=True)
    assert drip.closed


def test_a_flood_is_cut_at_the_limit_and_kept() -> None:
    with serving(floods) as server:
        answer = request_report(server.connect(), Clock(), max_bytes=100_000)
    assert len(answer.raw) == 100_000
    assert answer.problem == "the server sent more than 100,000 bytes; the 100,000 bytes received before that are kept"


def test_bytes_without_a_line_break_are_not_a_greeting() -> None:
    with serving(sends(b"\x16\x03" * 50_000)) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.problem is not None
    assert "no line break: it is probably not NCCL RAS" in answer.problem


def test_another_service_on_the_port_is_reported() -> None:
    with serving(sends(b"SSH-2.0-OpenSSH_9.6\r\n")) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.problem is not None
    assert "the answer 'SSH-2.0-OpenSSH_9.6' is not from NCCL RAS" in answer.problem


def test_a_server_that_closes_at_once_is_reported() -> None:
    with serving(sends(b"")) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.raw == b""
    assert answer.problem is not None
    assert answer.problem.startswith(
        ("the server closed the connection after the command 'CLIENT PROTOCOL 2'", "the connection failed")
    )


def test_a_report_cut_off_in_the_middle_is_kept_and_parsed_up_to_there() -> None:
    with serving(speaks_ras(lambda: REPORT[:5000])) as server:
        answer = request_report(server.connect(), Clock())
    assert answer.raw == REPORT[:5000]
    assert answer.problem == "the server closed the connection in the middle of its report, after 5,000 bytes"
    assert len(parse_report(answer.raw).communicators[0].ranks) > 5


def test_no_report_and_a_rejected_request_are_distinguished() -> None:
    with serving(speaks_ras(lambda: b"")) as server:
        assert request_report(server.connect(), Clock()).problem == "the server closed the connection without a report"
    with serving(speaks_ras(lambda: b"ERROR: Unknown command verbose status\n")) as server:
        assert (
            request_report(server.connect(), Clock()).problem
            == "the server rejected the request: ERROR: Unknown command verbose status"
        )


def test_two_polls_on_two_connections_can_be_analyzed() -> None:
    files = iter([REPORT, sample("desync_crossed_counts_poll2.json")])
    clock = StillClock()
    with serving(speaks_ras(lambda: next(files))) as server:
        polled = poll_twice(server.connect, clock, 8.0, address=ADDRESS)
    assert (polled.interval_seconds, polled.problem) == (8.0, None)
    named = [(f"ras-{number}", answer.raw) for number, answer in enumerate(polled.answers, 1)]
    analysis = analyze_ras([parse_polls("node-01", named, polled.interval_seconds, polled.problem)])
    assert [suspect.job_rank for suspect in analysis.suspects] == [3]
    assert "no progress over 8 s" in analysis.why


def test_a_refused_connection_is_reported_with_possible_causes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    polled = poll_twice(
        lambda: socket.create_connection(address, timeout=DEADLINE_SECONDS), StillClock(), address=ADDRESS
    )
    assert (polled.answers, polled.interval_seconds) == ((), None)
    assert polled.problem == (
        "nothing listens on 127.0.0.1:28028: NCCL is older than 2.24, NCCL_RAS_ENABLE=0 is set, or no NCCL job is "
        "running"
    )


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            PermissionError("forwarding is forbidden there"),
            "not allowed to connect to n1:28028: forwarding is forbidden there",
        ),
        (TimeoutError("timed out"), "cannot connect to n1:28028: timed out"),
        (EOFError(), "cannot connect to n1:28028: EOFError"),
    ],
)
def test_a_failed_connection_is_reported(error: Exception, problem: str) -> None:
    def connect() -> socket.socket:
        raise error

    assert poll_twice(connect, StillClock(), address="n1:28028").problem == problem


def test_the_first_report_is_kept_if_the_second_fails() -> None:
    files = iter([REPORT, b""])
    with serving(speaks_ras(lambda: next(files))) as server:
        polled = poll_twice(server.connect, StillClock(), address=ADDRESS)
    assert [answer.raw for answer in polled.answers] == [REPORT]
    assert polled.interval_seconds is None
    assert polled.problem == (
        "second report: NCCL RAS on 127.0.0.1:28028: the server closed the connection without a report"
    )


def test_a_stop_ends_the_wait_with_one_report() -> None:
    stop = threading.Event()
    stop.set()
    with serving(speaks_ras(lambda: REPORT)) as server:
        polled = poll_twice(server.connect, StillClock(), address=ADDRESS, stop=stop)
    assert (len(polled.answers), polled.problem) == (1, "polling was stopped before the second report")
