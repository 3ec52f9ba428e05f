"""A real sshd is killed, frozen, garbled and re-keyed while a fleet watches: right status, recovery, nothing left."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import paramiko
import pytest

from tests.collectors.ssh.real_sshd import RealSshd, Site, new_key
from tests.collectors.ssh.running_fleet import RunningFleet, running_fleet
from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.clock import Clock
from wattwatch.collectors.samples import HostStatus, NodeSample
from wattwatch.collectors.ssh.model import UnreachableCause
from wattwatch.collectors.ssh.node_connection import SILENT_SECONDS
from wattwatch.collectors.ssh.stream import ProbeStream


def until_nothing_is_left(server: RealSshd) -> None:
    ends = time.monotonic() + DEADLINE_SECONDS
    while server.left_behind():
        assert time.monotonic() < ends, f"left on the node: {server.left_behind()}"
        time.sleep(0.05)


def test_a_session_killed_mid_line_is_replaced_and_leaves_no_process(here: Site) -> None:
    node = here.server()
    with running_fleet(here.settings()) as watch:
        watch.until_lines(2)
        assert len(node.left_behind()) == 1
        node.kill_sessions()
        watch.until(lambda: watch.link().logins == 2, "a second login")
        watch.until_lines(2)
        assert watch.link().status is HostStatus.OK
        assert len(node.left_behind()) == 1, "the first probe has ended, the second runs"
    until_nothing_is_left(node)


def test_a_server_that_is_down_is_reported_and_reconnected(here: Site) -> None:
    node = here.server()
    with running_fleet(here.settings(), clock=Clock(4)) as watch:
        watch.until_lines(1)
        node.stop()
        link = watch.until_status(HostStatus.UNREACHABLE)
        watch.until(lambda: "connection refused" in watch.link().detail, "the reason in words")
        assert "is sshd running?" in watch.link().detail
        assert watch.link().cause is UnreachableCause.REFUSED
        assert link.last_line_age_seconds is not None
        until_nothing_is_left(node)
        node.start()
        watch.until_status(HostStatus.OK)


def test_a_frozen_sshd_is_unreachable_in_time_and_its_probe_ends_when_it_thaws(here: Site) -> None:
    node = here.server()
    with running_fleet(here.settings(connect_timeout_seconds=9.0), clock=Clock(3)) as watch:
        watch.until_lines(2)
        node.signal_all(signal.SIGSTOP)
        links = [watch.link()]

        def is_unreachable() -> bool:
            links.append(watch.link())
            return links[-1].status is HostStatus.UNREACHABLE

        watch.until(is_unreachable, "the node is unreachable")
        # In time: whenever it was asked, it was never called reachable beyond the limit, nor unreachable before.
        *before, link = links
        assert max(each.last_line_age_seconds or 0.0 for each in before) <= SILENT_SECONDS
        assert link.last_line_age_seconds is not None
        assert link.last_line_age_seconds > SILENT_SECONDS
        assert "no line for" in link.detail
        assert link.cause is UnreachableCause.SILENT
        watch.until(lambda: "no line for" not in watch.link().detail, "the connection is given up")
        watch.until(lambda: "next login" in watch.link().detail or "trying" in watch.link().detail, "another login")
        node.signal_all(signal.SIGCONT)
        watch.until_status(HostStatus.OK)
        watch.until_lines(2)
        assert len(node.left_behind()) == 1
    until_nothing_is_left(node)


def test_a_changed_host_key_has_its_own_status_until_the_old_key_is_back(here: Site) -> None:
    node = here.server()
    old = node.host_key
    with running_fleet(here.settings(connect_timeout_seconds=300.0), clock=Clock(30)) as watch:
        watch.until_lines(1)
        node.stop()
        node.host_key = new_key(here.directory / "another_host_key")
        node.start()
        detail = watch.until_status(HostStatus.HOST_KEY_CHANGED).detail
        shown = paramiko.Ed25519Key(filename=str(node.host_key)).fingerprint
        expected = paramiko.Ed25519Key(filename=str(old)).fingerprint
        assert "CHANGED" in detail
        assert shown in detail.split("expected")[0]
        assert expected in detail.split("expected")[1]
        assert "ssh-keyscan" in detail
        node.stop()
        node.host_key = old
        node.start()
        watch.until(lambda: watch.link().logins == 2, "a second login")


def test_rejected_authentication_has_its_own_status_and_is_not_retried_soon(here: Site) -> None:
    node = here.server()
    node.authorized_keys.write_text("")
    with running_fleet(here.settings()) as watch:
        link = watch.until_status(HostStatus.AUTH_FAILED)
        assert str(here.key) in link.detail
        assert "authorized_keys" in link.detail
        waits = [int(word) for word in link.detail.split() if word.isdecimal()]
        assert max(waits) >= 59
        assert link.failures == 1
        assert watch.samples == []


NO_LINE = "bytes that are not from the probe"
GARBAGE = {
    "10 MB of text": ("yes 'Welcome to the cluster.' | head -c 10000000; cat >/dev/null", "Welcome"),
    "10 MB of noise": ("head -c 10000000 /dev/urandom; cat >/dev/null", NO_LINE),
    "10 MB without a line end": ("head -c 10000000 /dev/zero; cat >/dev/null", NO_LINE),
    "invalid UTF-8": ("printf '\\377\\376\\300\\n'; cat >/dev/null", NO_LINE),
    "ends at once": ("echo no; exit 3", "exit status 3"),
}


@pytest.mark.parametrize(("command", "says"), GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_a_parse_error_in_bounded_memory_and_recovers_without_a_restart(
    here: Site, command: str, says: str
) -> None:
    script = here.directory / "garbage.sh"
    script.write_text(command)
    flag = here.directory / "garble"
    flag.touch()
    node = here.server("node", f'ForceCommand if [ -e {flag} ]; then . {script}; else eval "$SSH_ORIGINAL_COMMAND"; fi')
    with running_fleet(here.settings(), clock=Clock(3)) as watch:
        watch.until(lambda: watch.link().status is HostStatus.PARSE_ERROR, "a parse error")
        link = watch.link()
        assert says in link.detail
        watch.until(lambda: watch.link().garbage_bytes > 0, "garbage counted")
        assert watch.samples == []
        flag.unlink()
        node.kill_sessions()
        watch.until_status(HostStatus.OK)
    until_nothing_is_left(node)


def test_a_greeting_before_the_first_line_and_a_line_cut_in_the_middle_do_no_harm(here: Site) -> None:
    here.server("node", 'ForceCommand echo hello; eval "$SSH_ORIGINAL_COMMAND"')
    with running_fleet(here.settings()) as watch:
        watch.until_lines(2)
        assert watch.link().status is HostStatus.OK
        assert watch.link().garbage_bytes == len("hello")


def test_one_session_per_connection_is_enough(here: Site) -> None:
    here.server("node", "MaxSessions 1")
    with running_fleet(here.settings(renew_after_seconds=2.0)) as watch:
        watch.until(lambda: watch.link().logins >= 2, "a renewal")
        watch.until_lines(2)
        assert watch.link().failures == 0


def test_a_refused_session_is_reported_in_a_sentence(here: Site) -> None:
    here.server("node", "MaxSessions 0")
    with running_fleet(here.settings()) as watch:
        watch.until(lambda: "refused a session" in watch.link().detail, "the reason")
        assert "MaxSessions" in watch.link().detail
        assert watch.link().status is HostStatus.UNREACHABLE


def test_keys_exchanged_every_100_kilobytes_by_both_sides_lose_no_line(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paramiko.packet.Packetizer, "REKEY_BYTES", 100_000)
    padding = here.directory / "padding.sh"
    padding.write_text("while read -r line; do printf '%s\\n%050000d\\n%050000d\\n' \"$line\" 0 0; done\n")
    here.server("node", "RekeyLimit 100K", f'ForceCommand eval "$SSH_ORIGINAL_COMMAND" | sh {padding}')
    with running_fleet(here.settings(), interval_seconds=0.2) as watch:
        watch.until_lines(12)
        sequences = [sample.sequence for sample in watch.samples]
        assert sequences == list(range(len(sequences)))
        assert watch.link().logins == 1
        assert watch.link().garbage_bytes > 1_000_000


def test_renewal_is_make_before_break_and_neither_loses_nor_repeats_a_sample(
    here: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Judged by the lines that arrived, however late a slow machine prints them."""
    node = here.server()
    lines: dict[ProbeStream, list[NodeSample]] = {}  # all that were received, whether or not they were delivered
    parse = ProbeStream.parse

    def parse_and_keep(stream: ProbeStream, line: bytes, now: float) -> NodeSample | None:
        sample = parse(stream, line, now)
        if sample is not None:
            lines.setdefault(stream, []).append(sample)
        return sample

    monkeypatch.setattr(ProbeStream, "parse", parse_and_keep)
    with running_fleet(here.settings(renew_after_seconds=1.5), interval_seconds=0.5) as watch:

        def streams_in_use() -> int:
            of_samples = {id(sample) for sample in watch.samples}
            return sum(any(id(sample) in of_samples for sample in received) for received in list(lines.values()))

        watch.until(lambda: streams_in_use() >= 3, "two renewals")
        watch.until_lines(2)
        assert watch.link().failures == 0
    samples = [*watch.samples, *watch.fleet.drain()]
    delivered = {id(sample) for sample in samples}
    assert len(delivered) == len(samples)
    times = [sample.node_seconds for sample in samples]
    assert times == sorted(times)
    before: NodeSample | None = None  # the last one that the old stream delivered
    unused: list[NodeSample] = []  # of the old stream, after that
    for received in lines.values():  # in the order of the logins
        places = [place for place, sample in enumerate(received) if id(sample) in delivered]
        if not places:
            continue  # it has not taken over yet
        first, last = places[0], places[-1]
        assert places == list(range(first, last + 1)), "a line of the stream in use was lost"
        sequences = [sample.sequence for sample in received[first : last + 1]]
        assert sequences == list(range(sequences[0], sequences[0] + len(places)))
        if before is not None:
            # The first line is printed at the start of the probe, all others at the instants that both share.
            newer = [sample.node_seconds - before.node_seconds >= 0.25 for sample in received[1 : first + 1]]
            assert newer == [False] * (first - 1) + [True], "the first that the old one did not deliver takes over"
            assert all(received[first].node_seconds - sample.node_seconds < 0.25 for sample in unused)
        before, unused = received[last], received[last + 1 :]
    until_nothing_is_left(node)


def test_many_reconnections_leave_no_thread_no_descriptor_and_no_process(here: Site) -> None:
    node = here.server()
    with running_fleet(here.settings(), interval_seconds=0.2) as watch:
        watch.until_lines(2)
        before = steady_state(watch)
        for logins in range(2, 8):
            node.kill_sessions()
            # Each loss of a young stream doubles the longest wait, which is not the subject here.
            watch.fleet._nodes["node"].failures_in_a_row = 0
            watch.until(lambda wanted=logins: watch.link().logins >= wanted, f"{logins} logins")  # type: ignore[misc]  # a default argument binds the loop's value
            watch.until_lines(1)
        assert steady_state(watch) == before
        assert len(node.left_behind()) == 1
    until_nothing_is_left(node)


def steady_state(watch: RunningFleet) -> tuple[int, int]:
    """Threads and descriptors once nothing changes any more."""
    seen: list[tuple[int, int]] = []
    ends = time.monotonic() + DEADLINE_SECONDS
    while len(seen) < 5 or len(set(seen[-5:])) > 1:
        assert time.monotonic() < ends, f"never steady: {seen[-5:]}"
        watch.until_lines(1)
        seen.append((threading.active_count(), len(os.listdir("/proc/self/fd"))))
    return seen[-1]


def test_stopping_ends_every_probe_and_thread(here: Site) -> None:
    before = {thread.name for thread in threading.enumerate()}
    nodes = [here.server(f"node{number}") for number in range(3)]
    names = tuple(node.name for node in nodes)
    with running_fleet(here.settings(), nodes=names) as watch:
        for name in names:
            watch.until_lines(1, name)
    for node in nodes:
        until_nothing_is_left(node)
    ends = time.monotonic() + DEADLINE_SECONDS
    while {thread.name for thread in threading.enumerate()} - before:
        assert time.monotonic() < ends, threading.enumerate()
        time.sleep(0.02)


def test_idle_transports_wake_every_few_seconds_not_ten_times_a_second(here: Site) -> None:
    """paramiko polls its socket each 0.1 s; a release that sets the timeout again would cost two thirds more CPU."""
    here.server()
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        stream = watch.fleet._nodes["node"].stream
        assert stream is not None
        assert stream.connection.transport.sock.gettimeout() == 5.0


def test_every_accepted_line_is_passed_on_unchanged(here: Site) -> None:
    here.server()
    lines: list[tuple[str, bytes]] = []
    with running_fleet(here.settings(), on_line=lambda node, _, line: lines.append((node, line))) as watch:
        watch.until_lines(2)
        assert [node for node, _ in lines[:2]] == ["node", "node"]
        assert all(line.startswith(b'{"v":1,') for _, line in lines)


def test_an_unresolvable_name_is_distinguished_from_a_silent_host(here: Site, tmp_path: Path) -> None:
    here.config.write_text("Host *\n  IdentityFile none\n")
    with running_fleet(here.settings(), nodes=("no-such-host.invalid",)) as watch:
        watch.until(lambda: "cannot resolve the name" in watch.link("no-such-host.invalid").detail, "the reason")
