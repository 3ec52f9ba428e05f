"""More channels on a connection: a result or a sentence, and no effect on the probe."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.collectors.ssh.real_sshd import RealSshd, Site, free_port
from tests.collectors.ssh.running_fleet import RunningFleet, running_fleet
from tests.tools import DEADLINE_SECONDS
from wattwatch.collectors.samples import HostStatus
from wattwatch.collectors.ssh.channels import MAX_STDIN_BYTES, CommandResult

KEPT = 10_000_000


def run(
    watch: RunningFleet, command: str, stdin: bytes = b"", seconds: float = DEADLINE_SECONDS, most: int = KEPT
) -> tuple[CommandResult, bytes]:
    output = bytearray()
    ran = watch.fleet.channels("node").run(command, stdin, output.extend, deadline_seconds=seconds, byte_limit=most)
    return ran, bytes(output)


@pytest.fixture
def node(here: Site) -> RealSshd:
    return here.server()


@pytest.fixture
def watch(here: Site, node: RealSshd) -> Iterator[RunningFleet]:
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        yield watch
        watch.until_lines(2)  # the probe goes on, on the connection that it had
        assert watch.link().status is HostStatus.OK
        assert watch.link().logins == 1


def test_a_command_gets_its_stdin_and_end_of_file(watch: RunningFleet) -> None:
    ran, output = run(watch, "wc -c; echo so >&2; exit 3", b"x" * MAX_STDIN_BYTES)
    assert output.split() == [str(MAX_STDIN_BYTES).encode()]
    assert ran == CommandResult(3, "so")


def test_a_command_that_exits_before_reading_its_input_reports_its_exit_status(watch: RunningFleet) -> None:
    for _ in range(20):  # its channel may be closed before, between or after the writes
        assert run(watch, "exit 127", b"x" * MAX_STDIN_BYTES)[0] == CommandResult(127)


def test_a_command_that_floods_is_cut_off(watch: RunningFleet) -> None:
    ran, output = run(watch, "yes", most=300_000)
    assert len(output) == 300_000
    assert ran.error == "the command printed more than 300,000 bytes"


def test_a_command_that_does_not_end_is_stopped_at_the_deadline_and_its_output_kept(watch: RunningFleet) -> None:
    for seconds in (1.0, 10.0, 100.0):  # a slow machine needs more to start the command
        ran, output = run(watch, "echo first; exec sleep 6000", seconds=seconds)
        assert ran.error == f"the command did not finish within {seconds:.0f} s"
        if output:
            break
    assert output == b"first\n"


def test_many_concurrent_commands_have_a_channel_each(watch: RunningFleet) -> None:
    answers: list[bytes] = []
    threads = [threading.Thread(target=lambda: answers.append(run(watch, "cat", b"x" * 1000)[1])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert answers == [b"x" * 1000] * 8


def test_a_port_of_the_node_is_connected_or_refused(watch: RunningFleet) -> None:
    channels = watch.fleet.channels("node")
    with socket.create_server(("127.0.0.1", 0)) as server:
        channel = channels.connect(server.getsockname()[1], DEADLINE_SECONDS)
        connection, _ = server.accept()
        with channel, connection:
            channel.sendall(b"STATUS\n")
            assert connection.recv(100) == b"STATUS\n"
            connection.sendall(b"OK\n")
            channel.settimeout(DEADLINE_SECONDS)
            assert channel.recv(100) == b"OK\n"
    with pytest.raises(ConnectionRefusedError, match="nothing listens on"):
        channels.connect(free_port(), DEADLINE_SECONDS)


@pytest.mark.parametrize(
    ("options", "action", "words"),
    [
        (("MaxSessions 1",), lambda watch: run(watch, "true")[0].error, "MaxSessions"),
        (("AllowTcpForwarding no",), lambda watch: refused(watch, 28028), 'permitopen="127.0.0.1:28028"'),
    ],
    ids=["MaxSessions", "AllowTcpForwarding"],
)
def test_what_a_node_does_not_allow_is_reported_in_a_sentence(
    here: Site, options: tuple[str, ...], action: Callable[[RunningFleet], str], words: str
) -> None:
    here.server("node", *options)
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        assert words in action(watch)
        watch.until_lines(2)
        assert watch.link().logins == 1


def refused(watch: RunningFleet, port: int) -> str:
    with pytest.raises(PermissionError) as error:
        watch.fleet.channels("node").connect(port, DEADLINE_SECONDS)
    return str(error.value)


def test_the_key_in_deploy_may_run_commands_and_reach_the_port_of_nccl_alone(here: Site) -> None:
    node = here.server()
    example = (Path(__file__).parents[3] / "deploy" / "authorized_keys").read_text()
    options = next(line for line in example.splitlines() if line.startswith("restrict")).split(" ssh-ed25519")[0]
    key = Path(f"{here.key}.pub").read_text()
    node.authorized_keys.write_text(f"{options.replace('10.0.0.5', '127.0.0.1')} {key}")
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        assert run(watch, "cat", b"x")[1] == b"x"
        assert "permitopen" in refused(watch, 9)
        with pytest.raises(ConnectionRefusedError):
            watch.fleet.channels("node").connect(28028, DEADLINE_SECONDS)


def test_a_lost_connection_keeps_the_output_so_far(here: Site) -> None:
    node = here.server()
    with running_fleet(here.settings()) as watch:
        watch.until_lines(1)
        output = bytearray()

        def take(chunk: bytes) -> None:
            output.extend(chunk)
            node.kill_sessions()

        ran = watch.fleet.channels("node").run(
            "echo first; exec sleep 6000", b"", take, deadline_seconds=DEADLINE_SECONDS, byte_limit=KEPT
        )
        assert output == b"first\n"
        assert ran.error is not None
        assert "connection" in ran.error


def test_without_a_connection_the_reason_is_returned(here: Site) -> None:
    node = here.server()
    node.stop()
    with running_fleet(here.settings()) as watch:
        watch.until(lambda: "refused" in watch.link().detail, "a reason")
        assert "connection refused" in (run(watch, "true")[0].error or "")
        with pytest.raises(ConnectionError, match="connection refused"):
            watch.fleet.channels("node").connect(28028, DEADLINE_SECONDS)


def test_too_much_stdin_is_rejected_before_it_is_sent(watch: RunningFleet) -> None:
    with pytest.raises(ValueError, match="32,769 bytes, but only 32,768"):
        run(watch, "cat", bytes(MAX_STDIN_BYTES + 1))
